"""The names of Agent Lightning 0.3 at the path that its users import: `import agl.compat as agl`."""

import sys
from typing import TYPE_CHECKING, Any

from agl.trainer import compat
from agl.trainer.compat.__main__ import main

if TYPE_CHECKING:
    from agl.trainer.compat import *  # noqa: F403

    def __getattr__(name: str) -> Any: ...


if __name__ == "__main__":
    main()
else:
    sys.modules[__name__] = compat
