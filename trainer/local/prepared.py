"""A model as people have it, as a Hugging Face directory that every engine loads: GGUF is de-quantised, an adapter is
merged into its base, and a model without a chat template of use gets one. Made once, in a child process, and kept in
the cache.

Invariant: importing this module loads neither torch nor transformers.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from agl.errors import ConfigError, ModelLoadError, nearest
from agl.trainer.local.config import policy_directory
from agl.trainer.local.gguf import gguf_file
from agl.trainer.processes.environment import child_environment

TEMPLATES = Path(__file__).parents[1] / "rendering" / "templates"
TEMPLATE_NAMES = tuple(sorted(path.stem for path in TEMPLATES.glob("*.jinja")))
"""Chat templates by name; any other name is a file."""
CACHE_VARIABLE = "AGL_CACHE"


def model_directory(model: str | os.PathLike[str], chat_template: str | None = None) -> str:
    """The directory or hub id to load for `model`, made in the cache where there is none yet.

    Args:
        model: a Hugging Face directory, hub id, GGUF file, directory with one, directory of a LoRA adapter that names
            its base, or the directory of a run or checkpoint.
        chat_template: to use instead of the model's own: a name of `TEMPLATE_NAMES` or a Jinja file. Control tokens
            that it writes and the tokenizer lacks are added to both.

    Raises:
        ConfigError: there is no such template, or it is no Jinja template.
        ModelLoadError: the model cannot be converted.
    """
    directory = policy_directory(os.fspath(model))
    file = gguf_file(directory)
    template = None if chat_template is None else template_text(chat_template)
    if file is None and template is None and not is_adapter(directory):
        return directory
    source = str(file or directory)
    target = cache_directory() / "models" / f"{Path(source).name.removesuffix('.gguf')}-{_key(source, template)}"
    if not (target / "config.json").is_file():
        _make(source, template, target)
    return str(target)


def is_adapter(directory: str) -> bool:
    """Whether a directory holds an adapter and no model."""
    folder = Path(directory).expanduser()
    return (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file()


def require_local_model(name: str) -> None:
    """Raise `ModelLoadError` for a name that looks like a path, of which there is none."""
    looks_local = name.startswith((".", "~", os.sep)) or name.count("/") > 1
    if (looks_local or not name) and not Path(name).expanduser().exists():
        raise ModelLoadError("no such directory", hint="give a model directory or a hub id", path=name)


def cache_directory() -> Path:
    """Where agl keeps what can be made again: `$AGL_CACHE`, or `agl` in the user's cache."""
    if own := os.environ.get(CACHE_VARIABLE):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "agl"


def template_text(name: str) -> str:
    """The text of a chat template, by its name or its file.

    Raises:
        ConfigError: there is no such template, or it is no Jinja template.
    """
    from jinja2 import Environment, TemplateSyntaxError

    path = TEMPLATES / f"{name}.jinja" if name in TEMPLATE_NAMES else Path(name).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"chat_template={name!r} is neither a name nor a Jinja file", hint=nearest(name, TEMPLATE_NAMES)
        )
    text = path.read_text(encoding="utf-8")
    try:
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(text)
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"chat_template={name!r} is no Jinja template: line {error.lineno}: {error.message}",
            hint="it is a template as transformers takes one: messages, tools, add_generation_prompt",
        ) from error
    return text


def _key(source: str, template: str | None) -> str:
    """Differs where the model, the template or agl's way to prepare them does."""
    files = [Path(source)] if Path(source).is_file() else sorted(Path(source).glob("*.*"))
    facts = [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    text = json.dumps(["2", source if not files else "", facts, template])
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def _make(source: str, template: str | None, target: Path) -> None:
    what = "de-quantising" if source.endswith(".gguf") else "merging" if is_adapter(source) else "preparing"
    print(f"agl: {what} {source} once -> {target}", file=sys.stderr)
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "agl.trainer.local.conversion", source, str(partial)],
            input=json.dumps(template),
            stdout=subprocess.PIPE,
            text=True,
            # Progress bars are for people.
            stderr=None if sys.stderr.isatty() else subprocess.PIPE,
            env=child_environment(["HF_TOKEN"]),
        )
        if done.returncode:
            last = done.stdout.strip().splitlines()[-1:]
            error = json.loads(last[0]) if last and last[0].startswith("{") else {}
            raise ModelLoadError(
                error.get("message", f"the process that converts it died (exit code {done.returncode})"),
                hint=error.get(
                    "hint", f"it needs memory for the whole model in float32; {(done.stderr or '')[-1000:]}"
                ),
                path=source,
            )
        try:
            partial.rename(target)
        except OSError:
            if not (target / "config.json").is_file():  # else another process was faster
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
