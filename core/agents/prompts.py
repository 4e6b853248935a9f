"""Prompts as resources: directories of them, what they replace, and which of them were used.

In a directory, `prompts.json` holds the resources and `<name>.txt` a copy of each one's text for people. A copy that
differs from its resource is an error, so that an edit of it is never ignored.
"""

from __future__ import annotations

import hashlib
import json
import os
import urllib.parse
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from agl import semconv
from agl.agents.resources import PromptTemplate, Resource, SystemPrompt, resource_from_json, resource_to_json
from agl.errors import ConfigError
from agl.mdp.spans import Span
from agl.tracing.system_prompts import SystemPrompts

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
                f"the resource {name!r} is of type {type(resource).__name__}, not a prompt",
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
        raise ConfigError(f"there are no prompts in {directory}: {path}: {error.strerror}", hint=hint) from error
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


def prompts_digest(prompts: Mapping[str, Resource]) -> str:
    """12 hex digits that tell one set of prompts from another."""
    written = json.dumps({name: resource_to_json(prompt) for name, prompt in prompts.items()}, sort_keys=True)
    return hashlib.blake2b(written.encode(), digest_size=6).hexdigest()


def replacements(resources: Mapping[str, Resource]) -> SystemPrompts | None:
    """What the `SystemPrompt`s among the resources replace agents' own prompts with; None if there are none.

    Raises:
        ConfigError: two of them replace the same prompt of the same agent.
    """
    prompts: dict[str, dict[str, tuple[str, str]]] = {}
    for name, resource in resources.items():
        if not isinstance(resource, SystemPrompt):
            continue
        texts = prompts.setdefault(resource.agent, {})
        if resource.observed in texts:
            raise ConfigError(
                f"{texts[resource.observed][0]!r} and {name!r} replace the same system prompt of {resource.agent!r}",
                hint="keep one of the two resources",
            )
        texts[resource.observed] = name, resource.text
    return prompts or None


class PromptUse:
    """Counts the requests that got the `SystemPrompt`s among the resources, over any number of attempts.

    Attributes:
        requests: name of the resource -> requests that got it.
        left: agent -> beginning of a system prompt that it sent and that was left -> requests.
        counted: attempts.
    """

    def __init__(self, resources: Mapping[str, Resource]) -> None:
        self.requests = {name: 0 for name, r in resources.items() if isinstance(r, SystemPrompt)}
        self.left: dict[str, Counter[str]] = {}
        self.counted = 0
        self._agents = {name: r.agent for name, r in resources.items() if isinstance(r, SystemPrompt)}
        self._senders: set[str] = set()

    def add(self, spans: Iterable[Span]) -> None:
        """Count an attempt's requests."""
        self.counted += 1
        for span in spans:
            if span.operation != semconv.CHAT:
                continue
            names = span.attributes.get(semconv.SYSTEM_PROMPTS)
            self._senders.add(span.agent or "")
            for name in names or ():
                self.requests[name] = self.requests.get(name, 0) + 1
            if names is not None and not names:
                left = str(span.attributes.get(semconv.SYSTEM_PROMPT_LEFT) or "")
                self.left.setdefault(span.agent or "", Counter())[left] += 1

    def unused(self, *, of_seen_agents: bool = False) -> list[str]:
        """A sentence for each prompt that no request got, with what the agent's requests had instead.

        Args:
            of_seen_agents: leave out prompts of agents that have sent no request yet.
        """
        names = [name for name, count in self.requests.items() if not count]
        return [self._why(name) for name in names if not of_seen_agents or self._agents[name] in self.left]

    def _why(self, name: str) -> str:
        agent = self._agents[name]
        told = f"the system prompt {name!r} was not used: "
        if not self._senders:
            return f"{told}no request was seen"
        if agent not in self._senders:
            return f"{told}agent {agent!r} sent no request; agents that did: {', '.join(sorted(self._senders))}"
        told += f"no request of {agent!r} had the prompt that it replaces"
        if not (seen := self.left.get(agent)):
            return f"{told}, but only others that were replaced"
        shown = ", ".join(f"{text!r} ({n}x)" if text else f"none ({n}x)" for text, n in seen.most_common(3))
        more = f" and {len(seen) - 3} more" if len(seen) > 3 else ""
        return (
            f"{told}. They had {shown}{more}. An agent that builds its prompt at each call needs an "
            "agl.PromptTemplate resource instead"
        )


def _texts(resource: Resource) -> tuple[str, ...]:
    """The texts of a prompt, its own first; none for another resource."""
    if isinstance(resource, PromptTemplate):
        return resource.template, resource.engine
    if isinstance(resource, SystemPrompt):
        return resource.text, resource.agent, resource.observed
    return ()


def _text_file(folder: Path, name: str) -> Path:
    """The file of a prompt; the prompt's name may hold any characters."""
    return folder / f"{urllib.parse.quote(name, safe=' ')}.txt"


def _write(path: Path, text: str) -> None:
    part = path.with_name(f".{uuid.uuid4().hex}.part")
    part.write_bytes(text.encode())
    os.replace(part, path)
