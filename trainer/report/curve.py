"""The learning curve as a picture, in a file and in a page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TRAIN_COLOR, VAL_COLOR = "#9db4c0", "#1b6ca8"


def draw_curve(history: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> Path:
    """Draw training and validation reward over steps into a PNG, and return its path."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    train, val = _points(history, "train/reward"), _points(history, "val/reward")
    if train:
        axes.plot(*zip(*train, strict=True), color=TRAIN_COLOR, linewidth=1.4, label="training reward")
    if val:
        axes.plot(*zip(*val, strict=True), color=VAL_COLOR, linewidth=2.2, marker="o", label="held-out reward")
        for step, reward in (val[0], val[-1]):
            axes.annotate(f"{reward:.2f}", (step, reward), textcoords="offset points", xytext=(4, 8), color=VAL_COLOR)
    rewards = [r for _, r in (*train, *val)]
    if rewards and min(rewards) >= 0 and max(rewards) <= 1:
        axes.set_ylim(-0.02, 1.08)
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward")
    axes.set_title(title, loc="left")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return path


def svg_curve(history: Sequence[Mapping[str, Any]]) -> str:
    """The same as SVG for within a page; "" where there are not two steps with a reward."""
    train, val = _points(history, "train/reward"), _points(history, "val/reward")
    points = [(step, reward) for step, reward in (*train, *val) if math.isfinite(reward)]
    steps, rewards = sorted({step for step, _ in points}), [reward for _, reward in points]
    if len(steps) < 2:
        return ""
    first, last = steps[0], steps[-1]
    low, high = min(0.0, *rewards), max(1.0, *rewards) if max(rewards) > 0.5 else max(rewards) or 1.0

    def line(curve: Sequence[tuple[float, float]], color: str, width: float) -> str:
        places = " ".join(
            f"{40 + 440 * (step - first) / (last - first):.1f},{10 + 150 * (high - reward) / (high - low):.1f}"
            for step, reward in curve
            if math.isfinite(reward)
        )
        return f'<polyline points="{places}" fill="none" stroke="{color}" stroke-width="{width}"/>'

    labels = ((36, 14, "end", f"{high:.3g}"), (36, 164, "end", f"{low:.3g}"), (40, 178, "start", f"step {first}"),
              (480, 178, "end", f"{last}"))  # fmt: skip
    return (
        '<svg viewBox="0 0 490 184" width="490" role="img" aria-label="reward over steps" fill="currentColor" '
        'font-size="11"><path d="M40 10V160H480" fill="none" stroke="currentColor" opacity="0.4"/>'
        + line(train, TRAIN_COLOR, 1.4)
        + line(val, VAL_COLOR, 2.2)
        + "".join(f'<text x="{x}" y="{y}" text-anchor="{anchor}">{label}</text>' for x, y, anchor, label in labels)
        + f'<text x="60" y="20" fill="{TRAIN_COLOR}">training reward</text>'
        + f'<text x="170" y="20" fill="{VAL_COLOR}">held-out reward</text></svg>'
    )


def _points(history: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    return [(h["step"], h[name]) for h in history if name in h]
