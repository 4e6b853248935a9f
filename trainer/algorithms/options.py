"""The options of `agl train` and `agl serve`, from a YAML file, the environment, command line and clients, all checked
alike.

An option is one word. In the file it stands in its section; everywhere else it stands alone.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, TypeAdapter, ValidationError

from agl.credit import Credit
from agl.errors import ConfigError, nearest
from agl.extras import missing
from agl.mdp.conditions import reward
from agl.texts import docstring_items
from agl.trainer.algorithms.distill import Distill
from agl.trainer.algorithms.imitation import SFT
from agl.trainer.algorithms.loop import LocalTraining
from agl.trainer.algorithms.policy_gradient import DAPO, GRPO, GSPO, PPO, REINFORCE, RLOO, DrGRPO, REINFORCEPlusPlus
from agl.trainer.algorithms.preference import DPO
from agl.trainer.algorithms.rejection import RFT
from agl.trainer.algorithms.settings import OTHER_NAMES
from agl.trainer.local.config import EngineName, LoraSpec
from agl.trainer.objectives import Estimator, PolicyLossKind
from agl.trainer.run.config import RunConfig, bare_word, credit_of_text

ALGORITHMS: Mapping[str, type[LocalTraining]] = {
    "grpo": GRPO,
    "drgrpo": DrGRPO,
    "rloo": RLOO,
    "reinforce": REINFORCE,
    "reinforceplusplus": REINFORCEPlusPlus,
    "ppo": PPO,
    "gspo": GSPO,
    "dapo": DAPO,
    # Agent Lightning's paper (arXiv 2508.03680, section 3.3): a rollout's return is credited to each of its calls, and
    # the calls are trained with a single-turn algorithm, GRPO in its experiments. That is GRPO with Uniform credit.
    "lightningrl": GRPO,
    "sft": SFT,
    "rft": RFT,
    "distill": Distill,
    "dpo": DPO,
}
"""By name, in lower case and without dashes and underscores; "reinforce++" is another spelling."""

ENVIRONMENT = {
    "LIGHTNING_MODEL_PATH": "model",
    "LIGHTNING_RL_ALGORITHM": "algorithm",
    "AGL_DATABASE_URL": "store",
}
_CLOSED = re.compile(r"(gpt-[345]|chatgpt|o[134](-|$)|claude-|gemini-)", re.IGNORECASE)


_MODEL = (
    "model",
    "lora",
    "device",
    "dtype",
    "quantize",
    "max_context",
    "renderer",
    "chat_template",
    "threads",
    "engine",
)
"""The settings of an algorithm that stand in section `model`, where `model` is called `name`."""
_OBJECTS = {
    "tracer",
    "policies",
    "group_reward",
    "runners",
    "runner_key",
    "initial_resources",
    "prompts",
    "hooks",
    "progress",
    "callbacks",
    "selection",
}
"""Settings of a run that text cannot express, or that commands name differently."""
_AS_TEXT: Mapping[str, Any] = {
    "where": str,
    "by": str,
    "teacher": str | dict[str, str],
    "lora": int | LoraSpec | None,
    "device": Literal["auto", "cpu", "cuda", "mps"],
    "engine": str | None,
    "agents": str | list[str] | None,
    "credit": str,
    "adv_estimator": Estimator,
    "policy_loss": PolicyLossKind,
    "air": bool,
    "reward_range": Annotated[
        tuple[float, float] | None, BeforeValidator(lambda given: given.split(",") if isinstance(given, str) else given)
    ],
    "store": str,
    "log": str | list[str],
}
"""Settings that are objects in Python -> what stands for them here: an adapter's rank, an engine's URL, ..."""


@dataclass(frozen=True)
class Option:
    """A setting that can be written as text.

    Attributes:
        kind: its type.
        default: of the setting.
        help: one sentence.
    """

    kind: Any
    default: Any
    help: str

    @cached_property
    def adapter(self) -> TypeAdapter[Any]:
        """Checks a value."""
        return TypeAdapter(self.kind)


def _options(cls: type) -> dict[str, Option]:
    """The fields of a dataclass, with the first sentence that its docstring has on each."""
    hints = {**typing.get_type_hints(cls), **_AS_TEXT}
    docs = attribute_docs(cls)
    return {
        f.name: Option(hints[f.name], f.default, docs.get(f.name, ""))
        for f in fields(cls)
        if f.name not in _OBJECTS or cls is not RunConfig
    }


def attribute_docs(cls: type) -> dict[str, str]:
    """The first sentence on each attribute, from the docstrings of a class and its bases."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        section = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")[2].partition("\n\n")[0]
        docs |= {name: re.split(r"\.(?: |$)", text)[0].replace("`", "") for name, text in docstring_items(section)}
    return docs


_ALGORITHMS: Mapping[type[LocalTraining], Mapping[str, Option]] = {cls: _options(cls) for cls in ALGORITHMS.values()}
SECTIONS: Mapping[str, Mapping[str, Option]] = {
    "model": {name: _ALGORITHMS[GRPO][name] for name in _MODEL},
    "training": {
        "algorithm": Option(str, "grpo", f"one of {', '.join(ALGORITHMS)}"),
        **{
            name: option
            for cls in reversed([*_ALGORITHMS])
            for name, option in _ALGORITHMS[cls].items()
            if name not in (*_MODEL, "data")
        },
    },
    "runtime": {
        **_options(RunConfig),
        "air_rules": Option(str | None, None, "Python file with the rules of --air"),
    },
}
OPTIONS: Mapping[str, Option] = {name: option for options in SECTIONS.values() for name, option in options.items()}
_OF_SERVER = {
    "prompts",
    "n_workers",
    "air_rules",
    "host",
    "port",
    "store",
    "directory",
    "gateways",
    "capture_content",
    "log",
    "project",
    "name",
}
RUN_OPTIONS = frozenset({*SECTIONS["training"], *SECTIONS["runtime"]} - _OF_SERVER)
"""Options that a client can set for its run: none that names a file of the server."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Checked options.

    Attributes:
        values: by option.
        origins: the source of each, for errors.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, options: Mapping[str, Any], origin: str, *, known: Iterable[str] = OPTIONS) -> Settings:
        """Check options; those that are None are left out.

        Raises:
            ConfigError: an unknown option, or a value that it cannot take.
        """
        return cls._collect(((name, value, origin) for name, value in options.items()), known)

    @classmethod
    def _collect(cls, written: Iterable[tuple[str, Any, str]], known: Iterable[str] = OPTIONS) -> Settings:
        """Check (name, value, origin) of options, under any of their names."""
        values = {}
        origins = {}
        names = {}
        for name, value, origin in written:
            if name == "auto_instrumentation":
                if value is not True:
                    raise ConfigError(
                        f"{origin}: instrumentation cannot be switched off",
                        hint="a call that is not traced cannot be trained; agents= leaves agents out of training",
                    )
                continue
            option = OTHER_NAMES.get(name, name)
            if option not in set(known):
                raise ConfigError(f"{origin}: there is no option {name!r}", hint=nearest(name, known))
            if option in names:
                raise ConfigError(
                    f"{origin}: {name} is set twice: {names[option]} sets it, too", hint="leave one of them out"
                )
            names[option] = f"{name} ({origin})"
            if value is None:
                continue
            if name == "gpus":
                value = _device(value, origin)
            values[option], origins[option] = _checked(OPTIONS[option].adapter, name, value, origin), origin
        return cls(values, origins)

    @classmethod
    def of_environment(cls, environ: Mapping[str, str]) -> Settings:
        """The options in the environment."""
        return cls._collect((name, environ[v], v) for v, name in ENVIRONMENT.items() if environ.get(v))

    @classmethod
    def of_assignments(cls, assignments: Iterable[str]) -> Settings:
        """The options of `--set NAME=VALUE`; values are YAML.

        Raises:
            ConfigError: not of that form; or as for `of`.
        """
        import yaml

        written = []
        for assignment in assignments:
            name, equals, text = assignment.partition("=")
            if not equals:
                raise ConfigError(f"--set {assignment!r} names no value", hint="write --set learning_rate=1e-5")
            try:
                value = yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise ConfigError(f"--set {name}: {text!r} cannot be read: {error}") from None
            written.append((name.strip(), value, f"--set {assignment}"))
        return cls._collect(written)

    @classmethod
    def of_command_line(
        cls, flags: Mapping[str, Any], assignments: Iterable[str], config: Path | None, base: Settings
    ) -> Settings:
        """The options of a command: `base`, overridden by the file, and that by assignments and flags.

        Args:
            flags: option -> value, None where it was left out.
        """
        settings = base if config is None else base.under(cls.of_file(config))
        assigned = cls.of_assignments(assignments)
        written = cls._collect((n, v, f"--{n.replace('_', '-')}") for n, v in flags.items() if v is not None)
        for name in written.values.keys() & assigned.values.keys():
            raise ConfigError(
                f"{written.origins[name]}: {name} is set twice: {assigned.origins[name]} sets it, too",
                hint="leave one of them out",
            )
        return settings.under(assigned).under(written)

    @classmethod
    def of_file(cls, path: str | Path) -> Settings:
        """The options in a YAML file.

        Raises:
            ConfigError: the file cannot be read; or as for `of`, with the line.
        """
        written = []
        for section, name, value, line in _entries(Path(path)):
            where = f"{path} line {line}"
            if section not in SECTIONS:
                raise ConfigError(f"{where}: there is no section {section!r}", hint=nearest(section, SECTIONS))
            option = "model" if (section, name) == ("model", "name") else OTHER_NAMES.get(name, name)
            if option not in {*SECTIONS[section], "auto_instrumentation"}:
                sections = [s for s, options in SECTIONS.items() if option in options]
                hint = f"it belongs to {sections[0]}:" if sections else nearest(name, SECTIONS[section])
                raise ConfigError(f"{where}: {section} has no option {name!r}", hint=hint)
            written.append(("model" if option == "model" else name, value, where))
        return cls._collect(written)

    def under(self, over: Settings) -> Settings:
        """These options, overridden by those of `over`; `steps` overrides `epochs` and the other way round."""
        values = dict(self.values)
        if {"steps", "epochs"} & set(over.values):
            values = {k: v for k, v in values.items() if k not in ("steps", "epochs")}
        return Settings({**values, **over.values}, {**self.origins, **over.origins})

    def get(self, name: str) -> Any:
        """The option's value, or its default."""
        if name in self.values or name in (*SECTIONS["training"], "model", "engine"):
            return self.values.get(name)
        return None if OPTIONS[name].default is MISSING else OPTIONS[name].default

    def model(self) -> str:
        """The model.

        Raises:
            ConfigError: no model is named, or one whose provider keeps its weights.
        """
        name = self.get("model")
        if not name:
            raise ConfigError("no model given", hint="--model DIR, or model: name: in --config")
        if _CLOSED.match(name) and not Path(name).exists():
            raise ConfigError(
                f"{self.origins.get('model', 'model')}: {name!r} cannot be trained: its provider keeps its weights",
                hint="name a Hugging Face directory or hub id; agents that should stay on that model are left out with "
                "agents=",
            )
        return name

    def credit(self) -> Credit:
        """How rewards become returns.

        Raises:
            ConfigError: there is no such credit, or it has no such options.
        """
        return credit_of_text(self.values.get("credit", "uniform"), self.origins.get("credit", "credit"))

    def run_options(self) -> dict[str, Any]:
        """What `agl.Trainer` is given, whoever starts the run."""
        return {name: self.get(name) for name in _options(RunConfig)} | {"credit": self.credit()}

    def algorithm(self, steps: int | None = None, **objects: Any) -> LocalTraining:
        """The algorithm with its settings.

        Args:
            steps: of an algorithm that samples, where no option says how long it trains; None = one epoch.
            objects: further options of it, which no text can express.

        Raises:
            ConfigError: there is no such algorithm, settings contradict each other, or one does not apply to it.
        """
        cls = algorithm_class(self.get("algorithm"), self.origins.get("algorithm", "algorithm"))
        engine = self.get("engine")
        if engine is not None and engine not in typing.get_args(EngineName):
            raise ConfigError(
                f"{self.origins['engine']}: the weights of another server cannot be trained here",
                hint="leave the algorithm out to serve them unchanged, or the engine to train the model",
            )
        settings = _ALGORITHMS[cls]
        names = settings.keys() - {*_MODEL, "data"}
        for name, option in settings.items():
            if option.default is MISSING and name not in {"model", *objects, *self.values}:
                how = "--data STORE of agl train" if name == "data" else f"--set {name}=..."
                raise ConfigError(f"{cls.__name__} needs {name}=", hint=how)
        options: dict[str, Any] = {}
        for name, value in self.values.items():
            if name in SECTIONS["training"] and name != "algorithm":
                if name not in names:
                    origin = self.origins[name]
                    raise ConfigError(f"{origin}: {cls.__name__} has no option {name!r}", hint=nearest(name, names))
                options[name] = reward(value) if name == "by" else value
        if not {"steps", "epochs"} & set(options) and cls.timed:
            options |= {"steps": steps} if steps and cls.needs_tasks else {"epochs": 1}
        options |= {name: self.values[name] for name in _MODEL if name in self.values} | {"model": self.model()}
        if isinstance(rank := options.get("lora"), int):
            options["lora"] = LoraSpec(rank=rank, alpha=2.0 * rank)
        return cls(**options, **objects)

    def check(self) -> None:
        """Check that the options fit together, before anything is started.

        Raises:
            ConfigError: they do not; names the option and its source.
        """
        if self.get("engine") is None:
            self.model()
        if self.get("algorithm") is not None:
            self.algorithm()


def algorithm_class(name: str | None, origin: str = "algorithm") -> type[LocalTraining]:
    """The algorithm of that name.

    Raises:
        ConfigError: there is no such algorithm.
    """
    word = bare_word(name or "").replace("++", "plusplus")
    if word not in ALGORITHMS:
        script_only = {"verl": "VERL", "gepa": "GEPA", "apo": "APO", "baseline": "Baseline"}
        hint = f"agl.{script_only[word]} is used in a script" if word in script_only else nearest(word, ALGORITHMS)
        raise ConfigError(f"{origin}: there is no algorithm {name!r}", hint=hint)
    return ALGORITHMS[word]


def _device(gpus: Any, origin: str) -> str:
    """The device that a number of GPUs stood for."""
    if gpus not in (0, 1):
        raise ConfigError(
            f"{origin}: the embedded trainer uses one GPU, not {gpus}",
            hint="device: cpu or cuda; for several, train with algorithm=agl.VERL(config) in a script",
        )
    return "cuda" if gpus else "cpu"


def _checked(kind: TypeAdapter[Any], name: str, value: Any, origin: str) -> Any:
    try:
        return kind.validate_python(value)
    except ValidationError as error:
        why = "; ".join(e["msg"].lower() for e in error.errors()[:2])
        raise ConfigError(f"{origin}: {name} is {value!r}: {why}") from None


def _entries(path: Path) -> list[tuple[str, str, Any, int]]:
    """(section, option, value, line) of every option in the file."""
    try:
        import yaml
    except ImportError:
        raise missing("--config", "yaml", "local") from None
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration cannot be read: {error}") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else "?"
        raise ConfigError(f"{path} line {line}: not YAML: {error.problem}") from None
    entries: list[tuple[str, str, Any, int]] = []
    if root is None:
        return entries
    for section, body in _pairs(root, path, "sections"):
        if isinstance(body, yaml.ScalarNode) and body.value == "":
            continue
        for key, node in _pairs(body, path, section.value):
            line = key.start_mark.line + 1
            loader = yaml.SafeLoader("")
            try:
                entries.append((section.value, key.value, loader.construct_document(node), line))
            except yaml.YAMLError as error:
                raise ConfigError(f"{path} line {line}: not plain YAML: {error}") from None
            finally:
                loader.dispose()
    return entries


def _pairs(node: Any, path: Path, what: str) -> list[tuple[Any, Any]]:
    if type(node).__name__ != "MappingNode":
        raise ConfigError(
            f"{path} line {node.start_mark.line + 1}: {what} must be a mapping",
            hint="as in\nmodel:\n  name: DIR\ntraining:\n  algorithm: grpo\nruntime:\n  n_workers: 8",
        )
    return node.value
