"""What samples tokens: the `Engine` protocol, and engines that are servers of their own."""

from agl.trainer.engines.base import Completion, Engine, OnTokens, Sampling, StopReason

__all__ = ["Completion", "Engine", "OnTokens", "Sampling", "StopReason"]
