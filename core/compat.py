"""The names of Agent Lightning 0.3 at the path that its users import: `import agl.compat as agl`.

They are a separate distribution, `agl-agentlightning` (guests/agentlightning).
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from agl.extras import require

if TYPE_CHECKING:
    from agl_agentlightning import *  # noqa: F403

    def __getattr__(name: str) -> Any: ...


require("agl.compat", "agentlightning")
if __name__ == "__main__":
    importlib.import_module("agl_agentlightning.__main__").main()
else:
    sys.modules[__name__] = importlib.import_module("agl_agentlightning")
