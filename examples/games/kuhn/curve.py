"""The exploitability over training: as a picture, and as the table of the README.

python -m examples.games.kuhn.curve      # from examples/games/kuhn/results, as `--save` keeps them; needs matplotlib
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

HERE = Path(__file__).parent
START, END = "<!-- curves -->", "<!-- /curves -->"

Points = Sequence[tuple[int, float, float]]
"""(step, exploitability of the policies, exploitability of the average of all strategies so far)."""


def write() -> None:
    """Write the picture and the table from the kept results."""
    results = [json.loads(file.read_text("utf-8")) for file in sorted((HERE / "results").glob("*.json"))]
    draw(
        {f"{form}, seed {x['seed']}": points for x in results for form, points in x["curves"].items()},
        HERE / "curve.svg",
    )
    lines = ["| seed | | start | end | lowest | average of all strategies | minutes |", "|---|---|---|---|---|---|---|"]
    for result in results:
        for form, points in result["curves"].items():
            now = [value for _, value, _ in points]
            lines.append(
                f"| {result['seed']} | {form} | {now[0]:.3f} | {now[-1]:.3f} | {min(now):.3f} | {points[-1][2]:.3f} "
                f"| {result['minutes']:.0f} for both |"
            )
    readme = HERE / "README.md"
    before, _, rest = readme.read_text("utf-8").partition(START)
    readme.write_text(f"{before}{START}\n" + "\n".join(lines) + f"\n{END}{rest.partition(END)[2]}", "utf-8")


def draw(curves: Mapping[str, Points], path: Path) -> Path:
    """Draw curves by name into an SVG, and return its path."""
    with rc_context({"svg.hashsalt": "agl", "svg.fonttype": "none"}):
        figure = Figure(figsize=(7.2, 4.0), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots()
        for k, (name, points) in enumerate(curves.items()):
            steps = [step for step, _, _ in points]
            axes.plot(steps, [now for _, now, _ in points], color=f"C{k}", linewidth=2, label=name)
            axes.plot(steps, [mean for _, _, mean in points], color=f"C{k}", linewidth=1, linestyle="--")
        axes.plot([], [], color="gray", linewidth=1, linestyle="--", label="average of all strategies so far")
        axes.axhline(0, color="gray", linewidth=0.8)
        axes.set(xlabel="step", ylabel="exploitability, antes per game", ylim=(-0.01, None))
        axes.set_title("Kuhn poker in self-play: what a perfect opponent wins", loc="left")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        figure.savefig(path, metadata={"Date": None})
    return path


if __name__ == "__main__":
    write()
