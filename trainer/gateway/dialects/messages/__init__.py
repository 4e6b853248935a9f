"""Anthropic Messages, as a dialect of the gateway.

Source: Anthropic API reference, "Create a Message", "Count Message tokens", "Streaming messages" and "Errors".
"""

from agl.trainer.gateway.dialects.base import Dialect
from agl.trainer.gateway.dialects.error_forms import anthropic_error
from agl.trainer.gateway.dialects.messages.answer import answer
from agl.trainer.gateway.dialects.messages.body import read
from agl.trainer.gateway.dialects.messages.stream import MessagesStream
from agl.trainer.gateway.dialects.model_forms import ANTHROPIC_MODELS

MESSAGES = Dialect(
    "msg_", read, answer, MessagesStream, anthropic_error, ANTHROPIC_MODELS, request_id_header="request-id"
)
