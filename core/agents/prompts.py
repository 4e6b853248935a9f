"""A directory of prompts: `prompts.json` holds the resources, `<name>.txt` each one's text for people.

The texts are copies. One that differs from its resource is an error, so an edit of it is never ignored.
"""

from __future__ import annotations

import json
import os
import urllib.parse
import uuid
from collections.abc import Mapping
from pathlib import Path

from agl.agents.resources import PromptTemplate, Resource, SystemPrompt, resource_from_json, resource_to_json
from agl.errors import ConfigError

FILE = "prompts.json"


def save_prompts(directory: str | Path, resources: Mapping[str, Resource]) -> None:
    """Write named `PromptTemplate`s and `SystemPrompt`s; the files of a name that is no longer there stay.

    `prompts.json` is replaced last and at once, so a reader finds the old resources or the new ones.

    Raises:
        ConfigError: another kind of resource, or the directory cannot be written.
    """
    folder = Path(directory)
    for name, resource in resources.items():
        if not isinstance(resource, PromptTemplate | SystemPrompt):
            raise ConfigError(
                f"the resource {name!r} is no prompt but {type(resource).__name__}",
                hint="save agl.PromptTemplate and agl.SystemPrompt resources",
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # The old texts of changed prompts would not fit the new prompts.json if the process ended in between.
        for name in resources:
            _text_file(folder, name).unlink(missing_ok=True)
        _write(folder / FILE, json.dumps({n: resource_to_json(r) for n, r in resources.items()}, indent=2) + "\n")
        for name, resource in resources.items():
            _write(_text_file(folder, name), _texts(resource)[0])
    except OSError as error:
        raise ConfigError(
            f"the prompts cannot be written to {folder}: {error.strerror}", hint="name another directory"
        ) from error


def load_prompts(directory: str | Path) -> dict[str, Resource]:
    """The resources that `save_prompts` wrote, by name.

    Raises:
        ConfigError: there is no such directory, its prompts.json is broken, or a text differs from it.
    """
    path = Path(directory) / FILE
    hint = "a directory of prompts is written by save_prompts, agl.GEPA or agl.APO and holds a prompts.json"
    try:
        written = json.loads(path.read_bytes())
        resources = {name: resource_from_json(value) for name, value in written.items()}
    except OSError as error:
        raise ConfigError(f"there are no prompts in {directory}: {path} {error.strerror}", hint=hint) from error
    except (ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path} does not hold prompts: {type(error).__name__}: {error}", hint=hint) from error
    for name, resource in resources.items():
        texts = _texts(resource)
        if not texts or not all(isinstance(text, str) for text in texts):
            raise ConfigError(f"{path} does not hold prompts: {name!r} is not one", hint=hint)
        text_file = _text_file(path.parent, name)
        if text_file.exists() and text_file.read_bytes() != texts[0].encode():
            raise ConfigError(
                f"{text_file} differs from the prompt {name!r} in {path}",
                hint=f"{FILE} is what is used: edit the prompt there and delete {text_file.name}",
            )
    return resources


def _texts(resource: Resource) -> tuple[str, ...]:
    """The texts of a prompt, its own first; none for another resource."""
    if isinstance(resource, PromptTemplate):
        return resource.template, resource.engine
    if isinstance(resource, SystemPrompt):
        return resource.text, resource.agent, resource.observed
    return ()


def _text_file(folder: Path, name: str) -> Path:
    """The file of a prompt, whose name may hold any characters."""
    return folder / f"{urllib.parse.quote(name, safe=' ')}.txt"


def _write(path: Path, text: str) -> None:
    part = path.with_name(f".{uuid.uuid4().hex}.part")
    part.write_bytes(text.encode())
    os.replace(part, path)
