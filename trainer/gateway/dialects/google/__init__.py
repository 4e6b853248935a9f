"""Google's Gemini API, as a dialect of the gateway.

Source: Gemini API reference, "Generating content"; Google AIP-193, "Errors".
"""

from agl.trainer.gateway.dialects.base import Dialect
from agl.trainer.gateway.dialects.error_forms import google_error
from agl.trainer.gateway.dialects.google.answer import answer
from agl.trainer.gateway.dialects.google.body import read
from agl.trainer.gateway.dialects.google.stream import ArrayStream, GoogleStream
from agl.trainer.gateway.dialects.model_forms import GOOGLE_MODELS

GOOGLE = Dialect("gen_", read, answer, GoogleStream, google_error, GOOGLE_MODELS)
GOOGLE_ARRAY = Dialect("gen_", read, answer, ArrayStream, google_error, GOOGLE_MODELS, "application/json")
