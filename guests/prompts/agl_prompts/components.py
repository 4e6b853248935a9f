"""The texts that a prompt search changes: prompt templates, and the system prompts that agents send.

Invariant: a new text keeps the fields of the one that it replaces.
"""

from __future__ import annotations

import difflib
import string
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from agl import semconv
from agl.agents.resources import PromptTemplate, SystemPrompt
from agl.errors import ConfigError, NoAgentMatchedError
from agl.mdp.order import in_order
from agl.mdp.selection import Selection
from agl.mdp.spans import Span
from agl.messages import read

SHOWN_CHARACTERS = 160


@dataclass(frozen=True, slots=True)
class Component:
    """One text of a candidate: the resource `name` with its text at the start."""

    name: str
    resource: PromptTemplate | SystemPrompt

    @property
    def text(self) -> str:
        """The text at the start."""
        resource = self.resource
        return resource.template if isinstance(resource, PromptTemplate) else resource.text

    @property
    def fields(self) -> frozenset[str]:
        """The fields that each text has to have."""
        return self._fields(self.text)

    def with_text(self, text: str) -> PromptTemplate | SystemPrompt:
        """The resource with another text."""
        if isinstance(self.resource, PromptTemplate):
            return replace(self.resource, template=text)
        return replace(self.resource, text=text)

    def refusal(self, text: str) -> str | None:
        """Why this cannot be the component's text; None if it can."""
        if not text.strip():
            return "it has no text"
        try:
            fields = self._fields(text)
        except ValueError as error:
            return f"its braces do not fit ({error}); write a brace that is not part of a field twice, as {{{{ or }}}}"
        if missing := sorted(self.fields - fields):
            return f"it lost {_shown(missing)}, in whose place the program puts its values"
        if extra := sorted(fields - self.fields):
            allowed = f"the only fields are {_shown(sorted(self.fields))}" if self.fields else "there are no fields"
            return (
                f"it has {_shown(extra)}, for which the program has no value ({allowed}); "
                "write a brace that is not part of a field twice, as {{ or }}"
            )
        return None

    def _fields(self, text: str) -> frozenset[str]:
        is_formatted = isinstance(self.resource, PromptTemplate) and self.resource.engine == "f-string"
        return frozenset(_fields(text)) if is_formatted else frozenset()


def known_prompts(resources: Mapping[str, object]) -> list[Component]:
    """The prompts among named resources.

    Raises:
        ConfigError: one of them is no valid template.
    """
    components = [Component(n, r) for n, r in resources.items() if isinstance(r, PromptTemplate | SystemPrompt)]
    for component in components:
        try:
            _ = component.fields
        except ValueError as error:
            raise ConfigError(
                f"the template {component.name!r} cannot be formatted: {error}",
                hint="write a brace that is not part of a field twice, as {{ or }}",
            ) from error
    return components


def observed_prompts(
    rollouts: Sequence[Sequence[Span]], selection: Selection, known: Collection[str] = ()
) -> list[Component]:
    """The system prompts that the selected agents sent in each of their calls.

    Args:
        rollouts: the spans of each rollout that was looked at.
        known: agents to leave out.

    Raises:
        NoAgentMatchedError: no selected agent made a call.
        ConfigError: an agent's system prompt is not the same in each call, or it sent none.
    """
    calls = [list(_calls(spans)) for spans in rollouts]
    agents = list(dict.fromkeys(agent for of_rollout in calls for agent, _ in of_rollout))
    selection = selection.knowing(agents)
    selected = [agent for agent in agents if selection.policy_for(agent) is not None]
    unmatched = selection.unmatched(agents)
    if not selected or unmatched:
        what = ", ".join(unmatched or [str(selection)])
        raise NoAgentMatchedError(
            f"no request came from agents={what}; {len(rollouts)} rollouts were looked at, and the agents that made "
            f"calls are {', '.join(map(repr, agents)) or 'none'}",
            hint="use one of those names, or make the text a resource: initial_resources={name: "
            "agl.PromptTemplate(...)}",
        )
    components = []
    for agent in (agent for agent in selected if agent not in known):
        sent = [prompts for of_rollout in calls for name, prompts in of_rollout if name == agent]
        constant = [
            text for text in dict.fromkeys(sent[0]) if text.strip() and all(text in prompts for prompts in sent)
        ]
        if not constant:
            _refuse(agent, sent)
        for i, text in enumerate(constant, 1):
            name = agent if i == 1 else f"{agent}-{i}"
            components.append(Component(name, SystemPrompt(agent, text, text)))
    return components


def difference(name: str, before: str, after: str) -> str:
    """A unified diff of a component's texts."""
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), f"{name} (start)", f"{name} (result)", lineterm="", n=1
    )
    return "\n".join(lines)


def _calls(spans: Iterable[Span]) -> Iterator[tuple[str, list[str]]]:
    """(agent, its system prompts) of each call."""
    for span in in_order(spans):
        if span.operation != semconv.CHAT or span.agent is None or span.attributes.get(semconv.UNTRAINED):
            continue
        yield span.agent, [m.text for m in read.sent(span) if m.role in ("system", "developer")]


def _refuse(agent: str, sent: Sequence[Sequence[str]]) -> None:
    seen = list(dict.fromkeys(" | ".join(prompts) for prompts in sent))
    if not any(seen):
        raise ConfigError(
            f"agent {agent!r} sends no system prompt; {len(sent)} calls were looked at",
            hint="leave it out of agents=, or make its prompt a resource: initial_resources={name: "
            "agl.PromptTemplate(...)}",
        )
    cut = (text[:SHOWN_CHARACTERS] + "…" * (len(text) > SHOWN_CHARACTERS) for text in seen[:3])
    shown = "\n".join(f"    {text!r}" for text in cut)
    raise ConfigError(
        f"the system prompt of agent {agent!r} is not the same in each call; {len(seen)} were seen in {len(sent)} "
        f"calls:\n{shown}",
        hint="it is built again at each call, so no fixed text can be replaced: make it a template with fields, "
        "initial_resources={name: agl.PromptTemplate('... {field} ...')}, which the agent formats",
    )


def _fields(template: str) -> Iterator[str]:
    """The fields of a text for `str.format`, those within format specifications too. ValueError for a lone brace."""
    for _, field, specification, _ in string.Formatter().parse(template):
        if field is not None:
            yield field
            yield from _fields(specification or "")


def _shown(fields: Iterable[str]) -> str:
    return ", ".join(f"{{{field}}}" for field in fields)
