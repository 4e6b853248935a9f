"""The learning curve as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def draw_curve(history: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> Path:
    """Draw training and validation reward over steps into a PNG, and return its path."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    train = [(h["step"], h["train/reward"]) for h in history if "train/reward" in h]
    val = [(h["step"], h["val/reward"]) for h in history if "val/reward" in h]
    if train:
        axes.plot(*zip(*train, strict=True), color="#9db4c0", linewidth=1.4, label="training reward")
    if val:
        axes.plot(*zip(*val, strict=True), color="#1b6ca8", linewidth=2.2, marker="o", label="held-out reward")
        for step, reward in (val[0], val[-1]):
            axes.annotate(f"{reward:.2f}", (step, reward), textcoords="offset points", xytext=(4, 8), color="#1b6ca8")
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
