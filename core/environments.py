"""Other people's environments: `agl.environments.load("reasoning-gym:gcd")`.

They are a separate distribution, `agl-environments` (guests/environments).
"""

import importlib
import sys
from typing import TYPE_CHECKING

from agl.extras import require

if TYPE_CHECKING:
    from agl_environments import Environment as Environment
    from agl_environments import as_verifiers as as_verifiers
    from agl_environments import load as load

require("agl.environments", "environments")
sys.modules[__name__] = importlib.import_module("agl_environments")
