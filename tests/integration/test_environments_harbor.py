"""Tasks in Harbor's format: what the sandbox keeps apart, whose failure is whose, and which tasks are refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import small_harbor

import agl
from agl.errors import ConfigError, RolloutError

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


def load(folder: Path, **options: Any) -> Any:
    return agl.environments.load(f"harbor:{folder}", **options)


def rewarded(folder: Path, *commands: str) -> float:
    environment = load(folder, command_seconds=5.0)
    return environment.reward(environment.tasks[0], small_harbor.calls(*commands))


def test_the_policy_sees_neither_tests_nor_solution_nor_this_machine(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    small_harbor.task(tmp_path / "task", 1, 2)
    found = f"ls -d /tests/* /solution/* {secret} /home/* | grep -q . && exit"
    assert rewarded(tmp_path / "task", f"{found}; {small_harbor.SOLUTION}") == 1.0
    network = "(exec 3<>/dev/tcp/1.1.1.1/80) && exit"
    assert rewarded(tmp_path / "task", f"{network}; {small_harbor.SOLUTION}") == 1.0


def test_variables_and_working_directory_are_the_dockerfiles(tmp_path: Path) -> None:
    folder = small_harbor.task(tmp_path, 1, 2)
    asks = 'test "$WHO $PLACE $(pwd)" = "me the sandbox /app" || exit'
    assert rewarded(folder, f"{asks}; {small_harbor.SOLUTION}") == 1.0


@pytest.mark.parametrize(
    "command",
    [
        "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; echo 1 > /logs/verifier/reward.json",
        "mkdir -p /logs/verifier; (while :; do echo 1 > /logs/verifier/reward.json; done) &",
        "rm -rf /logs/verifier; ln -s /app /logs/verifier",
        "cat /dev/zero > full",
        "mkdir -p /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; chmod 000 /tests",
        "kill -9 -1; :(){ :|:& };:",
        "yes",
    ],
    ids=["forges", "in the background", "moves the logs", "fills the disk", "forges the tests", "kills", "prints"],
)
def test_what_the_policy_breaks_is_its_own_failure(command: str, tmp_path: Path) -> None:
    assert rewarded(small_harbor.task(tmp_path, 1, 2), command) == 0.0


@pytest.mark.parametrize("ending", ["exit 1", "echo 0 > /logs/verifier/reward.txt; exit 0"], ids=["none", "zero"])
def test_tests_that_do_not_reward_the_solution_are_the_environments_failure(ending: str, tmp_path: Path) -> None:
    folder = small_harbor.task(tmp_path, 1, 2, ending=f"echo a package is missing; {ending}")
    with pytest.raises(RolloutError, match="do not reward its own solution: a package is missing"):
        rewarded(folder, small_harbor.SOLUTION)


def test_tests_may_write_json_and_have_variables_of_their_own(tmp_path: Path) -> None:
    folder = small_harbor.task(tmp_path, 1, 2)
    (folder / "task.toml").write_text('[verifier]\nenv = { FULL = "0.25" }\n')
    leaked = "if [ -s /app/leak ]; then FULL=0; fi\n"
    (folder / "tests/test.sh").write_text(leaked + 'echo "{\\"reward\\": $FULL}" > /logs/verifier/reward.json\n')
    assert rewarded(folder, 'printf "%s" "$FULL" > leak') == 0.25


REFUSED = {
    "run": ({"environment/Dockerfile": "FROM ubuntu:24.04\nWORKDIR /app\nRUN apt-get install -y git\n"}, "RUN apt-get"),
    "image": ({"environment/Dockerfile": "FROM someone/thing:1\nWORKDIR /app\n"}, "FROM someone/thing:1"),
    "system": ({"environment/Dockerfile": "FROM ubuntu\nWORKDIR /usr/src\n"}, "uses /usr/src"),
    "outside": ({"environment/Dockerfile": "FROM ubuntu\nWORKDIR /app\nCOPY ../tests .\n"}, "COPY ../tests ."),
    "absent": ({"environment/Dockerfile": "FROM ubuntu\nWORKDIR /app\nCOPY none .\n"}, "copies .*none, which is not"),
    "steps": ({"task.toml": '[[steps]]\nname = "one"\n'}, r"\[steps\] steps"),
    "gpus": ({"task.toml": "[environment]\ngpus = 1\n"}, r"\[environment\] gpus"),
    "separate": ({"task.toml": '[verifier]\nenvironment_mode = "separate"\n'}, r"\[verifier\] environment_mode"),
    "key": ({"task.toml": '[verifier.env]\nKEY = "${OPENAI_API_KEY}"\n'}, "takes a variable"),
    "toml": ({"task.toml": "steps = [\n"}, "no task of one step"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_task_that_needs_more_is_refused_when_it_is_loaded(case: str, tmp_path: Path) -> None:
    files, why = REFUSED[case]
    folder = small_harbor.write(small_harbor.task(tmp_path, 1, 2), files)
    with pytest.raises(ConfigError, match=f"cannot be run: .*{why}"):
        load(folder)


def test_a_folder_without_tasks_is_none(tmp_path: Path) -> None:
    with pytest.raises(agl.errors.DatasetError, match="has no tasks"):
        load(tmp_path)
