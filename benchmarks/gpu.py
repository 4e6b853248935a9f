"""The first hour on a GPU: exactness, speed, memory and learning, each part in under nine minutes; fills the page.

    benchmarks/gpu.sh [PART ...] [--bundle DIR] [--page FILE] [--logs DIR]
    benchmarks/gpu.sh --cpu              # the same programs in a small form, every night, so that they cannot rot

gpu.sh makes the environment from what `gpu_bundle.sh` packed; the machine needs Python, torch and a GPU, no network.
A part that fails keeps its old table, and its output is in DIR/PART.log.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from all import HERE, block, insert, run

SECONDS = 540.0
"""Limit of a part."""
EXACT = (
    "tests/integration/test_engine_conformance.py",
    "tests/unit/test_learner.py",
    "tests/integration/test_learner_options.py",
)


def parts(cpu: bool, model: str | None, work: Path) -> dict[str, tuple[str, ...]]:
    """Name -> the command's arguments after the interpreter, in the order in which they are most worth having."""
    device = "cpu" if cpu else "cuda"
    sizes = ("tiny",) if cpu else ("0.5b", "1.5b", "3b")
    pytest = ("-m", "pytest", "-q", "--all", "-p", "no:cacheprovider", "-n", "0" if cpu else "8")
    found: dict[str, tuple[str, ...]] = {
        "exactness": (*pytest, *(EXACT[1:2] if cpu else EXACT)),
        "bfloat16": (*pytest, "tests/unit/test_engine.py", "-k", "probe"),
    }
    for size in sizes:
        few = ("--agents", "4", "--repeats", "1") if cpu else ("--agents", "128")
        found[f"engine.{size}"] = ("benchmarks/engine.py", "--device", device, "--size", size, *few)
        short = ("--turns", "2", "--rollouts", "8", "--repeats", "1") if cpu else ("--turns", "2", "8")
        learner = ("benchmarks/learner.py", "--device", device, "--size", size, *short, "--formula")
        tokens = () if cpu else ("--max-tokens-per-microbatch", "16384" if size == "0.5b" else "4096")
        if size != "3b":
            found[f"learner.{size}"] = (*learner, *tokens)
        found[f"learner.{size}.lora"] = (*learner, *tokens, "--lora", "16")
    if model is not None and not cpu:
        found["engine.smollm2"] = ("benchmarks/engine.py", "--device", device, "--model", model, "--agents", "128")
    small = ("--steps", "1") if cpu else ()
    agl = ("-c", "from agl.trainer.cli import main; main()")
    found["quickstart"] = (*agl, "quickstart", "--directory", str(work / "quickstart"), *small)
    if model is not None:
        real = ("quickstart", "--real", "--model", model, "--directory", str(work / "smollm2"))
        found["smollm2"] = (*agl, *real, *small)
        service = ("-m", "examples.smollm2", "service", "--model", model, "--save", "--seed")
        found |= {f"service.{seed}": (*service, str(seed)) for seed in range(0 if cpu else 3)}
    return found


def main() -> None:
    """Run the parts one after the other; the page is written after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="PART", help="all without")
    parser.add_argument("--cpu", action="store_true", help="small forms on the CPU; the page stays as it is")
    parser.add_argument("--model", help="directory or GGUF file of SmolLM2; without it that part is left out")
    parser.add_argument("--page", type=Path, default=HERE.parent / "docs" / "benchmarks.md")
    parser.add_argument("--logs", type=Path, default=Path("gpu-logs"))
    options = parser.parse_args()
    options.logs.mkdir(parents=True, exist_ok=True)
    all_parts = parts(options.cpu, options.model, options.logs)
    if unknown := set(options.names) - set(all_parts):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(all_parts)}")
    failed = []
    for name in options.names or all_parts:
        command = all_parts[name]
        print("+", name, *command, file=sys.stderr, flush=True)
        started = time.monotonic()
        printed, reason = run([sys.executable, *command], SECONDS)
        took = time.monotonic() - started
        print(f"+ {name} {f'failed: {reason}' if reason else 'done'} in {took:.0f} s", file=sys.stderr, flush=True)
        (options.logs / f"{name}.log").write_text(f"{printed}\n{reason}")
        if reason:
            failed.append(name)
        elif not options.cpu:
            tail = "\n".join(printed.strip().splitlines()[-25:])
            new = block(f"gpu.{name}", tail, command=" ".join(("python", *command)), where=gpu_name())
            options.page.write_text(insert(options.page.read_text(), f"gpu.{name}", new))
        else:
            print(printed, flush=True)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}; see {options.logs}")


def gpu_name() -> str:
    import torch

    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"


if __name__ == "__main__":
    main()
