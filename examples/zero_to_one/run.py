"""From a model that never succeeds to one that does: record a strong model, imitate it, reinforce, measure.

    python run.py                                                        # everything here, on the CPU
    python run.py --student DIR --strong-url https://api.../v1 --strong-model NAME   # key in OPENAI_API_KEY

Without `--student` the student is a model of 0.5M parameters with random weights, without `--strong-url` the strong
model is `strong_model.py`.
"""

from __future__ import annotations

import argparse
import os
from contextlib import ExitStack
from pathlib import Path

import agent as mine
from strong_model import strong_model

import agl
from agl.trainer.quickstart.policy import make_policy
from agl.trainer.quickstart.tasks import arithmetic_tasks

LENGTHS = {"max_response_tokens": 48, "max_context": 256}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--student", help="Hugging Face directory of the model to train")
    parser.add_argument("--strong-url", help="server of the strong model, which speaks OpenAI's protocol")
    parser.add_argument("--strong-model", default="strong")
    parser.add_argument("--recorded", type=int, default=1024, help="tasks on which the strong model is recorded")
    parser.add_argument("--epochs", type=int, default=12, help="passes over its traces")
    parser.add_argument("--steps", type=int, default=20, help="updates of GRPO")
    parser.add_argument("--held-out", type=int, default=256)
    parser.add_argument("--out", type=Path, default=Path("zero-to-one"))
    args = parser.parse_args()
    out: Path = args.out
    train = arithmetic_tasks(2048, seed=0, split="train")
    held_out = arithmetic_tasks(args.held_out, seed=0, split="heldout")
    student = args.student
    if student is None:
        student = str(make_policy(out / "student", stages=(), threads=1).directory)

    with ExitStack() as stack:
        url = args.strong_url or stack.enter_context(strong_model())
        key = os.environ.get("OPENAI_API_KEY", "none") if args.strong_url else "none"
        solver = agl.wrap(mine.build(url, args.strong_model, key), reward=mine.reward)

        # 1. The agent as it is, on the strong model: nothing is trained, everything is recorded.
        agl.Trainer(agl.Baseline(), n_workers=32, directory=out / "strong").fit(solver, train[: args.recorded])

        # 2. The student imitates what succeeded; texts of another model are written with the student's chat template.
        traces = agl.traces(out / "strong", where=agl.reward() >= 1)
        imitated = agl.Trainer(
            agl.SFT(model=student, data=traces, epochs=args.epochs, batch_size=32, learning_rate=2e-3, **LENGTHS),
            directory=out / "sft",
        ).fit(None)

        # 3. It goes on by itself.
        reinforced = agl.Trainer(
            agl.GRPO(
                model=str(imitated.policy), steps=args.steps, learning_rate=3e-4, minibatches=4, schedule="linear",
                **LENGTHS,
            ),
            n_workers=32,
            directory=out / "grpo",
        ).fit(solver, train)  # fmt: skip

        # 4. All of them on tasks that none has seen.
        policies = {"strong": None, "student": student, "SFT": imitated.policy, "SFT, GRPO": reinforced.policy}
        report = agl.evaluate(solver, held_out, policies, n_workers=32, directory=out / "evaluation", resume=False)
    report.table()
    report.save(out / "report.html")


if __name__ == "__main__":
    main()
