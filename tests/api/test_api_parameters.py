"""Every parameter of the providers' SDKs is known to the gateway: null and neutral values are taken, and what a policy
cannot honour is refused by name. A parameter that a new release of an SDK adds fails here until it is decided."""

from __future__ import annotations

import re
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from typing import Any

import pytest
from late import installed
from scripted import new_access
from sdk_faults import UNKNOWN, faults

from agl.messages.google import camel
from agl.trainer.gateway.dialects import common
from agl.trainer.gateway.dialects.chat import body as chat
from agl.trainer.gateway.dialects.common import Unsupported
from agl.trainer.gateway.dialects.google import body as google
from agl.trainer.gateway.dialects.messages import body as messages
from agl.trainer.gateway.dialects.responses import body as responses
from agl.trainer.gateway.errors import RequestError

USER = {"role": "user", "content": "hi"}
CONTENT = {"role": "user", "parts": [{"text": "hi"}]}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}
CHAT: dict[str, Any] = {"model": "m", "messages": [USER]}
RESPONSES: dict[str, Any] = {"model": "m", "input": "hi"}
MESSAGES: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [USER]}
COUNTED: dict[str, Any] = {"model": "m", "messages": [USER]}
GOOGLE: dict[str, Any] = {"contents": [CONTENT]}

NEEDED = {"messages", "input", "max_tokens"}
"""Parameters that must have a value."""
HEADERS = {"betas"}
"""Parameters of Anthropic's SDK that it sends as headers alone."""
CLIENT = {
    "http_options", "should_return_http_response", "automatic_function_calling", "automatic_continuation",
}  # fmt: skip
"""Options of Google's SDK that it does not send."""
NO_EFFECT = {
    "chat": set(),
    "responses": {"output_schema"},
    "messages": {"type", "cache_control", "eager_input_streaming", "input_examples"},
    "google": {"response", "responseJsonSchema"},
}
"""API -> documented fields of a function that are taken and dropped: what caches, streams or describes."""


def count_responses(body: Any, access: Any) -> Any:
    return responses.read(body, access, counting=True)


def read_google(body: Mapping[str, Any]) -> Any:
    return google.read(body, new_access())


count_messages = partial(messages.read, counting=True)

READERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "openai.types.chat.completion_create_params:CompletionCreateParamsBase": (chat.read, CHAT),
    "openai.types.responses.response_create_params:ResponseCreateParamsBase": (responses.read, RESPONSES),
    "openai.types.responses.input_token_count_params:InputTokenCountParams": (count_responses, RESPONSES),
    "anthropic.types.message_create_params:MessageCreateParamsBase": (messages.read, MESSAGES),
    "anthropic.types.beta.message_create_params:MessageCreateParamsBase": (messages.read, MESSAGES),
    "anthropic.types.message_count_tokens_params:MessageCountTokensParams": (count_messages, COUNTED),
    "anthropic.types.beta.message_count_tokens_params:MessageCountTokensParams": (count_messages, COUNTED),
}
"""An SDK's type of parameters -> what reads them, and the fields without which nothing is read."""


def of_sdk(name: str) -> Any:
    """A type by its name, "module:Class"; the test is skipped where the installed release has no such module."""
    module, _, kind = name.partition(":")
    if not installed(module):
        pytest.skip(f"{module} is not installed")
    return getattr(import_module(module), kind)


def annotations(kind: Any) -> dict[str, Any]:
    """The fields of a TypedDict and their types; `Required` is left out."""
    return typing.get_type_hints(kind)


def literals(kind: Any) -> Iterator[Any]:
    """The values that a type spells out, those of lists as lists."""
    if typing.get_origin(kind) is typing.Literal:
        yield from typing.get_args(kind)
    elif typing.get_origin(kind) is list:
        yield from ([value] for value in literals(typing.get_args(kind)[0]))
    elif typing.get_origin(kind) is typing.Union:
        for each in typing.get_args(kind):
            yield from literals(each)


@pytest.mark.parametrize("name", READERS)
def test_null_is_taken_for_every_parameter(name: str) -> None:
    read, base = READERS[name]
    kind = of_sdk(name)
    for field in annotations(kind).keys() - NEEDED - HEADERS:
        try:
            read(base | {field: None}, new_access())
        except RequestError as error:
            raise AssertionError(f"{name} has {field!r}, of which nothing is decided: {error.message}") from error


@pytest.mark.parametrize("name", READERS)
def test_every_value_that_an_sdk_spells_out_is_taken_or_refused_by_name(name: str) -> None:
    read, base = READERS[name]
    count = 0
    for field, values in annotations(of_sdk(name)).items():
        for value in literals(values):
            count += 1
            if field in HEADERS:
                continue
            refused = refusal_of(lambda body: read(body, new_access()), base | {field: value})
            assert refused is None or (refused.status, refused.param) == (400, field), (field, value)
            assert refused is None or refused.message.startswith(field), (field, value)
    assert count


HISTORIES = {"openai": {"messages", "input"}, "anthropic": set()}
"""Provider -> parameters that hold what was said before, of which fields that clients add, such as those of another
API, are dropped knowingly. What is read of it is checked."""
NOTHING_TO_NAME = {"model"} | HEADERS
"""Parameters of which any value is taken: the agent's policy answers."""
DROPPED = {
    "openai": re.compile("$^"),
    # What an earlier answer was taken from, and inputs that no model reads.
    "anthropic": re.compile(r".*\.citations\.0.*|tools\.0\.(input_examples\.0|input_schema)\..*|.*\.input\.k"),
}
"""Provider -> places of which any value is taken."""


def beside(read: Callable[..., Any], field: str) -> dict[str, Any]:
    """What a parameter needs beside it."""
    if field == "tool_choice":
        if read is chat.read:
            return {"tools": [{"type": "function", "function": {"name": "f"}}]}
        anthropics = read in (messages.read, count_messages)
        return {"tools": [{"name": "f", "input_schema": SCHEMA} if anthropics else {"type": "function", "name": "f"}]}
    return {"logprobs": True} if field == "top_logprobs" and read is chat.read else {}


@pytest.mark.parametrize("name", READERS)
def test_every_fault_within_a_parameter_is_refused_at_its_place(name: str) -> None:
    read, base = READERS[name]
    taken, misplaced, undecided, count = [], [], [], 0
    provider = name.partition(".")[0]
    for field, kind in annotations(of_sdk(name)).items():
        body = base | beside(read, field)
        for fault in faults(kind) if field not in HISTORIES[provider] | NOTHING_TO_NAME else ():
            count += 1
            place = ".".join(map(str, (field, *fault.path)))
            refused = refusal_of(lambda b: read(b, new_access()), body | {field: fault.value})
            whole = refusal_of(lambda b: read(b, new_access()), body | {field: fault.sound})
            if whole is not None and whole.code == "unknown_parameter":
                undecided.append(whole.param)
            elif refused is None and not DROPPED[provider].match(place):
                taken.append(place)
            elif refused is not None and not is_named(refused, place, whole):
                misplaced.append((place, refused.param, refused.message))
    assert (taken, misplaced, undecided) == ([], [], [])
    assert count > 50


_CALLING = "toolConfig.functionCallingConfig"
_DECLARED = "tools.0.functionDeclarations.0"
_PART = "contents.0.parts.0"


def part(**fields: Any) -> dict[str, Any]:
    """The contents of a request whose first part has these fields."""
    return {"contents": [{"role": "model", "parts": [fields]}, CONTENT]}


GOOGLES: dict[str, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    "ContentDict": ("contents.0.", lambda value: {"contents": [CONTENT | value, CONTENT]}),
    "PartDict": (f"{_PART}.", lambda value: {"contents": [{"parts": [{"text": "see"} | value]}]}),
    "FunctionCallDict": (f"{_PART}.functionCall.", lambda value: part(functionCall={"name": "f"} | value)),
    "FunctionResponseDict": (f"{_PART}.functionResponse.", lambda value: part(functionResponse={"name": "f"} | value)),
    "FunctionDeclarationDict": (
        f"{_DECLARED}.", lambda value: {"tools": [{"functionDeclarations": [{"name": "f"} | value]}]},
    ),
    "ToolDict": ("tools.0.", lambda value: {"tools": [value]}),
    "ToolConfigDict": ("toolConfig.", lambda value: {"toolConfig": value, "tools": FUNCTION}),
    "SafetySettingDict": ("safetySettings.0.", lambda value: {"safetySettings": [value]}),
    "GenerationConfigDict": ("generationConfig.", lambda value: {"generationConfig": value}),
}  # fmt: skip
"""A type of Google's SDK -> what precedes its fields, and the fields of a request with a value of it."""
FUNCTION = [{"functionDeclarations": [{"name": "f", "parametersJsonSchema": SCHEMA}]}]
GOOGLE_DROPPED = re.compile(
    # Schemas have any words; the others have no effect.
    r".*\.(parameters|response|responseSchema|args|partMetadata|mediaResolution|retrievalConfig\.latLng)\..*"
    r"|safetySettings\.0\.(category|threshold|method)|.*\.(mediaResolution|scheduling)"
)
"""Places of which any value is taken."""


@pytest.mark.parametrize("name", GOOGLES)
def test_every_fault_within_a_type_of_googles_sdk_is_refused_at_its_place(name: str) -> None:
    where, fields = GOOGLES[name]
    taken, misplaced, count = [], [], 0
    for fault in faults(of_sdk(f"google.genai.types:{name}")):
        count += 1
        path = (next(iter(camel({step: None}))) if isinstance(step, str) else step for step in fault.path)
        place = where + ".".join(map(str, path))
        refused = refusal_of(read_google, GOOGLE | fields(fault.value))
        whole = refusal_of(read_google, GOOGLE | fields(fault.sound))
        if refused is None and not GOOGLE_DROPPED.fullmatch(place):
            taken.append(place)
        # A single object is a list of one.
        elif refused is not None and refused.param != f"{place}.0.{UNKNOWN}" and not is_named(refused, place, whole):
            misplaced.append((place, refused.param, refused.message))
    assert (taken, misplaced) == ([], [])
    assert count > 3


def is_named(refused: RequestError, place: str, whole: RequestError | None) -> bool:
    """Whether a refusal names the place of a fault. `whole`: the refusal of the same without the fault, if any."""
    param = str(refused.param)
    # An object of a type that is not supported is named itself; of what is not supported, the inside does not matter.
    known = param in (place, place.removesuffix(".type")) or (whole is not None and param == whole.param)
    inside = refused.code == "unsupported_parameter" and place.startswith(f"{param}.")
    return refused.status == 400 and param in refused.message and (known or inside)


READ = (
    (chat.read, CHAT, "top_p", {}),
    (responses.read, RESPONSES, "top_p", {}),
    (messages.read, MESSAGES, "top_p", {}),
    (google.read, GOOGLE, "topP", {"generationConfig": None}),
)


@pytest.mark.parametrize(("read", "base", "name", "nested"), READ)
def test_a_nucleus_of_nothing_is_the_most_likely_token(read: Any, base: Any, name: str, nested: Any) -> None:
    for value, expected in ((0, common.SMALLEST_NUCLEUS), (0.5, 0.5), (1, 1.0), (None, 1.0)):
        asked = {key: {name: value} for key in nested} or {name: value}
        assert read(base | asked, new_access()).chat.sampling.top_p == expected


def test_no_alternatives_need_no_log_probs() -> None:
    assert chat.read(CHAT | {"top_logprobs": 0}, new_access()).chat.sampling.top_logprobs == 0
    with pytest.raises(RequestError, match="top_logprobs needs logprobs=true"):
        chat.read(CHAT | {"top_logprobs": 2}, new_access())


def test_a_request_without_input_is_told_so() -> None:
    with pytest.raises(RequestError, match="input is missing"):
        responses.read({"model": "m"}, new_access())


def test_null_is_taken_for_every_option_of_googles_sdk() -> None:
    kind = of_sdk("google.genai.types:GenerateContentConfig")
    for name in kind.model_fields.keys() - CLIENT:
        field = next(iter(camel({name: None})))
        bodies = [GOOGLE | {field: None}, GOOGLE | {"generationConfig": {field: None}}]
        taken = [body for body in bodies if not refusal_of(read_google, body)]
        assert taken, f"GenerateContentConfig has {name!r}, of which nothing is decided"


def test_every_value_of_googles_enums_is_taken_or_refused_by_name() -> None:
    types = of_sdk("google.genai.types:FunctionCallingConfigMode").__module__
    module = import_module(types)
    for resolution in module.MediaResolution:
        assert refusal_of(read_google, GOOGLE | {"generationConfig": {"mediaResolution": resolution.value}}) is None
    for modality in module.Modality:
        refused = refusal_of(read_google, GOOGLE | {"generationConfig": {"responseModalities": [modality.value]}})
        neutral = modality.value in ("TEXT", "MODALITY_UNSPECIFIED")
        assert (refused is None) == neutral, modality
        assert neutral or (refused and refused.param == "generationConfig.responseModalities")
    declared = [{"functionDeclarations": [{"name": "f", "parametersJsonSchema": SCHEMA}]}]
    for mode in module.FunctionCallingConfigMode:
        calling = {"functionCallingConfig": {"mode": mode.value}}
        assert refusal_of(read_google, GOOGLE | {"tools": declared, "toolConfig": calling}) is None, mode


def refusal_of(read: Callable[[Any], Any], body: Any) -> RequestError | None:
    try:
        read(body)
    except RequestError as error:
        return error
    return None


# -- what is refused with a value -------------------------------------------------------------------------------------


def at(path: str, field: str, value: Any) -> dict[str, Any]:
    """A body of Google's API with a field at a place."""
    function = {"name": "f", "parametersJsonSchema": SCHEMA}
    match path:
        case "":
            return GOOGLE | {field: value}
        case "toolConfig.functionCallingConfig.":
            return GOOGLE | {"toolConfig": {"functionCallingConfig": {field: value}}}
        case "tools.0.":
            return GOOGLE | {"tools": [{field: value}]}
        case "contents.0.parts.0.":
            return part(text="see", **{field: value})
        case "contents.0.parts.0.functionCall." | "contents.0.parts.0.functionResponse.":
            return part(**{path.split(".")[-2]: {"name": "f", field: value}})
        case "tools.0.functionDeclarations.0.":
            return GOOGLE | {"tools": [{"functionDeclarations": [function | {field: value}]}]}
    return GOOGLE | {path[:-1]: {field: value}}


def block(role: str, value: Any) -> dict[str, Any]:
    """A body of Messages that begins with this block."""
    return MESSAGES | {"messages": [{"role": role, "content": [value]}, USER]}


PLACES: dict[str, tuple[Mapping[str, Unsupported], Callable[[str, Any], Any], Callable[[Any], Any], str]] = {
    "Chat Completions": (chat.UNSUPPORTED, lambda f, v: CHAT | {f: v}, lambda b: chat.read(b, new_access()), ""),
    "a message of Chat Completions": (
        chat.UNSUPPORTED_OF_MESSAGE, lambda f, v: CHAT | {"messages": [USER | {f: v}]},
        lambda b: chat.read(b, new_access()), "messages.0.",
    ),
    "Responses": (
        responses.UNSUPPORTED, lambda f, v: RESPONSES | {f: v}, lambda b: responses.read(b, new_access()), "",
    ),
    "a tool of Responses": (
        responses.UNSUPPORTED_OF_TOOL,
        lambda f, v: RESPONSES | {"tools": [{"type": "function", "name": "f", "parameters": SCHEMA, f: v}]},
        lambda b: responses.read(b, new_access()), "tools.0.",
    ),
    "Messages": (messages.UNSUPPORTED, lambda f, v: MESSAGES | {f: v}, lambda b: messages.read(b, new_access()), ""),
    "a tool of Messages": (
        messages.UNSUPPORTED_OF_TOOL, lambda f, v: MESSAGES | {"tools": [{"name": "f", "input_schema": SCHEMA, f: v}]},
        lambda b: messages.read(b, new_access()), "tools.0.",
    ),
    "a message of Messages": (
        messages.UNSUPPORTED_OF_MESSAGE,
        lambda f, v: MESSAGES | {"messages": [{"role": "system", "content": "be brief", f: v}, USER]},
        lambda b: messages.read(b, new_access()), "messages.0.",
    ),
    "a call in Messages": (
        messages.UNSUPPORTED_OF_BLOCK["tool_use"],
        lambda f, v: block("assistant", {"type": "tool_use", "id": "c", "name": "f", "input": {}, f: v}),
        lambda b: messages.read(b, new_access()), "messages.0.content.0.",
    ),
    "a result in Messages": (
        messages.UNSUPPORTED_OF_BLOCK["tool_result"],
        lambda f, v: block("user", {"type": "tool_result", "tool_use_id": "c", "content": "12", f: v}),
        lambda b: messages.read(b, new_access()), "messages.0.content.0.",
    ),
    **{
        f"Google's {path or 'body'}": (refused, lambda f, v, path=path: at(path, f, v), read_google, shown)
        for path, refused, shown in (
            ("", google.UNSUPPORTED_OF_BODY, ""),
            ("generationConfig.", google.UNSUPPORTED_OF_CONFIG, "generationConfig."),
            ("toolConfig.", google.UNSUPPORTED_OF_TOOL_CONFIG, "toolConfig."),
            (f"{_CALLING}.", google.UNSUPPORTED_OF_CALLING, f"{_CALLING}."),
            ("tools.0.", google.UNSUPPORTED_OF_TOOL, "tools.0."),
            (f"{_DECLARED}.", google.UNSUPPORTED_OF_FUNCTION, f"{_DECLARED}."),
            (f"{_PART}.", google.UNSUPPORTED_OF_PART, f"{_PART}."),
            (f"{_PART}.functionCall.", google.UNSUPPORTED_OF_CALL, f"{_PART}.functionCall."),
            (f"{_PART}.functionResponse.", google.UNSUPPORTED_OF_RESULT, f"{_PART}.functionResponse."),
        )
    },
}  # fmt: skip
"""Where documented fields are refused -> which, a body with one of them, what reads it, and what precedes its name."""


@pytest.mark.parametrize("place", PLACES)
def test_a_neutral_value_is_taken_and_any_other_is_refused_by_name(place: str) -> None:
    table, body, read, where = PLACES[place]
    assert table
    for field, refused in table.items():
        for value in (None, *refused.neutral):
            read(body(field, value))
        for value in ("anything else", {"any": "thing"}, [1], 7):
            with pytest.raises(RequestError) as raised:
                read(body(field, value))
            error = raised.value
            assert (error.status, error.code, error.param) == (400, "unsupported_parameter", where + field)
            assert error.message.startswith(f"{where}{field} ")


def test_what_asks_for_nothing_does_not_change_a_request() -> None:
    for table, base, read in (
        (chat.UNSUPPORTED, CHAT, chat.read),
        (responses.UNSUPPORTED, RESPONSES, responses.read),
        (messages.UNSUPPORTED, MESSAGES, messages.read),
    ):
        neutral = {field: refused.neutral[-1] if refused.neutral else None for field, refused in table.items()}
        assert read(base | neutral, new_access()).chat == read(base, new_access()).chat


def test_a_misspelt_field_is_refused_even_when_it_is_null() -> None:
    for read, base in READERS.values():
        with pytest.raises(RequestError, match=r"unknown field 'temprature'; did you mean 'temperature'\?"):
            read(base | {"temprature": None}, new_access())
    with pytest.raises(RequestError, match=r"unknown field 'generationConfig.topp'; did you mean 'topP'\?"):
        read_google(GOOGLE | {"generationConfig": {"topp": None}})


# -- the fields of a function -----------------------------------------------------------------------------------------

FUNCTIONS = {
    "chat": ("openai.types.shared_params.function_definition:FunctionDefinition", {}),
    "responses": ("openai.types.responses.function_tool_param:FunctionToolParam", responses.UNSUPPORTED_OF_TOOL),
    "messages": ("anthropic.types.beta.beta_tool_param:BetaToolParam", messages.UNSUPPORTED_OF_TOOL),
    "google": ("google.genai.types:FunctionDeclaration", google.UNSUPPORTED_OF_FUNCTION),
}
HELD = {
    "chat": {"name", "description", "parameters", "strict"},
    "responses": {"type", "name", "description", "parameters", "strict"},
    "messages": {"name", "description", "input_schema", "strict"},
    "google": {"name", "description", "parameters", "parametersJsonSchema"},
}
"""API -> the fields of a function that the policy sees or is held to."""


@pytest.mark.parametrize("api", FUNCTIONS)
def test_every_field_of_a_function_is_decided(api: str) -> None:
    name, refused = FUNCTIONS[api]
    kind = of_sdk(name)
    fields = camel(kind.model_fields) if api == "google" else annotations(kind)
    undecided = fields.keys() - HELD[api] - NO_EFFECT[api] - refused.keys()
    assert undecided == set(), f"{name} has fields of which nothing is decided"


def test_what_the_sdks_need_is_there() -> None:
    """That all of this is not skipped where the tests of a change run."""
    if not all(installed(name) for name in ("openai", "anthropic", "google.genai")):
        pytest.skip("an environment with one SDK alone")
    for name in (*READERS, *(name for name, _ in FUNCTIONS.values())):
        assert of_sdk(name)
