"""The learning curve as SVG, for a file and for a page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

TRAIN_COLOR, VAL_COLOR = "#9db4c0", "#1b6ca8"


def svg_curve(history: Sequence[Mapping[str, Any]]) -> str:
    """Training and validation reward over steps, with a point for each validation and its 95 % interval; "" where there
    are not two steps with a reward."""
    train = _points(history, "train/reward")
    val = _points(history, "val/reward")
    points = [(step, reward) for step, reward in (*train, *val) if math.isfinite(reward)]
    steps = sorted({step for step, _ in points})
    rewards = [reward for _, reward in points]
    if len(steps) < 2:
        return ""
    first = steps[0]
    last = steps[-1]
    low, high = min(0.0, *rewards), max(1.0, *rewards) if max(rewards) > 0.5 else max(rewards) or 1.0

    def places(curve: Sequence[tuple[float, float]]) -> list[str]:
        return [
            f"{40 + 440 * (step - first) / (last - first):.1f},"
            f"{10 + 150 * (high - min(max(reward, low), high)) / (high - low):.1f}"
            for step, reward in curve
            if math.isfinite(reward)
        ]

    def line(curve: Sequence[tuple[float, float]], color: str, width: float) -> str:
        return f'<polyline points="{" ".join(places(curve))}" fill="none" stroke="{color}" stroke-width="{width}"/>'

    def interval() -> str:
        lows, highs = (_points(history, f"val/reward_{end}") for end in ("low", "high"))
        around = " ".join(places([*lows, *reversed(highs)]))
        return f'<polygon points="{around}" fill="{VAL_COLOR}" opacity="0.18"/>' if around else ""

    def validations() -> str:
        spots = (place.split(",") for place in places(val))
        return "".join(f'<circle cx="{x}" cy="{y}" r="3" fill="{VAL_COLOR}"/>' for x, y in spots)

    labels = (
        (36, 14, "end", f"{high:.3g}"),
        (36, 164, "end", f"{low:.3g}"),
        (40, 178, "start", f"step {first}"),
        (480, 178, "end", f"{last}"),
    )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 490 184" width="490" role="img" '
        'aria-label="reward over steps" fill="currentColor" font-size="11">'
        '<path d="M40 10V160H480" fill="none" stroke="currentColor" opacity="0.4"/>'
        + interval()
        + line(train, TRAIN_COLOR, 1.4)
        + line(val, VAL_COLOR, 2.2)
        + validations()
        + "".join(f'<text x="{x}" y="{y}" text-anchor="{anchor}">{label}</text>' for x, y, anchor, label in labels)
        + f'<text x="60" y="20" fill="{TRAIN_COLOR}">training reward</text>'
        + f'<text x="170" y="20" fill="{VAL_COLOR}">held-out reward</text></svg>'
    )


def _points(history: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    return [(h["step"], h[name]) for h in history if name in h]
