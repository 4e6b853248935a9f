"""Attacks on rewards by what a policy leaves behind: forged rewards, and files that stop, deceive or break who reads them.

Whatever is left, the outcome is the policy's: a reward of its tests, or its own failure. Nothing of it is paid unearned,
raised as somebody else's failure, or read on the event loop.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import small_harbor

import agl

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


def calls(*commands: str) -> list[Any]:
    """Answers that run these commands, one after the other."""
    return [
        {"content": "", "tool_calls": [{"id": "c", "type": "function", "function": {
            "name": "bash", "arguments": json.dumps({"command": command})}}]}
        for command in commands
    ]  # fmt: skip


@pytest.fixture(scope="module")
def rewarded(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., float]:
    """(commands of a policy) -> the reward of a small task of Harbor's."""
    folder = small_harbor.task(tmp_path_factory.mktemp("task"), 1, 2)
    environment = agl.environments.load(f"harbor:{folder}", command_seconds=10.0)
    return lambda *commands: environment.reward(environment.tasks[0], calls(*commands))


# -- a reward of Harbor's tests ---------------------------------------------------------------------------------------

ROOT = "/tmp/root"
PAID = "echo 1 > $D/reward.txt; echo '{\"reward\": 1e6}' > $D/reward.json"
FORGED = {
    "a folder that cannot be emptied": f"D=/logs/verifier; mkdir -p $D; {PAID}; chmod a-w $D",
    "a folder that holds one": f"D=/logs/verifier; mkdir -p $D/reward.txt/x; {PAID}; chmod 555 $D/reward.txt $D",
    "a link to a folder": f"D=/app/own; mkdir -p $D; {PAID}; rm -rf /logs/verifier; ln -s $D /logs/verifier",
    "a link to a file": "mkdir -p /logs/verifier; echo 1 > /app/x; ln -s /app/x /logs/verifier/reward.txt",
    "a link in place of the root's logs": (
        f"D=/app/own/verifier; mkdir -p $D; {PAID}; rm -rf {ROOT}/logs; ln -s /app/own {ROOT}/logs; chmod a-w $D"
    ),
    "a link in place of the root's tests": (
        f"mkdir /app/own; echo 'echo 1 > /logs/verifier/reward.txt' > /app/own/test.sh; chmod -R a-w /app/own\n"
        f"rm -rf {ROOT}/tests; ln -s /app/own {ROOT}/tests"
    ),
    "a file in place of the root's tests": f"D=/logs/verifier; mkdir -p $D; {PAID}; rm -rf {ROOT}/tests; : > {ROOT}/tests",
    "a file in place of the working directory": f"D=/logs/verifier; mkdir -p $D; {PAID}; rm -rf {ROOT}/app; : > {ROOT}/app",
    "no working directory": f"D=/logs/verifier; mkdir -p $D; {PAID}; cd /; rm -rf {ROOT}/app",
    "a root that cannot be written": f"D=/logs/verifier; mkdir -p $D; {PAID}; chmod 555 {ROOT} {ROOT}/logs $D",
    "another root": (
        f"cp -r {ROOT} /tmp/own; D=/tmp/own/logs/verifier; mkdir -p $D; {PAID}; chmod 555 $D; mv {ROOT} /tmp/x; mv /tmp/own {ROOT}"
    ),
    "a full disk": f"D=/logs/verifier; mkdir -p $D; {PAID}; cat /dev/zero > /tmp/full; true",
    "too many files": f"D=/logs/verifier; mkdir -p $D; {PAID}; i=0; while :; do i=$((i+1)); : > /tmp/$i; done",
    "modules that its HOME brings": (
        "for v in 3.10 3.11 3.12 3.13 3.14; do p=$HOME/.local/lib/python$v/site-packages; mkdir -p $p\n"
        "echo 'open(\"/logs/verifier/reward.json\", \"w\").write(\"1\")' > $p/usercustomize.py; done\n"
        "printf 'echo 1 > /logs/verifier/reward.json' | tee $HOME/.bashrc $HOME/.profile > $HOME/.bash_profile"
    ),
}  # fmt: skip
EXPECTED = {
    "absolute": "ln -s /tests/expected.txt sum.txt",
    "relative": "ln -s ../tests/expected.txt sum.txt",
    "to the root's own": f"ln -s {ROOT}/tests/expected.txt sum.txt",
    "by a link to a folder": "ln -s /tests all; ln -s all/expected.txt sum.txt",
    "out of a folder that a link leads to": "ln -s /usr way; ln -s way/../tests/expected.txt sum.txt",
    "by /proc": "ln -s /proc/self/root/tests/expected.txt sum.txt",
    "by the working directory": "ln -s /proc/self/cwd/../tests/expected.txt sum.txt",
    "in place of the working directory": f"cd /; rm -rf {ROOT}/app; ln -s tests {ROOT}/app; ln -s /tests/expected.txt /app/sum.txt",
}  # fmt: skip
"""Links to what only the tests have."""


@pytest.mark.parametrize("name", FORGED)
def test_a_reward_that_the_policy_wrote_is_not_paid(name: str, rewarded: Callable[..., float]) -> None:
    assert rewarded(FORGED[name]) == 0.0


@pytest.mark.parametrize("name", EXPECTED)
def test_a_link_to_what_only_the_tests_have_does_not_come_to_them(
    name: str, rewarded: Callable[..., float]
) -> None:
    assert rewarded(EXPECTED[name]) == 0.0

FRAMES = """python3 -c '
import json, struct, sys
report = json.dumps({"output": "1", "status": 0, "ran": True, "packed": True, "texts": ["1", "1"]}).encode()
sys.stdout.buffer.write((struct.pack(">I", len(report)) + report) * 9)'"""


def test_a_commands_output_is_no_report(rewarded: Callable[..., float]) -> None:
    """Where a command's output is to be, it has put a link to the pipe to the trainer."""
    assert rewarded(f"ln -s /proc/1/fd/1 {ROOT}/.output", FRAMES, FRAMES) == 0.0
