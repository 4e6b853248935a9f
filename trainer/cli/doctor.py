"""`agl doctor`: the report on a terminal, a line for each thing."""

from __future__ import annotations

from agl.trainer.cli.doctor_checks import LISTED, Report
from agl.trainer.report import terminal


def show(report: Report) -> None:
    """Print it."""
    console = terminal.console(soft_wrap=True)

    def line(name: str, value: str, style: str = "") -> None:
        console.print(f"{name:<20}{value}", style=style)

    line("python", f"{report.python}  {report.platform}")
    line("GPU", "; ".join(report.gpus) or "none")
    for group, names in LISTED.items():
        console.print(f"\n{group}", style="bold")
        for name in names:
            version = report.versions[name]
            line(f"  {name}", version or "-", "" if version else "dim")
    console.print()
    for note in report.notes:
        line("note", str(note))
    for problem in report.problems:
        line("conflict", str(problem), "red")
    if not report.problems:
        line("no conflicts found", "")
