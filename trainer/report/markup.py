"""HTML of reports: every text is data, whoever wrote it, and the page neither loads nor runs anything."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from agl.texts import printable

_STYLE = """
.agl { font: 14px/1.5 system-ui, sans-serif }
.agl h1 { font-size: 1.5em } .agl h2 { font-size: 1.15em; margin-top: 1.6em } .agl h3 { font-size: 1em }
.agl table { border-collapse: collapse }
.agl th, .agl td { padding: 2px 18px 2px 0; text-align: left; white-space: pre }
.agl tr + tr td { border-top: 1px solid rgb(128 128 128 / 0.25) }
.agl code, .agl pre { font: 12px/1.45 ui-monospace, monospace }
.agl pre { background: rgb(128 128 128 / 0.12); padding: 8px; white-space: pre-wrap; overflow-wrap: anywhere }
.agl .scroll { overflow-x: auto } .agl .note { opacity: 0.7 } .agl summary { cursor: pointer }
"""
# A page may use the style in it and nothing else: no script, picture, font or address.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def text(value: object) -> str:
    """Any text as HTML: markup, control and bidirectional characters are shown, not obeyed."""
    return escape(printable(str(value)))


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of texts."""
    head = "".join(f"<th>{text(cell)}</th>" for cell in header)
    body = "".join(f"<tr>{''.join(f'<td>{text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def styled(body: str, style: str = "") -> str:
    """HTML with its style, which applies to nothing else in the page."""
    return f'<style>{_STYLE}{style}</style><div class="agl">{body}</div>'


def document(title: str, body: str) -> str:
    """A whole page, light or dark like the reader's system."""
    head = (
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{text(title)}</title>",
        "<style>body { margin: 2em auto; max-width: 76em; padding: 0 1em }</style>",
    )
    return f'<!doctype html>\n<html lang="en"><head>{"".join(head)}</head><body>{body}</body></html>\n'
