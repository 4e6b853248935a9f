"""What can be checked of verl's CPU stack without it: script, pinned set and extras agree; verl takes the plug-in."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from paths import ROOT

sys.path.append(str(ROOT / "tests/verl"))
from verl_cpu import settings

SCRIPT = ROOT / "deploy/verl-cpu.sh"
PINNED = ROOT / "deploy/constraints-verl-cpu.txt"
PLUGIN = ROOT / "tests/verl/verl_cpu"
EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
    "optional-dependencies"
]


def pins(file: Path) -> dict[str, str]:
    lines = (line for line in file.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def requirements(extra: str) -> list[Requirement]:
    """Of the extra, with those of the extras of ours that it names."""
    found = []
    for requirement in map(Requirement, EXTRAS[extra]):
        inner = requirement.extras if requirement.name == "agl" else ()
        found += [other for name in inner for other in requirements(name)] if inner else [requirement]
    return found


@pytest.mark.parametrize("extra", ["local", "server", "langchain", "verl-core"])
def test_the_pinned_set_fits_the_extra(extra: str) -> None:
    pinned = pins(PINNED)
    for requirement in requirements(extra):
        name = canonicalize_name(requirement.name)
        assert name in pinned, f"{requirement} is not pinned in {PINNED.name}"
        assert requirement.specifier.contains(pinned[name]), f"{requirement} but {name}=={pinned[name]}"


def test_both_sets_pin_the_same_verl() -> None:
    """The main tests compare objectives with verl's; they and the cluster's tests must mean one verl."""
    main, cpu = pins(ROOT / "constraints.txt"), pins(PINNED)
    for name in ("verl", "torch", "transformers", "ray", "tensordict", "transferqueue"):
        assert main[name] == cpu[name]


def test_verl_asks_for_a_vllm_and_the_tests_for_none() -> None:
    """vLLM from an index brings CUDA; only who trains on a GPU wants that."""
    names = {extra: {requirement.name for requirement in requirements(extra)} for extra in ("verl", "verl-core", "dev")}
    assert names["verl"] - names["verl-core"] == {"vllm"}
    assert "vllm" not in names["dev"]
    assert names["verl-core"] < names["dev"]


def test_ray_is_one_range() -> None:
    ray = {str(r.specifier) for extra in ("ray", "verl-core") for r in requirements(extra) if r.name == "ray"}
    assert len(ray) == 1


@pytest.mark.parametrize(
    ("arguments", "python", "words"),
    [
        ((), sys.executable, "usage: verl-cpu.sh VENV"),
        (("there",), "/bin/false", "verl needs Python 3.11 or 3.12; /bin/false is"),
    ],
)
def test_the_script_says_what_is_wrong(tmp_path: Path, arguments: tuple[str, ...], python: str, words: str) -> None:
    done = subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHON": python},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert words in done.stderr
    assert not any(tmp_path.iterdir())


def test_the_settings_import_nothing_heavy() -> None:
    program = "import sys, verl_cpu.settings; print([m for m in ('torch', 'verl', 'ray', 'agl') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=PLUGIN.parent, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.night
def test_verl_takes_the_platform_as_its_own() -> None:
    """Whichever is imported first, and `init_process_group` as verl calls it."""
    pytest.importorskip("verl")
    program = """
import os
import sys
from verl_cpu.settings import environment
os.environ.update(environment())
__import__(sys.argv[1])
from verl.plugin.platform import get_platform
from verl.utils.device import get_torch_device
platform = get_platform()
assert type(platform).__module__ == "verl_cpu.platform", platform
platform.synchronize()
assert get_torch_device().mem_get_info()[1] > 0
"""
    for first in ("verl", "verl_cpu.platform"):
        done = subprocess.run(
            [sys.executable, "-c", program, first], cwd=PLUGIN.parent, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr[-2000:]


def test_what_the_settings_name_is_there() -> None:
    config, named = settings.config(2, separate=True), [settings.environment()["VERL_USE_EXTERNAL_MODULES"]]
    named.append(config["actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module"])
    module, name = settings.vllm()["worker_extension_cls"].rsplit(".", 1)
    for dotted in (*named, module):
        assert (PLUGIN.parent / dotted.replace(".", "/")).with_suffix(".py").is_file()
    tree = ast.parse((PLUGIN / f"{module.rsplit('.', 1)[1]}.py").read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}


def test_verl_composes_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every key is one that verl has, or takes where its schema is open; nothing is refused as without effect."""
    pytest.importorskip("hydra")
    pytest.importorskip("verl")
    from agl_verl.config.compose import compose
    from agl_verl.config.plan import read
    from agl_verl.config.shorthand import expand

    monkeypatch.setenv("VERL_PLATFORM", settings.PLATFORM)
    for estimator, mode in (("gae", "sync"), ("grpo", "separate_async")):
        separate = mode == "separate_async"
        common: Any = {"model": "m", "steps": 1, "adv_estimator": estimator, "mode": mode}
        common |= {"rollout_gpus": 1} if separate else {}
        config = settings.config(2, separate=separate, critic=estimator == "gae")
        assert compose(read({**expand(common), **config}), {}).trainer.device == "cpu"
