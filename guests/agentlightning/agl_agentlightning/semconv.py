"""0.3's names of spans and attributes; `agl.semconv` has agl's, which its own spans carry as well."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from agl_agentlightning.models import PydanticMethods

__all__ = [
    "AGL_ANNOTATION",
    "AGL_EXCEPTION",
    "AGL_MESSAGE",
    "AGL_OBJECT",
    "AGL_OPERATION",
    "AGL_REWARD",
    "AGL_VIRTUAL",
    "LightningResourceAttributes",
    "LightningSpanAttributes",
    "LinkAttributes",
    "LinkPydanticModel",
    "RewardAttributes",
    "RewardPydanticModel",
]

AGL_ANNOTATION: Final = "agentlightning.annotation"
"""Spans of rewards, tags and other annotations."""
AGL_MESSAGE: Final = "agentlightning.message"
AGL_OBJECT: Final = "agentlightning.object"
AGL_EXCEPTION: Final = "agentlightning.exception"
AGL_OPERATION: Final = "agentlightning.operation"
AGL_REWARD: Final = "agentlightning.reward"
AGL_VIRTUAL: Final = "agentlightning.virtual"
"""Spans that stand for no operation, such as the root of a tree whose root was lost."""


class LightningResourceAttributes(Enum):
    """Attributes of OpenTelemetry resources."""

    ROLLOUT_ID = "agentlightning.rollout_id"
    ATTEMPT_ID = "agentlightning.attempt_id"
    SPAN_SEQUENCE_ID = "agentlightning.span_sequence_id"
    TRACER_NAME = "agentlightning.tracer.name"


class LightningSpanAttributes(Enum):
    """Attributes of spans. REWARD, LINK, TAG, OPERATION_INPUT and OPERATION_OUTPUT are prefixes, as in
    "agentlightning.reward.0.value"; exceptions have OpenTelemetry's attributes.
    """

    REWARD = "agentlightning.reward"
    LINK = "agentlightning.link"
    TAG = "agentlightning.tag"
    MESSAGE_BODY = "agentlightning.message.body"
    OBJECT_TYPE = "agentlightning.object.type"
    OBJECT_LITERAL = "agentlightning.object.literal"
    OBJECT_JSON = "agentlightning.object.json"
    OPERATION_NAME = "agentlightning.operation.name"
    OPERATION_INPUT = "agentlightning.operation.input"
    OPERATION_OUTPUT = "agentlightning.operation.output"


class RewardAttributes(Enum):
    """What follows "agentlightning.reward.<n>."; n = 0 is the primary reward."""

    REWARD_NAME = "name"
    REWARD_VALUE = "value"


class LinkAttributes(Enum):
    """What follows "agentlightning.link.<n>."."""

    KEY_MATCH = "key_match"
    VALUE_MATCH = "value_match"


@dataclass
class RewardPydanticModel(PydanticMethods):
    """One reward of a span."""

    name: str
    value: float


@dataclass
class LinkPydanticModel(PydanticMethods):
    """A link to the spans whose attribute `key_match` is `value_match`; `trace_id` and `span_id` are the span's ids."""

    key_match: str
    value_match: str
