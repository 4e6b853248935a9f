"""Google's wire format, in the fields and parts that `read` knows from other APIs. What does not fit is left to it.

Source: Gemini API reference, "Generating content". A field may have either of protobuf's names, `topP` or `top_p`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

OPTIONS = {
    "temperature": "temperature", "topP": "top_p", "topK": "top_k", "maxOutputTokens": "max_tokens", "seed": "seed",
    "candidateCount": "n", "stopSequences": "stop",
}  # fmt: skip
"""Fields of `generationConfig`, and what Chat Completions calls them."""
SIGNATURE = "agl"
"""Begins the `thoughtSignature` of the gateway's calls; the call's id follows, for clients that drop the id itself.
Together they are twelve letters, valid base64."""


def camel(fields: Any) -> dict[str, Any]:
    """An object with the first of protobuf's names for its fields; empty for what is no object."""
    fields = fields if isinstance(fields, Mapping) else {}
    return {re.sub("_([a-z])", lambda found: found[1].upper(), name): value for name, value in fields.items()}


def listed(value: Any) -> list[Any]:
    """A list; of what is none, one that holds it."""
    return value if isinstance(value, list) else [] if value is None else [value]


def common(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """A request's body with the fields that other APIs have in the place of Google's; another API's body unchanged."""
    if "contents" not in body:
        return body
    fields = camel(body)
    config, history = camel(fields.get("generationConfig")), [message(content) for content in listed(body["contents"])]
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
    parts = [_part(camel(part)) for part in listed(fields.get("parts"))]
    return {"role": "assistant" if role == "model" else "user" if role == "function" else role, "parts": parts}


def _part(part: dict[str, Any]) -> dict[str, Any]:
    if isinstance(call := part.get("functionCall"), Mapping):
        signed = re.fullmatch(f"{SIGNATURE}([0-9a-z]{{9}})", str(part.get("thoughtSignature")))
        call_id = str(call.get("id") or (signed[1] if signed else ""))
        # A stream may send the arguments in pieces.
        pieces = {name: call[name] for name in ("partialArgs", "willContinue") if name in call}
        arguments = call.get("args") or {}
        return {"type": "tool_call", "id": call_id, "name": call.get("name"), "arguments": arguments, **pieces}
    if isinstance(result := part.get("functionResponse"), Mapping) and not result.get("parts"):
        output = result.get("response")
        failed = isinstance(output, Mapping) and output.get("error") not in (None, False, "")
        # What SDKs wrap the return value of a function in.
        if isinstance(output, Mapping) and len(output) == 1 and {*output} <= {"result", "output", "error"}:
            [output] = output.values()
        text = output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)
        about = {"id": str(result.get("id") or ""), "name": str(result.get("name"))}
        return {"type": "tool_call_response", **about, "response": text, "failed": failed}
    if isinstance(text := part.get("text"), str):
        return {"type": "reasoning" if part.get("thought") else "text", "content": text}
    return {"type": next(iter(part), None), **part}


def _functions(tools: list[Any]) -> list[Any]:
    """The functions that tools declare, as one list; a tool of another kind unchanged."""
    found: list[Any] = []
    for tool in tools:
        declared = camel(tool).get("functionDeclarations")
        for fields in map(camel, listed(declared)):
            schema = fields.pop("parametersJsonSchema", None)
            found.append({**fields, "parameters": json_schema(fields.get("parameters")) if schema is None else schema})
        if declared is None:
            found.append(camel(tool))
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
    names, properties = schema.get("propertyOrdering"), schema.get("properties")
    if not isinstance(names, list):
        return schema
    fields = {name: value for name, value in schema.items() if name != "propertyOrdering"}
    if isinstance(properties, Mapping):
        first = {name: properties[name] for name in names if isinstance(name, str) and name in properties}
        fields["properties"] = {**first, **properties}
    return fields
