"""What is not installed is one clear line. Runs in the environments of `tests/matrix.py`, which lack it for real."""

from __future__ import annotations

import importlib
import pkgutil
from importlib.util import find_spec

import pytest

import agl
from agl.errors import MissingExtraError
from agl.extras import MODULES, SERVER, TRAINING

READABLE = all(find_spec(module) for module in SERVER if module != "sqlalchemy")
"""All names of `agl` can be read: a database is looked for where a run is made. crewai alone brings that much."""
core = pytest.mark.skipif(READABLE, reason="what reading the names of agl needs is installed here")
no_torch = pytest.mark.skipif(
    find_spec("torch") is not None or not READABLE, reason="torch is installed here, or little is"
)
ALGORITHMS = ("DAPO", "DrGRPO", "GRPO", "GSPO", "PPO", "REINFORCE", "REINFORCEPlusPlus", "RLOO")
LOCAL = r'in the root of the agl clone: pip install "\.\[local\]"'


@core
@pytest.mark.parametrize("name", [*ALGORITHMS, "Trainer", "Baseline", "VERL", "GEPA", "evaluate", "VLLMEngine"])
def test_beside_a_framework_alone_a_name_says_what_it_needs(name: str) -> None:
    with pytest.raises(MissingExtraError, match=rf"agl.{name} needs \w+, which is not installed\n  -> {LOCAL}"):
        getattr(agl, name)


@core
def test_an_import_fails_as_imports_do() -> None:
    with pytest.raises(ImportError, match=LOCAL):
        from agl import GRPO  # noqa: F401
    with pytest.raises(MissingExtraError, match=r"pip install \./guests/service"):
        _ = agl.Client


@no_torch
@pytest.mark.parametrize("name", ALGORITHMS)
def test_without_torch_an_algorithm_is_refused_when_it_is_made(name: str) -> None:
    with pytest.raises(MissingExtraError, match=rf"agl.{name} needs torch, which is not installed\n  -> {LOCAL}"):
        getattr(agl, name)(model="m", steps=1)


@no_torch
def test_so_is_what_would_load_a_model_or_needs_another_part() -> None:
    with pytest.raises(MissingExtraError, match=LOCAL):
        agl.Baseline(model="m")
    with pytest.raises(MissingExtraError, match=LOCAL):
        agl.VERL(model="m", steps=1, backend="local")
    if find_spec("ray") is None:
        with pytest.raises(MissingExtraError, match=r'pip install "\.\[ray\]"'):
            agl.Trainer(agl.Baseline(), runners="ray")
    if find_spec("gepa") is None:
        with pytest.raises(MissingExtraError, match=r"pip install \./guests/prompts"):
            agl.GEPA(reflection=str, budget=9)


@pytest.mark.skipif(find_spec("verl") is not None, reason="what runs inside verl's workers needs all of them")
def test_every_module_imports_where_its_packages_are() -> None:
    """On each version of Python: no module fails for another reason than a package that is not installed."""
    failed, n = {}, 0
    for module in pkgutil.walk_packages(agl.__path__, "agl.", onerror=lambda name: None):
        if module.name.endswith(("__main__", "sitecustomize", "vllm_main")):
            continue
        try:
            importlib.import_module(module.name)
            n += 1
        except ImportError as error:
            failed[module.name] = (error.name or "", str(error))
    broken = {name: said for name, (missing, said) in failed.items() if missing.startswith("agl")}
    assert broken == {}
    assert n > 50


def test_the_modules_are_those_of_the_extras() -> None:
    assert set(SERVER) <= set(MODULES["local"])
    assert set(TRAINING) <= set(MODULES["local"])
