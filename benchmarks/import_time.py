"""How long `import agl` takes against `import openai`, each in fresh interpreters.

    python benchmarks/import_time.py [--runs 15] [--json FILE]

The time is that of the import statement alone, inside the process; the median of the runs counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

TIMED = "import time; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"


def seconds(module: str, runs: int) -> float:
    """Median seconds of `import module`, after one run that warms the file cache."""
    command = [sys.executable, "-c", TIMED.format(module=module)]
    times = [float(subprocess.run(command, capture_output=True, check=True).stdout) for _ in range(runs + 1)]
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    ours, theirs = (seconds(module, options.runs) for module in ("agl", "openai"))
    print(f"import agl     {ours * 1e3:8.1f} ms")
    print(f"import openai  {theirs * 1e3:8.1f} ms")
    print(f"ratio          {ours / theirs:8.4f}")
    if options.json:
        options.json.write_text(json.dumps({"agl_seconds": ours, "openai_seconds": theirs, "ratio": ours / theirs}))


if __name__ == "__main__":
    main()
