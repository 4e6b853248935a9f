"""Train SmolLM2-135M-Instruct on real tasks, on a CPU: one program per claim.

python -m examples.smollm2 arithmetic            # in minutes; see README.md for what each does and takes
python -m examples.smollm2 functions --seed 1
python -m examples.smollm2 sql --short           # a step of two rollouts, to see that it runs
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import agl
from examples.smollm2.recipe import learn

CLAIMS = ("arithmetic", "gcd", "calculator", "functions", "sql", "repair", "service")


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("claim", choices=CLAIMS)
    parser.add_argument("--model", help="another model than SmolLM2: a directory, a hub id or a GGUF file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="updates of GRPO; else as the program says")
    parser.add_argument("--short", action="store_true", help="a step of two rollouts, to see that it runs")
    parser.add_argument("--data", type=Path, help="folder of the data, where the program reads files")
    parser.add_argument("--out", type=Path, help="directory of what is written; runs/smollm2-CLAIM-SEED if left out")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads of the model")
    parser.add_argument("--save", action="store_true", help="keep the result for the README's table")
    options = parser.parse_args(argv)
    module = importlib.import_module(f"examples.smollm2.{options.claim}")
    return learn(options.claim, module.claim(options), options)


if __name__ == "__main__":
    try:
        main()
    except agl.AglError as error:
        sys.exit(f"error: {error}")
