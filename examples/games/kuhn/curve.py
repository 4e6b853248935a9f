"""The exploitability over training as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

Points = Sequence[tuple[int, float, float]]
"""(step, exploitability of the policies, exploitability of the average of all strategies so far)."""


def draw(curves: Mapping[str, Points], path: Path) -> Path:
    """Draw curves by name into an SVG, and return its path."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "agl", "svg.fonttype": "none"}):
        figure = Figure(figsize=(7.2, 4.0), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots()
        for k, (name, points) in enumerate(curves.items()):
            steps = [step for step, _, _ in points]
            axes.plot(steps, [now for _, now, _ in points], color=f"C{k}", linewidth=2, label=f"{name}: now")
            axes.plot(
                steps, [mean for _, _, mean in points], color=f"C{k}", linestyle="--", label=f"{name}: average so far"
            )
        axes.axhline(0, color="gray", linewidth=0.8)
        axes.set(xlabel="step", ylabel="exploitability (antes per game)", ylim=(-0.01, None))
        axes.set_title("Kuhn poker in self-play: what a perfect opponent wins", loc="left")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        figure.savefig(path, metadata={"Date": None})
    return path
