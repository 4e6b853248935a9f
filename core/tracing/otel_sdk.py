"""OpenTelemetry's SDK for agl's own spans. The `OTEL_*` variables of the environment are for the program's own: agl
heeds those that name the service, and none can make the SDK's import fail, cut agl's spans or print a word.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_READ_AT_IMPORT = "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT"
_LOGGERS = ("opentelemetry.sdk.resources", "opentelemetry.attributes")


def load() -> None:
    """Import the SDK, which refuses to be imported where a limit is no number."""
    try:
        importlib.import_module("opentelemetry.sdk.trace")
    except ValueError:
        limit = os.environ.pop(_READ_AT_IMPORT, None)
        try:
            importlib.import_module("opentelemetry.sdk.trace")
        finally:
            if limit is not None:
                os.environ[_READ_AT_IMPORT] = limit


def tracer_provider() -> TracerProvider:
    """A provider whose spans are never sampled or cut. Its resource is that of `OTEL_SERVICE_NAME` and
    `OTEL_RESOURCE_ATTRIBUTES`; other detectors would block the event loop of the user, whose first call makes this."""
    load()
    from opentelemetry.sdk import resources
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON

    from agl.tracing.open_span import UNLIMITED

    service = resources.Resource({resources.SERVICE_NAME: "agl"})
    with _quiet():
        resource = service.merge(resources.OTELResourceDetector().detect())
    return TracerProvider(sampler=ALWAYS_ON, resource=resource, shutdown_on_exit=False, span_limits=UNLIMITED)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps warnings about malformed variables off standard error, which is the program's."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled
