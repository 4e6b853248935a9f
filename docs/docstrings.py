"""Docstrings for the API pages: "a, b: text" and "a: text. b: text" become one item per name."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import griffe

from agl.texts import docstring_items

SECTION = re.compile(r"^(?P<indent> *)(Args|Attributes|Raises):\n(?P<items>(?:(?P=indent) +.*\n?|\n)+)", re.MULTILINE)


class OneItemPerName(griffe.Extension):
    """What our docstrings write in one line to be read in the source, a page shows item by item."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        """Rewrite the object's docstring."""
        if obj.docstring is not None:
            text = SECTION.sub(_items, obj.docstring.value + "\n")
            obj.docstring.value = re.sub(r"(?<![`\\])<(?=[a-z])", r"\\<", text).rstrip()

    def on_package(self, *, pkg: Any, **_: Any) -> None:
        """An algorithm's signature is the short one that Python shows, with groups in place of their settings."""
        for module in pkg["trainer.algorithms"].modules.values() if pkg.name == "agl" else ():
            for cls in module.classes.values():
                if not cls.is_alias and any(str(d.value) == "grouped_options" for d in cls.decorators):
                    shown = inspect.signature(getattr(importlib.import_module(module.path), cls.name)).parameters
                    init = cls["__init__"]
                    init.parameters = griffe.Parameters(*(p for p in init.parameters if p.name in {"self", *shown}))


def _items(section: re.Match[str]) -> str:
    inner = " " * (len(section["indent"]) + 4)
    head = section[0].split("\n", 1)[0]
    items = docstring_items(section["items"])
    return "\n".join([head, *(f"{inner}{name}: {text}" if name else inner + text for name, text in items)]) + "\n\n"
