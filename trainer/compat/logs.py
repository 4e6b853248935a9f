"""0.3's `setup_logging`, for the logger "agl"."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from agl.errors import reject_unknown

__all__ = ["setup", "setup_logging"]

_FORMAT = "%(asctime)s [%(levelname)s] (%(name)s) %(message)s"


def setup_logging(
    level: int | str = "INFO",
    *,
    console: bool = True,
    propagate: bool = False,
    submodule_levels: Mapping[str, int | str] | None = None,
    extra_handlers: Iterable[logging.Handler] = (),
    formatter: logging.Formatter | None = None,
    apply_to: Iterable[str] = (),
    files: str | Mapping[str, str] | None = None,
    **appearance: object,
) -> None:
    """Show the log of "agl", and of the loggers in `apply_to`.

    Args:
        level: of all of them; `submodule_levels` of single loggers, for example {"agl.runner": "DEBUG"}.
        console: to stderr. files: to a file; or logger -> file.
        extra_handlers: to these too. formatter: of console and files.
        **appearance: 0.3's color, capture_warnings and disable_existing_loggers, which change nothing here.
    """
    reject_unknown(appearance, ("color", "capture_warnings", "disable_existing_loggers"), "setup_logging")
    shape = formatter or logging.Formatter(_FORMAT)
    for name in ("agl", *apply_to):
        logger = logging.getLogger(name)
        for handler in list(logger.handlers):
            logger.removeHandler(handler)
        handlers = [*([logging.StreamHandler()] if console else []), *extra_handlers]
        path = files if isinstance(files, str) else (files or {}).get(name)
        if path is not None:
            handlers.append(logging.FileHandler(path))
        for handler in handlers:
            if handler.formatter is None:
                handler.setFormatter(shape)
            logger.addHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
    for name, module_level in (submodule_levels or {}).items():
        logging.getLogger(name.replace("agentlightning", "agl", 1)).setLevel(module_level)


setup = setup_logging
