"""The command line: `agl --help`."""

from __future__ import annotations

import io
import re
import sys
from contextlib import nullcontext

from agl.extras import explained, install_line


def main() -> None:
    """Entry point of `agl`. Prints agl's own errors without a traceback; Ctrl-C exits with 130."""
    try:
        import typer  # noqa: F401
    except ImportError:
        sys.exit(f"the command line needs more than the core; {install_line('local')}")
    from agl.errors import AglError
    from agl.stop_signals import end_when_stopped, interrupted_by_stop_signals
    from agl.trainer.cli.app import app
    from agl.trainer.cli.options import json_alone, with_json

    end_when_stopped()
    for stream in (sys.stdout, sys.stderr):
        # A terminal may lack characters that we print, and a path may be no text in any language.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    arguments, alone = with_json(sys.argv[1:])
    try:
        with interrupted_by_stop_signals(), json_alone() if alone else nullcontext():
            app(arguments, standalone_mode=True)
    except AglError as error:
        from agl.trainer.report import terminal

        terminal.console(stderr=True).print(f"error: {error}", style="red")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except UnicodeEncodeError as error:
        if re.search("[\ud800-\udfff]", error.object) is None:
            raise
        # Python keeps such bytes of a path as halves of surrogate pairs.
        sys.exit(f"error: a path is not in this system's encoding: {error.object!r}\n  -> rename it")
    except ModuleNotFoundError as error:
        if (clear := explained("this command", error)) is None:
            raise
        sys.exit(f"error: {clear}")
