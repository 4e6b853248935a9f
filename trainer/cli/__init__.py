"""The command line: `agl --help`."""

from __future__ import annotations

import sys

_LOCAL = ("torch", "transformers", "tokenizers", "renderers", "jinja2", "peft", "safetensors", "matplotlib", "yaml",
          "cloudpickle")  # fmt: skip
"""What training and serving a policy need in addition to `agl[server]`."""


def main() -> None:
    """Entry point of `agl`. Prints agl's own errors without a traceback; Ctrl-C exits with 130."""
    try:
        import typer  # noqa: F401
    except ImportError:
        sys.exit('the command line needs more than the core: pip install "agl[local]"')
    from agl.errors import AglError
    from agl.trainer.cli.app import app

    try:
        app(standalone_mode=True)
    except AglError as error:
        from agl.trainer.report import terminal

        terminal.console(stderr=True).print(f"error: {error}", style="red")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except ModuleNotFoundError as error:
        if error.name not in _LOCAL:
            raise
        sys.exit(f'this command needs {error.name}, which is not installed: pip install "agl[local]"')
