"""The console of every command: no text that it prints is markup, and none controls the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook
from rich.control import Control
from rich.measure import Measurement
from rich.segment import Segment

from agl.texts import printable


def console(*, stderr: bool = False, **options: Any) -> Console:
    """A console whose texts are data, whoever wrote them.

    Args:
        options: others of rich's `Console`.
    """
    made = Console(stderr=stderr, highlight=False, markup=False, emoji=False, **options)
    made.push_render_hook(_Escaping())
    return made


class _Escaping(RenderHook):
    """Passes everything that is printed through `printable`, after rich has laid it out."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [r if isinstance(r, Control) else _Printable(r) for r in renderables]


class _Printable:
    def __init__(self, renderable: ConsoleRenderable) -> None:
        self._renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for segment in console.render(self._renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self._renderable)
