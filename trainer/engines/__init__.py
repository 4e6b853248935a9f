"""What samples tokens: the `Engine` protocol, and the engine that is a separate vLLM server."""

from agl.trainer.engines.base import Completion, Engine, OnTokens, Request, Sampling, ServedModel, StopReason

__all__ = ["Completion", "Engine", "OnTokens", "Request", "Sampling", "ServedModel", "StopReason"]
