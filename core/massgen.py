"""The names of MassGen's RL document: `from agl.massgen import RLAgentMixin`; `install()` makes them `massgen.rl`."""

import sys
from typing import TYPE_CHECKING, Any

import agl_massgen as massgen

if TYPE_CHECKING:
    from agl_massgen import *  # noqa: F403

    def __getattr__(name: str) -> Any: ...


sys.modules[__name__] = massgen
