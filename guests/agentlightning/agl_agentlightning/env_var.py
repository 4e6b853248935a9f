"""0.3's environment variables, and how their values are read."""

from __future__ import annotations

import os
from enum import Enum

from agl.errors import ConfigError

__all__ = ["LightningEnvVar", "resolve_bool_env_var", "resolve_int_env_var", "resolve_str_env_var"]

_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


class EnvironmentValueError(ConfigError, ValueError):
    """An environment variable whose value has the wrong form; 0.3 raised a ValueError."""


class LightningEnvVar(Enum):
    """The environment variables of 0.3; AGL_CURRENT_ROLE, AGL_SERVER_HOST and AGL_SERVER_PORT are those of its
    client-server strategy."""

    AGL_EMITTER_DEBUG = "AGL_EMITTER_DEBUG"
    AGL_MANAGED_STORE = "AGL_MANAGED_STORE"
    AGL_CURRENT_ROLE = "AGL_CURRENT_ROLE"
    AGL_SERVER_HOST = "AGL_SERVER_HOST"
    AGL_SERVER_PORT = "AGL_SERVER_PORT"


def resolve_str_env_var(
    env_var: LightningEnvVar, override: str | None = None, fallback: str | None = None
) -> str | None:
    """`override` unless it is None, else the variable's value, else `fallback`."""
    return override if override is not None else os.environ.get(env_var.value, fallback)


def resolve_bool_env_var(
    env_var: LightningEnvVar, override: bool | None = None, fallback: bool | None = None
) -> bool | None:
    """As `resolve_str_env_var`, for 1, true, yes, on, 0, false, no and off; ConfigError (a ValueError) for another."""
    text = os.environ.get(env_var.value)
    if override is not None or text is None:
        return override if override is not None else fallback
    if (value := _BOOLEANS.get(text.strip().lower())) is None:
        raise EnvironmentValueError(f"{env_var.value}={text!r} is not a boolean", hint=f"use {', '.join(_BOOLEANS)}")
    return value


def resolve_int_env_var(
    env_var: LightningEnvVar, override: int | None = None, fallback: int | None = None
) -> int | None:
    """As `resolve_str_env_var`, for an integer; ConfigError (a ValueError) for another value."""
    text = os.environ.get(env_var.value)
    if override is not None or text is None:
        return override if override is not None else fallback
    try:
        return int(text)
    except ValueError:
        raise EnvironmentValueError(f"{env_var.value}={text!r} is not an integer", hint="write digits alone") from None
