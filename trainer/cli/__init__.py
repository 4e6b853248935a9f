"""The command line: `agl --help`."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of `agl`. Errors of agl's own are printed without a traceback; Ctrl-C exits with 130."""
    try:
        import typer  # noqa: F401
    except ImportError:
        sys.exit('the command line needs more than the core: pip install "agl[local]"')
    from agl.errors import AglError
    from agl.trainer.cli.app import app

    try:
        app(standalone_mode=True)
    except AglError as error:
        from rich.console import Console

        Console(stderr=True, highlight=False).print(f"error: {error}", style="red", markup=False)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
