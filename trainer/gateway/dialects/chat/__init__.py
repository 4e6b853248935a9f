"""OpenAI Chat Completions, as a dialect of the gateway.

Source: OpenAI API reference, "Create chat completion", and its streaming form.
"""

from agl.trainer.gateway.dialects.base import Dialect
from agl.trainer.gateway.dialects.chat.answer import answer
from agl.trainer.gateway.dialects.chat.body import read
from agl.trainer.gateway.dialects.chat.stream import ChatStream
from agl.trainer.gateway.dialects.error_forms import openai_error
from agl.trainer.gateway.dialects.model_forms import OPENAI_MODELS

CHAT = Dialect("chatcmpl-", read, answer, ChatStream, openai_error, OPENAI_MODELS)
