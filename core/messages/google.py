"""Google's wire format, in the fields and parts that `read` knows from other APIs. What does not fit is left to it.

Source: Gemini API reference, "Generating content". A field may have either of protobuf's names, `topP` or `top_p`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

OPTIONS = {
    "temperature": "temperature",
    "topP": "top_p",
    "topK": "top_k",
    "maxOutputTokens": "max_tokens",
    "seed": "seed",
    "candidateCount": "n",
    "stopSequences": "stop",
}
"""Fields of `generationConfig`, and what Chat Completions calls them."""
SIGNATURE = "agl"
"""Begins the `thoughtSignature` of the gateway's calls; the call's id follows, for clients that drop the id itself.
Together they are twelve letters, valid base64."""

RESULT_ROLES = ("function", "tool")
"""Roles under which clients send the results of functions; they are read as the user's."""
_NOTES = {"thought", "thoughtSignature", "partMetadata", "mediaResolution"}
"""Fields of a part that say something about it, and are no data."""


def camel(fields: Any) -> dict[str, Any]:
    """An object with the first of protobuf's names for its fields; empty for what is no object."""
    fields = fields if isinstance(fields, Mapping) else {}
    return {_camel_name(name): value for name, value in fields.items()}


def _camel_name(name: str) -> str:
    # Nearly all clients write the first name, and a search for a text costs less than one for a pattern.
    if "_" not in name:
        return name
    return re.sub("_([a-z])", lambda found: found[1].upper(), name)


def listed(value: Any) -> list[Any]:
    """A list; of what is none, one that holds it."""
    return value if isinstance(value, list) else [] if value is None else [value]


def common(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """A request's body with the fields that other APIs have in the place of Google's; another API's body unchanged."""
    if "contents" not in body:
        return body
    fields = camel(body)
    config = camel(fields.get("generationConfig"))
    history = [message(content) for content in listed(body["contents"])]
    waiting: dict[str, list[str]] = {}
    for part in (part for each in history for part in each["parts"]):
        if part["type"] == "tool_call":
            waiting.setdefault(str(part["name"]), []).append(part["id"])
        elif part["type"] == "tool_call_response" and (ids := waiting.get(part["name"])):
            # A result without an id is that of the first call of its name that has none.
            part["id"] = part["id"] or ids[0]
            ids[:] = [each for each in ids if each != part["id"]]
    return {
        **{OPTIONS[name]: value for name, value in config.items() if name in OPTIONS},
        "system": message(fields.get("systemInstruction"))["parts"],
        "messages": history,
        "tools": _functions(listed(fields.get("tools"))),
    }


def message(content: Any) -> dict[str, Any]:
    """A `Content` as a message in OpenTelemetry's form."""
    fields = camel(content)
    role = fields.get("role") or "user"
    parts = [found for part in listed(fields.get("parts")) for found in _parts(camel(part))]
    return {"role": "assistant" if role == "model" else "user" if role in RESULT_ROLES else role, "parts": parts}


def _parts(part: dict[str, Any]) -> list[dict[str, Any]]:
    """What a part holds. In Google's API that is one thing; of a part with several, none is lost."""
    found: list[dict[str, Any]] = []
    rest = {name: value for name, value in part.items() if name not in _NOTES and value is not None}
    if isinstance(call := rest.get("functionCall"), Mapping):
        del rest["functionCall"]
        found.append(_call(call, part.get("thoughtSignature")))
    if isinstance(result := rest.get("functionResponse"), Mapping):
        del rest["functionResponse"]
        found.append(_result(result))
        found += ({"type": next(iter(camel(media)), None), **camel(media)} for media in listed(result.get("parts")))
    if isinstance(text := rest.get("text"), str):
        del rest["text"]
        found.append({"type": "reasoning" if part.get("thought") else "text", "content": text})
    if rest or not found:
        unread = rest or part
        found.append({"type": next(iter(unread), None), **unread})
    return found


def _call(call: Mapping[str, Any], signature: Any) -> dict[str, Any]:
    signed = re.fullmatch(f"{SIGNATURE}([0-9a-z]{{9}})", str(signature))
    call_id = str(call.get("id") or (signed[1] if signed else ""))
    # A stream may send the arguments in pieces.
    pieces = {name: call[name] for name in ("partialArgs", "willContinue") if name in call}
    arguments = call.get("args") or {}
    return {"type": "tool_call", "id": call_id, "name": call.get("name"), "arguments": arguments, **pieces}


def _result(result: Mapping[str, Any]) -> dict[str, Any]:
    output = result.get("response")
    failed = isinstance(output, Mapping) and output.get("error") not in (None, False, "")
    # What SDKs wrap the return value of a function in.
    if isinstance(output, Mapping) and len(output) == 1 and {*output} <= {"result", "output", "error"}:
        [output] = output.values()
    text = output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)
    about = {"id": str(result.get("id") or ""), "name": str(result.get("name"))}
    return {"type": "tool_call_response", **about, "response": text, "failed": failed}


def _functions(tools: list[Any]) -> list[Any]:
    """The functions that tools declare, as one list; what else a tool has, as a tool of another kind."""
    found: list[Any] = []
    for tool in map(camel, tools):
        declared = tool.pop("functionDeclarations", None)
        for fields in map(camel, listed(declared)):
            schema = fields.pop("parametersJsonSchema", None)
            found.append({**fields, "parameters": json_schema(fields.get("parameters")) if schema is None else schema})
        others = {name: value for name, value in tool.items() if value is not None}
        if declared is None or others:
            found.append(others)
    return found


def json_schema(schema: Any) -> Any:
    """Google's `Schema` (OpenAPI's: types in capitals, `nullable`, counts that may be text) as a JSON schema, with its
    properties in the order of `propertyOrdering`."""
    if not isinstance(schema, Mapping):
        return schema
    fields = {name: value for name, value in _in_order(camel(schema)).items() if name != "nullable"}
    for name, value in fields.items():
        if name == "type" and isinstance(value, str):
            fields[name] = value.lower()
        elif name == "properties" and isinstance(value, Mapping):
            fields[name] = {each: json_schema(of) for each, of in value.items()}
        elif name in ("items", "additionalProperties", "anyOf"):
            each = isinstance(value, list)
            fields[name] = [json_schema(of) for of in value] if each else json_schema(value)
        elif name[:3] in ("min", "max") and isinstance(value, str) and value.isdecimal():
            fields[name] = int(value)
    return {"anyOf": [fields, {"type": "null"}]} if schema.get("nullable") else fields


def ordered(schema: Any) -> Any:
    """A JSON schema with properties in the order of `propertyOrdering`, which Google allows in one as well."""
    if isinstance(schema, list):
        return [ordered(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {name: ordered(value) for name, value in _in_order(schema).items()}


def _in_order(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema without its `propertyOrdering`, its properties in that order; others follow in their own."""
    names = schema.get("propertyOrdering")
    properties = schema.get("properties")
    if not isinstance(names, list):
        return schema
    fields = {name: value for name, value in schema.items() if name != "propertyOrdering"}
    if isinstance(properties, Mapping):
        first = {name: properties[name] for name in names if isinstance(name, str) and name in properties}
        fields["properties"] = {**first, **properties}
    return fields
