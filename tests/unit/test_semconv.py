"""Our attribute names are those of OpenTelemetry's conventions, or ours by their prefix."""

from __future__ import annotations

from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

from agl import semconv


def _names(module: object) -> set[str]:
    return {value for name, value in vars(module).items() if name.isupper() and isinstance(value, str)}


def test_every_gen_ai_name_is_one_of_the_conventions() -> None:
    ours = {name for name in _names(semconv) if name.startswith("gen_ai.")}
    # An event's name, not an attribute's.
    assert ours - _names(gen_ai_attributes) == {semconv.EVALUATION}
