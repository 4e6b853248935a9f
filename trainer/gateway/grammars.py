"""What the answer to a request is held to: its schema, the calls that it forces or allows, and one call at most.

Invariant: what a request asks for is held, or the request is refused by name, wherever the engine holds to grammars.
"""

from __future__ import annotations

import json
from dataclasses import replace

from agl.extras import install_line
from agl.mdp.types import IntArray
from agl.trainer.engines.base import Completion, json_grammar
from agl.trainer.gateway.calls import ChatRequest, Choice, ServedPolicy
from agl.trainer.gateway.errors import RequestError
from agl.trainer.rendering.normalise import Tools
from agl.trainer.rendering.rendering import Rendering
from agl.trainer.rendering.toolchoice import any_arguments, reads_as_call

UNKNOWN_CALLS = (
    "the model's chat template writes calls so that they cannot be told from other text; leave out the tools or the "
    "schema, or serve the model with a chat template that writes calls in tags"
)
UNKNOWN_ARGUMENTS = (
    "the model writes arguments in a form of its own; declare the tools without strict, or serve the model with a chat "
    "template that writes arguments as JSON"
)
LIKE_CALLS = (
    "the model's chat template writes calls as JSON without a mark, and such an answer can begin as a call does; name "
    "the properties otherwise, require another one, or leave out the tools"
)
ONE_CALL_OF_A_LIST = (
    "parallel_tool_calls: false cannot be held: the model writes all calls as one list, and its engine does not hold "
    f"answers to grammars; leave it out, or install what agl's own engine needs: {install_line('structured')}"
)


def grammar_of(request: ChatRequest, served: ServedPolicy, prompt: IntArray) -> str:
    """The grammar of the answer, in the form of `Sampling.grammar`; "" for an answer that is held to nothing.

    Args:
        prompt: int32 [P], of the answer.

    Raises:
        RequestError: 400, the form of the model's calls cannot be held to what the request asks for.
    """
    if request.force_tool:
        return _grammar_of_forced(request, served)
    reasoning = served.rendering.reasoning(prompt)
    if not request.tools:
        form = "", json.loads(request.sampling.grammar), ""
        return json_grammar([form], served.stop_token_ids, reasoning=reasoning)
    schema = request.sampling.grammar
    strict = is_strict(request.tools)
    if not (schema or strict or is_one_of_a_list(request, served.rendering)):
        return ""
    call = served.rendering.possible_call(request.tools)
    if call is None and schema:
        raise _refused(request.schema_field, "answers", UNKNOWN_CALLS)
    if call is None or (strict and not schema and not call.is_text):
        raise _refused("tools", "their arguments", UNKNOWN_CALLS)
    if strict and not call.rests:
        raise _refused("tools", "their arguments", UNKNOWN_ARGUMENTS)
    if schema and call.trigger == "{" and reads_as_call(json.loads(schema), call):
        raise _refused(request.schema_field, "answers", LIKE_CALLS)
    forms = call.forms
    if not (schema or strict):
        forms = tuple((begin, any_arguments(one, style), end, style) for begin, one, end, style in forms)
    return json_grammar(
        forms,
        served.stop_token_ids,
        trigger=call.trigger,
        otherwise=json.loads(schema) if schema else None,
        several=served.rendering.reads_several_calls and not request.one_call,
        section=call.section,
        reasoning=reasoning,
        spaced=call.is_text,
    )


def _grammar_of_forced(request: ChatRequest, served: ServedPolicy) -> str:
    """The grammar of the rest of a call that the prompt has begun."""
    assert request.force_tool
    call = served.rendering.forced_call(request.tools, request.force_tool)
    if not call.rests and is_strict(request.tools):
        raise _refused("tools", "their arguments", UNKNOWN_ARGUMENTS)
    rests = call.rests or call.loose
    return json_grammar(rests, served.stop_token_ids) if rests else ""


def is_strict(tools: Tools) -> bool:
    """Whether the arguments of a tool have to fit its parameters."""
    return any(tool.get("function", tool).get("strict") for tool in tools or ())


def is_one_of_a_list(request: ChatRequest, rendering: Rendering) -> bool:
    """Whether the answer may have one call, and the model writes all calls as one list, which cannot be cut."""
    may_call_one = bool(request.one_call and request.tools and not request.force_tool)
    return may_call_one and not rendering.tells_calls_apart(request.tools)


def _refused(field: str, what: str, why: str) -> RequestError:
    """The refusal of a request whose schemas the form of the model's calls does not let an answer be held to."""
    return RequestError(400, f"{what} cannot be held to the schema of {field}: {why}", param=field)


def with_one_call(completion: Completion, rendering: Rendering, request: ChatRequest, choice: Choice) -> Completion:
    """An answer up to the end of its first call, as if sampling had ended there."""
    ids = completion.token_ids
    size = rendering.first_call_size(ids, request.tools, forced_ids=choice.forced, prompt_ids=choice.prompt)
    if size == ids.size:
        return completion
    return replace(
        completion,
        token_ids=ids[:size],
        logprobs=completion.logprobs[:size],
        finish_reason="stop",
        top_logprobs=completion.top_logprobs[:size],
        versions=[(first, version) for first, version in completion.versions if first < size],
    )
