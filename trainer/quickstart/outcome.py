"""What a quickstart prints at its end, and its facts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agl.trainer.evaluation.evaluation import Evaluation
from agl.trainer.evaluation.views import percentages, sentences
from agl.trainer.report import terminal
from agl.trainer.report.curve import svg_curve
from agl.trainer.run.trainer import Result


def conclude(
    out: Path,
    evaluation: Evaluation,
    result: Result,
    history: Sequence[Mapping[str, Any]],
    *,
    steps: int,
    seconds: float,
    ask: str,
) -> dict[str, Any]:
    """Print how the policy got better on held-out tasks, write its curve, and say what to do next.

    Args:
        evaluation: of the held-out tasks, the first policy before training and the last after it.
        result: of the last
            run. history: entries of all runs. ask: a question for the trained agent.

    Returns:
        before, after (held-out success, 0 to 1), seconds, steps, parameters, checkpoint, curve, policy, store,
        evaluation (`Evaluation.to_json`).
    """
    console = terminal.console()
    curve = out / "curve.svg"
    curve.write_text(svg_curve(history), encoding="utf-8")
    reports = [*evaluation.policies.values()]
    rates = " -> ".join(percentages(policy.success) for policy in reports)
    console.print(
        f"\nheld-out success {rates}  "
        f"({len(evaluation.tasks)} problems never seen in training, sampled at temperature 1; {steps} steps, "
        f"{seconds:.0f} s)"
    )
    for comparison in evaluation.comparisons():
        console.print("\n".join(sentences(comparison)))
    console.print(f"curve       {curve}")
    console.print(f"policy      {result.policy}")
    console.print(f"checkpoint  {result.checkpoint}")
    console.print("\nnext: ask the trained agent:")
    console.print(
        f'  agl run --model {result.policy} --agents solver -- python -m agl.trainer.quickstart.agent "{ask}"'
    )
    console.print("let an application of yours ask it, by OpenAI's, Anthropic's or Google's API:")
    console.print(f"  agl serve {result.policy}")
    console.print("see any rollout the way the trainer saw it:")
    console.print(f"  agl explain --list --store {out}")
    console.print("train your own agent:")
    console.print("  agl train --help")
    console.print("and look at the run in the browser, from the curve down to each token:")
    console.print(f"  agl dashboard {out}")
    return {
        "before": reports[0].success.value,
        "after": reports[-1].success.value,
        "seconds": seconds,
        "steps": steps,
        "parameters": _parameters(Path(str(result.policy))),
        "checkpoint": str(result.checkpoint),
        "curve": str(curve),
        "policy": str(result.policy),
        "store": result.store,
        "evaluation": evaluation.to_json(rollouts=False),
    }


def _parameters(directory: Path) -> int:
    from safetensors import safe_open

    total = 0
    for file in directory.glob("*.safetensors"):
        with safe_open(str(file), "numpy") as tensors:
            total += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    return total
