"""OpenAI Responses, as a dialect of the gateway.

Source: OpenAI API reference, "Create a model response" and "Streaming events" of Responses.
"""

from agl.trainer.gateway.dialects.base import Dialect
from agl.trainer.gateway.dialects.error_forms import responses_error
from agl.trainer.gateway.dialects.model_forms import OPENAI_MODELS
from agl.trainer.gateway.dialects.responses.answer import answer
from agl.trainer.gateway.dialects.responses.body import read
from agl.trainer.gateway.dialects.responses.stream import ResponsesStream

RESPONSES = Dialect("resp_", read, answer, ResponsesStream, responses_error, OPENAI_MODELS)
