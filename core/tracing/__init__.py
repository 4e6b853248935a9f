"""Tracing a rollout: its open scopes, the spans that they become, and how both reach other processes."""

from agl.tracing.attempt import running
from agl.tracing.context import (
    RolloutContext,
    Scope,
    close,
    current,
    end,
    idle,
    innermost,
    inside,
    model_call,
    provider,
    refuse_gateway,
    root,
    span,
    start,
    untrained,
    whole_process,
)

__all__ = [
    "close",
    "current",
    "end",
    "idle",
    "innermost",
    "inside",
    "model_call",
    "provider",
    "refuse_gateway",
    "root",
    "running",
    "span",
    "start",
    "untrained",
    "whole_process",
    "RolloutContext",
    "Scope",
]
