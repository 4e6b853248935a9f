"""The names of MassGen's RL document: `from agl.massgen import RLAgentMixin`; `install()` makes them `massgen.rl`.

They are a separate distribution, `agl-massgen` (guests/massgen).
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from agl.extras import require

if TYPE_CHECKING:
    from agl_massgen import *  # noqa: F403

    def __getattr__(name: str) -> Any: ...


require("agl.massgen", "massgen")
sys.modules[__name__] = importlib.import_module("agl_massgen")
