"""The inputs of a rollout: a task with keys readable as attributes, and named resources such as the LLM to call."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

from agl.errors import ConfigError, DatasetError

T_co = TypeVar("T_co", covariant=True)


@runtime_checkable
class Dataset(Protocol[T_co]):
    """Anything with a length and an index: a list of tasks, a Hugging Face dataset, a torch dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> T_co: ...


class Task(dict[str, Any]):
    """A dict task; `task["question"]` is also `task.question`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the task has no field {name!r}; it has {', '.join(map(repr, self))}") from None

    @staticmethod
    def of(value: Any) -> Any:
        """`value` with every dict in it readable by attribute."""
        if isinstance(value, Mapping):
            return Task({k: Task.of(v) for k, v in value.items()})
        if isinstance(value, list | tuple):
            return [Task.of(v) for v in value]
        return value


@dataclass(frozen=True, slots=True)
class LLM:
    """An OpenAI-compatible endpoint to call.

    Attributes:
        endpoint: base URL, ending in /v1.
        model: the model name to send.
        api_key: the key to send.
        sampling_parameters: for the caller to pass on; training may override them.
        resource_type: its kind in Agent Lightning's JSON.
    """

    endpoint: str
    model: str
    api_key: str | None = None
    sampling_parameters: Mapping[str, Any] = field(default_factory=dict)
    resource_type: str = field(default="llm", kw_only=True, repr=False)

    def get_base_url(self, *_: Any) -> str:
        """The endpoint, which is specific to this attempt; accepts the ids of Agent Lightning's method."""
        return self.endpoint


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """A named text with fields.

    Attributes:
        template: the text.
        engine: "f-string" (`str.format` fields).
        resource_type: its kind in Agent Lightning's JSON.
    """

    template: str
    engine: str = "f-string"
    resource_type: str = field(default="prompt_template", kw_only=True, repr=False)

    def format(self, **values: Any) -> str:
        """The text with its fields filled in. KeyError for a missing one."""
        return self.template.format(**values)


@dataclass(frozen=True, slots=True)
class SystemPrompt:
    """A system prompt that is sent instead of the agent's own; the agent itself is unchanged.

    It is put into the agent's requests whose system prompt is exactly `observed`. Other requests of the agent are sent
    unchanged.

    Attributes:
        agent: whose requests.
        text: what is sent.
        observed: the agent's own system prompt, as its requests have it.
    """

    agent: str
    text: str
    observed: str


Resource = LLM | PromptTemplate | SystemPrompt | Any
NamedResources = dict[str, Resource]


class RolloutResources(dict[str, Any]):
    """The named resources as an agent `f(resource, task)` gets them: by name, and the model's address.

    Names also read as attributes; `model_api`, `model` and `api_key` are of the resource `llm`, or of the only LLM.
    """

    @property
    def llm(self) -> LLM:
        """The LLM to call."""
        return find_resource(self, LLM, "llm")

    @property
    def model_api(self) -> str:
        """Base URL of the model to call, ending in /v1, for the clients of OpenAI and Anthropic."""
        return self.llm.endpoint

    @property
    def model(self) -> str:
        """The model's name."""
        return self.llm.model

    @property
    def api_key(self) -> str:
        """The key to call it with; any other key works, too, since routing replaces it."""
        return self.llm.api_key or "not-used"

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"there is no resource {name!r}; there are {', '.join(map(repr, self))}") from None


def find_resource(resources: NamedResources, kind: type, name: str) -> Any:
    """The resource of that name, or the only one of that kind.

    Raises:
        ConfigError: none fits.
    """
    value = resources.get(name)
    if isinstance(value, kind):
        return value
    matches = [v for v in resources.values() if isinstance(v, kind)]
    if len(matches) == 1:
        return matches[0]
    raise ConfigError(
        f"the agent asks for {name!r} ({kind.__name__}), but the resources are {', '.join(resources) or 'empty'}",
        hint="name the argument after the resource, or give it with Trainer(initial_resources={...})",
    )


def resource_to_json(value: Resource) -> Any:
    """The JSON form of a resource."""
    if isinstance(value, LLM):
        return {
            "type": "llm",
            "endpoint": value.endpoint,
            "model": value.model,
            "sampling_parameters": dict(value.sampling_parameters),
        }
    if isinstance(value, PromptTemplate):
        return {"type": "prompt_template", "template": value.template, "engine": value.engine}
    if isinstance(value, SystemPrompt):
        return {"type": "system_prompt", "agent": value.agent, "text": value.text, "observed": value.observed}
    return {"type": "value", "value": value}


def resource_from_json(value: Mapping[str, Any]) -> Resource:
    """The resource that `resource_to_json` wrote; an LLM comes back without its key."""
    kind = value.get("type")
    if kind == "llm":
        return LLM(value["endpoint"], value["model"], None, dict(value.get("sampling_parameters", {})))
    if kind == "prompt_template":
        return PromptTemplate(value["template"], value.get("engine", "f-string"))
    if kind == "system_prompt":
        return SystemPrompt(value["agent"], value["text"], value["observed"])
    return value.get("value")


def as_tasks(dataset: Dataset[Any] | Iterable[Any] | None) -> Sequence[Any]:
    """A dataset as a sequence of tasks; an iterable without an index is read into a list.

    Raises:
        DatasetError: it is no dataset.
    """
    if dataset is None:
        return []
    if isinstance(dataset, str | bytes | os.PathLike):
        raise DatasetError(
            f"the dataset is {dataset!r}, a text",
            hint="give its tasks: [json.loads(line) for line in open(path)], or datasets.load_dataset(...)",
        )
    if isinstance(dataset, Mapping):
        raise DatasetError("the dataset is a dict", hint="give a list of tasks, or one of a DatasetDict's splits")
    if not isinstance(dataset, Iterable) and not hasattr(dataset, "__getitem__"):
        raise DatasetError(f"the dataset is {dataset!r}", hint="give a list of tasks: any JSON values, usually dicts")
    if isinstance(dataset, Sequence) and not isinstance(dataset, str | bytes):
        return dataset
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        return [dataset[i] for i in range(len(dataset))]  # type: ignore[arg-type,index]
    return list(dataset)  # type: ignore[arg-type]
