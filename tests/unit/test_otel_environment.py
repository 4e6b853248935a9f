"""The user's `OTEL_*` variables, right and wrong: they neither break agl's own spans nor cut them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from paths import pythonpath

SPAN = """
from agl import semconv, tracing
from agl.mdp.selection import select
many = {f"k{i}": "v" * 200 for i in range(300)}
with tracing.running(rollout := tracing.RolloutContext("ro", 1, "a", select(None))) as scope:
    scope.span.set_attributes(many)
    for _ in range(200):
        scope.span.add_event("event", many)
(span,) = rollout.spans
assert many.items() <= span.attributes.items()
assert [dict(event.attributes) for event in span.events] == [many] * 200
print("whole", tracing.provider().resource.attributes["service.name"])
"""
LIMITS = [
    *("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "OTEL_SPAN_EVENT_COUNT_LIMIT", "OTEL_SPAN_LINK_COUNT_LIMIT"),
    *("OTEL_ATTRIBUTE_COUNT_LIMIT", "OTEL_EVENT_ATTRIBUTE_COUNT_LIMIT", "OTEL_LINK_ATTRIBUTE_COUNT_LIMIT"),
    *("OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", "OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT"),
]
OTHERS = {
    "OTEL_TRACES_SAMPLER": "bogus",
    "OTEL_TRACES_SAMPLER_ARG": "bogus",
    "OTEL_RESOURCE_ATTRIBUTES": "bogus,=,a=%zz",
    "OTEL_SDK_DISABLED": "true",
    "OTEL_PROPAGATORS": "bogus",
    "OTEL_PYTHON_ID_GENERATOR": "bogus",
    "OTEL_PYTHON_TRACER_CONFIGURATOR": "bogus",
    "OTEL_EXPERIMENTAL_RESOURCE_DETECTORS": "bogus",
    "OTEL_BSP_SCHEDULE_DELAY": "bogus",
    "OTEL_BSP_MAX_QUEUE_SIZE": "-1",
    "OTEL_EXPORTER_OTLP_TIMEOUT": "1s",
    "OTEL_EXPORTER_OTLP_HEADERS": "bogus",
    "OTEL_TRACES_EXPORTER": "bogus",
}


@pytest.mark.parametrize("limit", ["-1", "unlimited", "none", "2", "1e3"])
def test_no_variable_breaks_or_cuts_a_span_or_prints_a_word(limit: str) -> None:
    variables = {**dict.fromkeys(LIMITS, limit), **OTHERS, "OTEL_SERVICE_NAME": "mine"}
    done = subprocess.run(
        [sys.executable, "-c", SPAN],
        env={**os.environ, **variables, "PYTHONPATH": pythonpath()},
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == ("whole mine\n", "")


def test_the_programs_own_tracing_reads_them_as_ever() -> None:
    own = SPAN + "from opentelemetry.sdk.trace import TracerProvider\nTracerProvider()\n"
    done = subprocess.run(
        [sys.executable, "-c", own],
        env={**os.environ, "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "none", "PYTHONPATH": pythonpath()},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT must be a non-negative integer but got none" in done.stderr
