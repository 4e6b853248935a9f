"""The names of Agent Lightning 0.3 at the path that its users import: `import agl.compat as agl`."""

import sys
from typing import TYPE_CHECKING, Any

import agl_agentlightning as compat
from agl_agentlightning.__main__ import main

if TYPE_CHECKING:
    from agl_agentlightning import *  # noqa: F403

    def __getattr__(name: str) -> Any: ...


if __name__ == "__main__":
    main()
else:
    sys.modules[__name__] = compat
