"""Environments that exist, for agl: `load` gives tasks, an agent and a reward; `as_verifiers` is the other way.

Each kind is read through its own package, which an extra of this distribution installs.
"""

from agl._lazy import lazy_names

_NAMES = {
    "agl_environments.environment": ("Environment", "load"),
    "agl_environments.as_verifiers": ("as_verifiers",),
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _NAMES)
