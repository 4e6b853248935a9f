"""The process that compares maths answers for `agl.rewards.MathAnswer`: a JSON line in, a JSON line out.

math-verify's limits need a main thread, and an expression such as 9^9^9^9 can block the interpreter forever.
"""

from __future__ import annotations

import re
from typing import Any

from agl.trainer.processes.limited_worker import serve

_NUMBER = r"[+-]?\d[\d,]*(?:\.\d+)?"
_MIXED = re.compile(r"([+-]?)(\d+)\s+(\d+)\s*/\s*(\d+)")
_SCIENTIFIC = re.compile(rf"({_NUMBER})[eE]([+-]?\d{{1,3}})")
_GROUPED = re.compile(r"(?<=\d)_(?=\d{3})")
_AROUND = re.compile(r"\s*=\s*around\s.*", re.S)
_CHOICE = re.compile(r"\(([A-E])\)")
_FORMULA = re.compile(r"(?:\\[A-Za-z]+|(?<![A-Za-z])[A-Za-z](?![A-Za-z])|[^A-Za-z$\n])+")
"""A line of LaTeX without its dollars: no words but commands."""


def final(text: str) -> str:
    """The text after the last "####" (GSM8K), without Calc-X's "= around ...".

    Numbers that math-verify reads only in part (2 1/3, 1e5, 1_000) are rewritten so that it reads them whole.
    """
    mark = text.rfind("####")
    part = text[mark + 4 :] if mark >= 0 else text
    part = _GROUPED.sub("", _AROUND.sub("", part)).strip()
    bare = part.strip("$. ")
    if mixed := _MIXED.fullmatch(bare):
        sign, whole, top, bottom = mixed.groups()
        return f"${sign}({whole}+\\frac{{{top}}}{{{bottom}}})$"
    if scientific := _SCIENTIFIC.fullmatch(bare):
        return f"${scientific[1].replace(',', '')} \\cdot 10^{{{scientific[2]}}}$"
    return part


def compare(job: dict[str, Any]) -> dict[str, Any]:
    """{"equal": bool}, or {"unreadable": index of the reference in which no answer was found}."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, StringExtractionConfig, parse, verify

    maths = (LatexExtractionConfig(), ExprExtractionConfig())
    choice = (StringExtractionConfig(strings=("A", "B", "C", "D", "E")),)
    options = {"float_rounding": job["float_rounding"], "strict": job["strict"], "timeout_seconds": 0}

    def read(text: str, letters: bool | None = None) -> tuple[Any, bool]:
        """(parsed answer, whether it is a multiple-choice letter); `letters` None tries maths first, then letters."""
        part = final(text)
        if letters is not True:
            bare = part if _FORMULA.fullmatch(part) else None
            for shape in (f"${bare}$" if bare and set(bare) & set("\\^_=([{") else part, part):
                if parsed := parse(shape, maths, parsing_timeout=0):
                    return parsed, False
        if letters is not False and (parsed := parse(_CHOICE.sub(r"\1", part), choice, parsing_timeout=0)):
            return parsed, True
        return (parse(f"${part}$", maths, parsing_timeout=0) if _FORMULA.fullmatch(part) else None), False

    equal = False
    for i, text in enumerate(job["references"]):
        gold, letter = read(text)
        if not gold:
            return {"unreadable": i}
        answer, _ = read(job["answer"], letter)
        equal = equal or (bool(answer) and verify(gold, answer, **options))
    return {"equal": equal}


def main() -> None:
    """Serve until standard input ends."""
    import math_verify  # noqa: F401

    serve(compare, {"equal": False})
