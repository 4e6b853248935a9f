"""`python -m agl.compat train.py ...`: runs a program with `agentlightning` served by agl.

`python -m agl.compat store ...` is 0.3's `agl store ...`.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import agl_agentlightning as compat


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python -m agl.compat program.py [arguments of the program]")
    program = sys.argv[1]
    if not Path(program).is_file():
        from agl.errors import AglError
        from agl_agentlightning import cli

        if program in cli.COMMANDS:
            try:
                sys.exit(cli.main(sys.argv[1:]))
            except AglError as error:
                sys.exit(str(error))
    if not Path(program).is_file():
        sys.exit(f"there is no file {program}")
    compat.install()
    del sys.argv[0]
    sys.path[0] = str(Path(program).resolve().parent)
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
