"""The options of `agl train` and `agl serve`, from a YAML file, the environment, command line and clients, all checked
alike.

An option is one word. In the file it stands in its section; everywhere else it stands alone.
"""

from __future__ import annotations

import ast
import re
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from agl import credit as credits
from agl.credit import Credit
from agl.errors import ConfigError, nearest
from agl.extras import missing
from agl.mdp.conditions import reward
from agl.trainer.algorithms.distill import Distill
from agl.trainer.algorithms.family import DAPO, GRPO, GSPO, PPO, REINFORCE, RLOO, DrGRPO, REINFORCEPlusPlus
from agl.trainer.algorithms.imitation import SFT
from agl.trainer.algorithms.loop import LocalTraining
from agl.trainer.algorithms.preference import DPO
from agl.trainer.algorithms.rejection import RFT
from agl.trainer.local.config import EngineName, LoraSpec

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
_FLAGS = {"nworkers": "workers", "air_enabled": "air", "keep": "where"}
"""Option -> its flag, where that has another name."""
_CLOSED = re.compile(r"(gpt-[345]|chatgpt|o[134](-|$)|claude-|gemini-)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Section `model`.

    Attributes:
        name: a Hugging Face directory or hub id; outside of the file this option is called `model`.
        lora_rank: train a LoRA adapter of this rank. dtype, max_context, renderer, threads: as for `agl.GRPO`.
        gpus: 0 = CPU, 1 = a GPU; None = a GPU where there is one.
        engine: the URL of a `vllm serve` that holds the policy, which is then served and not trained; its key is
            VLLM_API_KEY. Tokenizer and chat template come from `name`, or from the server's model if `name` is empty.
            With an algorithm, what samples here: "torch" or "vllm".
    """

    name: str = ""
    lora_rank: int | None = None
    dtype: str = "auto"
    max_context: int | None = None
    renderer: str | None = None
    threads: int | None = None
    gpus: int | None = None
    engine: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeOptions:
    """Section `runtime`.

    Attributes:
        nworkers: rollouts that each client runs at once. agents: which agents are trained (names, globs); None = all.
        air_enabled: reward tool outcomes by rule: those of `air_rules`, a Python file on the server, or the client's;
            those of `agl train` may be in the agent's file, too.
        credit: how rewards become returns: the name of a class of `agl.credit`, such as `discounted(0.9)`.
        auto_instrumentation: always on. timeout: seconds per rollout. max_attempts: tries per rollout.
        silent_seconds: how long a client may be silent before its rollouts are run again.
        seed: of training. capture_content: whether texts are recorded in addition to the tokens.
        host, port: address to listen on. store: URL of the store. out: the directory of data, runs and policies.
        gateways: processes that answer the agents' requests, on the ports after `port`; None = 1, this process.
    """

    nworkers: int = 4
    agents: str | list[str] | None = None
    air_enabled: bool = False
    air_rules: str | None = None
    credit: str = "uniform"
    auto_instrumentation: bool = True
    timeout: float | None = 600.0
    max_attempts: int = 2
    silent_seconds: float = 30.0
    seed: int = 0
    capture_content: bool = True
    host: str = "127.0.0.1"
    port: int = 8000
    gateways: int | None = None
    store: str | None = None
    out: str = "agl-serve"


_OF_MODEL = {f.name for f in fields(ModelOptions)} | {"model", "device", "lora"}
_AS_TEXT: Mapping[str, Any] = {"keep": str, "by": str, "teacher": str | dict[str, str]}
"""Options that are objects in Python -> what stands for them here."""
_CREDITS = ("Uniform", "Discounted", "PerCall", "PerAgent", "Cooperative", "Competitive", "TurnGroups")


def _types(cls: type, names: Iterable[str]) -> dict[str, TypeAdapter[Any]]:
    hints = {**typing.get_type_hints(cls), **_AS_TEXT}
    return {name: TypeAdapter(hints[name]) for name in names}


def _of_algorithm(cls: type[LocalTraining]) -> set[str]:
    """The options of section `training` that an algorithm has."""
    return {f.name for f in fields(cls)} - _OF_MODEL - {"data"}


SECTIONS: Mapping[str, Mapping[str, TypeAdapter[Any]]] = {
    "model": _types(ModelOptions, (f.name for f in fields(ModelOptions))),
    "training": {
        "algorithm": TypeAdapter(str),
        **{name: kind for cls in ALGORITHMS.values() for name, kind in _types(cls, _of_algorithm(cls)).items()},
    },
    "runtime": _types(RuntimeOptions, (f.name for f in fields(RuntimeOptions))),
}
OPTIONS: Mapping[str, TypeAdapter[Any]] = {
    ("model" if (section, name) == ("model", "name") else name): kind
    for section, options in SECTIONS.items()
    for name, kind in options.items()
}
RUN_OPTIONS = frozenset(
    {*SECTIONS["training"], "agents", "air_enabled", "credit", "timeout", "max_attempts", "seed", "silent_seconds"}
    - {"prompts"}
)
"""Options that a client can set for its run: none that names a file of the server."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Checked options.

    Attributes:
        values: by option. origins: the source of each, for errors.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, options: Mapping[str, Any], origin: str, *, known: Iterable[str] = OPTIONS) -> Settings:
        """Check options; those that are None are left out.

        Raises:
            ConfigError: an unknown option, or a value that it cannot take.
        """
        values = {}
        for name, value in options.items():
            if name not in set(known):
                raise ConfigError(f"{origin}: there is no option {name!r}", hint=nearest(name, known))
            if value is not None:
                values[name] = _checked(OPTIONS[name], name, value, origin)
        return cls(values, dict.fromkeys(values, origin))

    @classmethod
    def of_environment(cls, environ: Mapping[str, str]) -> Settings:
        """The options in the environment."""
        merged = cls()
        for variable, name in ENVIRONMENT.items():
            if environ.get(variable):
                merged = merged.under(cls.of({name: environ[variable]}, variable))
        return merged

    @classmethod
    def of_assignments(cls, assignments: Iterable[str]) -> Settings:
        """The options of `--set NAME=VALUE`; values are YAML.

        Raises:
            ConfigError: not of that form; or as for `of`.
        """
        import yaml

        settings = cls()
        for assignment in assignments:
            name, equals, text = assignment.partition("=")
            if not equals:
                raise ConfigError(f"--set {assignment!r} names no value", hint="write --set learning_rate=1e-5")
            try:
                value = yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise ConfigError(f"--set {name}: {text!r} cannot be read: {error}") from None
            settings = settings.under(cls.of({name.strip(): value}, f"--set {assignment}"))
        return settings

    @classmethod
    def of_command_line(
        cls, flags: Mapping[str, Any], assignments: Iterable[str], config: Path | None, base: Settings
    ) -> Settings:
        """The options of a command: `base`, overridden by the file, by assignments, by flags.

        Args:
            flags: option -> value, None where it was left out.
        """
        settings = base if config is None else base.under(cls.of_file(config))
        values, origins = {}, {}
        for name, value in flags.items():
            flag = cls.of({name: value}, f"--{_FLAGS.get(name, name).replace('_', '-')}")
            values |= flag.values
            origins |= flag.origins
        return settings.under(cls.of_assignments(assignments)).under(cls(values, origins))

    @classmethod
    def of_file(cls, path: str | Path) -> Settings:
        """The options in a YAML file.

        Raises:
            ConfigError: the file cannot be read; or as for `of`, with the line.
        """
        values, origins = {}, {}
        for section, name, value, line in _entries(Path(path)):
            where = f"{path} line {line}"
            if section not in SECTIONS:
                raise ConfigError(f"{where}: there is no section {section!r}", hint=nearest(section, SECTIONS))
            if name not in SECTIONS[section]:
                sections = [s for s, options in SECTIONS.items() if name in options]
                hint = f"it belongs to {sections[0]}:" if sections else nearest(name, SECTIONS[section])
                raise ConfigError(f"{where}: {section} has no option {name!r}", hint=hint)
            option = "model" if (section, name) == ("model", "name") else name
            if value is not None:
                values[option] = _checked(SECTIONS[section][name], f"{section}.{name}", value, where)
                origins[option] = where
        return cls(values, origins)

    def under(self, over: Settings) -> Settings:
        """These options, overridden by those of `over`; `steps` overrides `epochs` and the other way round."""
        values = dict(self.values)
        if {"steps", "epochs"} & set(over.values):
            values = {k: v for k, v in values.items() if k not in ("steps", "epochs")}
        return Settings({**values, **over.values}, {**self.origins, **over.origins})

    def get(self, name: str) -> Any:
        """The option's value, or its default."""
        if name in self.values:
            return self.values[name]
        for cls in (RuntimeOptions, ModelOptions):
            default = next((f.default for f in fields(cls) if f.name == name), ...)
            if default is not ...:
                return default
        return None

    @property
    def device(self) -> Literal["auto", "cpu", "cuda"]:
        """The device of the policy.

        Raises:
            ConfigError: more GPUs than the embedded trainer uses.
        """
        gpus = self.get("gpus")
        if gpus is not None and (gpus < 0 or gpus > 1):
            raise ConfigError(
                f"{self.origins.get('gpus', 'gpus')}: the embedded trainer uses one GPU, not {gpus}",
                hint="0 is the CPU, 1 a GPU; for several, train with algorithm=agl.VERL(config) in a script",
            )
        return "auto" if gpus is None else "cuda" if gpus else "cpu"

    def model(self) -> str:
        """The model.

        Raises:
            ConfigError: no model is named, or one whose provider keeps its weights.
        """
        name = self.get("model")
        if not name:
            raise ConfigError("which model?", hint="--model DIR, or model: name: in --config")
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
        text, origin = self.get("credit"), self.origins.get("credit", "credit")
        match = re.fullmatch(r"\s*([\w-]+)\s*(\(.*\))?\s*", text)
        by_word = {_word(name): name for name in _CREDITS}
        if match is None or _word(match[1]) not in by_word:
            raise ConfigError(f"{origin}: there is no credit {text!r}", hint=nearest(text, by_word))
        try:
            call = ast.parse(f"f{match[2] or '()'}", mode="eval").body
            assert isinstance(call, ast.Call)
            values = [ast.literal_eval(value) for value in call.args]
            options = {str(option.arg): ast.literal_eval(option.value) for option in call.keywords}
            return getattr(credits, by_word[_word(match[1])])(*values, **options)
        except (SyntaxError, ValueError, TypeError) as error:
            raise ConfigError(f"{origin}: credit {text!r}: {error}", hint="for example discounted(0.9)") from None

    def run_options(self) -> dict[str, Any]:
        """What `agl.Trainer` is given, whoever starts the run."""
        names = ("agents", "seed", "max_attempts", "timeout", "silent_seconds", "capture_content", "port", "gateways")
        return {name: self.get(name) for name in names} | {"n_workers": self.get("nworkers"), "credit": self.credit()}

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
        names = _of_algorithm(cls)
        defaults = {f.name: f.default for f in fields(cls)}
        for name, default in defaults.items():
            if default is MISSING and name not in {"model", *objects, *self.values}:
                how = "--data STORE of agl train" if name == "data" else f"--set {name}=..."
                raise ConfigError(f"{cls.__name__} needs {name}=", hint=how)
        options: dict[str, Any] = {}
        for name, value in self.values.items():
            if name in SECTIONS["training"] and name != "algorithm":
                if name not in names:
                    origin = self.origins[name]
                    raise ConfigError(f"{origin}: {cls.__name__} has no option {name!r}", hint=nearest(name, names))
                options[name] = reward(value) if name == "by" else value
        if not {"steps", "epochs"} & set(options) and defaults["steps"] is defaults["epochs"] is None:
            options |= {"steps": steps} if steps and getattr(cls, "needs_tasks", True) else {"epochs": 1}
        for name in ("dtype", "max_context", "renderer", "threads", "engine"):
            if name in self.values:
                options[name] = self.values[name]
        rank = self.get("lora_rank")
        lora = LoraSpec(rank=rank, alpha=2.0 * rank) if rank else None
        options |= {"model": self.model(), "device": self.device, "lora": lora, **objects}
        return cls(**options)

    def check(self) -> None:
        """Check that the options fit together, before anything is started.

        Raises:
            ConfigError: they do not; names the option and its source.
        """
        if self.get("engine") is None:
            self.model()
        _ = self.device
        if self.get("algorithm") is not None:
            self.algorithm()
        if not self.get("auto_instrumentation"):
            raise ConfigError(
                f"{self.origins['auto_instrumentation']}: instrumentation cannot be switched off",
                hint="a call that is not traced cannot be trained; agents= leaves agents out of training",
            )


def algorithm_class(name: str | None, origin: str = "algorithm") -> type[LocalTraining]:
    """The algorithm of that name.

    Raises:
        ConfigError: there is no such algorithm.
    """
    word = _word(name or "").replace("++", "plusplus")
    if word not in ALGORITHMS:
        script_only = {"verl": "VERL", "gepa": "GEPA", "apo": "APO", "baseline": "Baseline"}
        hint = f"agl.{script_only[word]} is used in a script" if word in script_only else nearest(word, ALGORITHMS)
        raise ConfigError(f"{origin}: there is no algorithm {name!r}", hint=hint)
    return ALGORITHMS[word]


def _word(name: str) -> str:
    return re.sub(r"[-_ ]", "", name.lower())


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
    seen: set[tuple[str, str]] = set()
    for section, body in _pairs(root, path, "sections"):
        if isinstance(body, yaml.ScalarNode) and body.value == "":
            continue
        for key, node in _pairs(body, path, section.value):
            line = key.start_mark.line + 1
            if (section.value, key.value) in seen:
                raise ConfigError(f"{path} line {line}: {section.value}.{key.value} is given twice")
            seen.add((section.value, key.value))
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
            hint="as in\nmodel:\n  name: DIR\ntraining:\n  algorithm: grpo\nruntime:\n  nworkers: 8",
        )
    return node.value
