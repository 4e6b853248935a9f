"""Tests of verl with vLLM, for the environment that deploy/verl-cpu.sh makes; elsewhere there is nothing to collect.

There is no `__init__.py` here: this folder would hide verl itself.
"""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]
