"""`agl doctor --model`: what a model can do, before anything of it is trained."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any

from agl.errors import ConfigError
from agl.extras import TRAINING, require
from agl.trainer.local.prepared import model_directory
from agl.trainer.report import terminal

CONTINUED = {"user": ("user",), "tool": ("tool",), "two tools": ("tool", "tool"), "tool, user": ("tool", "user")}
"""Kinds of new messages, as people name them."""
LORA_RANK = 16
STEP_TOKENS = 4096
ROW_TOKENS = 1024
"""Of the forward pass whose memory is shown."""


@dataclass(frozen=True, slots=True)
class ModelReport:
    """What a model can do.

    Attributes:
        model: as it was named.
        directory: what is loaded.
        architecture: class of the model.
        parameters: how many.
        vocabulary: rows of its embedding; tied: whether the output layer is the same.
        context: longest prompt + answer,
            in tokens. shortened: how much that is of the model's positions, and why; "" if it is all of them.
        renderer: what renders its messages.
        stops: texts of the tokens that end an answer.
        tools, system: None if it takes tools, and system prompts; else why not.
        continued: new messages -> None if a conversation is continued token for token, else why it forks.
        refused: what the chat template takes in no history -> why; a fork of a conversation with it ends its rollout.
        memory: what is trained -> bytes at the peak of an update; free: bytes here, None if not known.
    """

    model: str
    directory: str
    architecture: str
    parameters: int
    vocabulary: int
    tied: bool
    context: int
    shortened: str
    renderer: str
    stops: tuple[str, ...]
    tools: str | None
    system: str | None
    continued: dict[str, str | None]
    refused: dict[str, str]
    memory: dict[str, int]
    free: int | None

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def examine_model(model: str, chat_template: str | None = None, device: str = "auto") -> ModelReport:
    """Look at a model's configuration, tokenizer and chat template; its weights are not loaded.

    Args:
        model, chat_template: as for `model_directory`.
        device: whose memory is compared.

    Raises:
        ModelLoadError, ConfigError: the model cannot be used at all, with the reason that loading it would give.
    """
    require("agl doctor --model", "local", TRAINING)
    from agl.trainer.local.architecture import backbone, default_attention, exact_context, model_class
    from agl.trainer.local.config import LearnerConfig
    from agl.trainer.local.memory import free_bytes, model_of_shapes, update_memory, with_adapters
    from agl.trainer.local.model import choose_device
    from agl.trainer.local.tokenizer import load_config, load_tokenizer
    from agl.trainer.rendering.refusals import refused_histories
    from agl.trainer.rendering.rendering import Rendering

    directory = model_directory(os.path.expanduser(model), chat_template)
    config = load_config(directory)
    found = model_class(config, directory)
    context = exact_context(config, directory)
    tokenizer = load_tokenizer(directory)
    rendering = Rendering(tokenizer)
    where = choose_device(device)
    shapes = model_of_shapes(config, default_attention(found, where.type))
    backbone(shapes)
    refusal = rendering.tools_refusal

    def fork(roles: tuple[str, ...]) -> str | None:
        return rendering.fork_after(roles, tools="tool" in roles and refusal is None, system=True)

    whole = update_memory(
        shapes,
        LearnerConfig(),
        STEP_TOKENS,
        row_tokens=ROW_TOKENS,
        trained=STEP_TOKENS // 4,
        autocast=where.type == "cuda",
    )
    memory = {
        "all weights": whole.total,
        f"LoRA, rank {LORA_RANK}": with_adapters(shapes, LORA_RANK, whole).total,
        "LoRA, 8-bit": with_adapters(shapes, LORA_RANK, whole, "8bit").total,
        "LoRA, 4-bit": with_adapters(shapes, LORA_RANK, whole, "4bit").total,
    }
    return ModelReport(
        model=model,
        directory=directory,
        architecture=type(shapes).__name__,
        parameters=sum(p.numel() for p in shapes.parameters()),
        vocabulary=shapes.get_input_embeddings().weight.shape[0],
        tied=shapes.get_output_embeddings().weight is shapes.get_input_embeddings().weight,
        context=context.tokens,
        shortened=str(context) if context.why else "",
        renderer="its chat template" if rendering.renderer == "default" else f"the renderer {rendering.renderer}",
        stops=tuple(rendering.decode([token]) for token in rendering.stop_token_ids),
        tools=None if refusal is None else f"{refusal.message} ({refusal.hint})",
        system=_system(rendering),
        continued={name: fork(roles) for name, roles in CONTINUED.items() if "tool" not in roles or refusal is None},
        refused=refused_histories(rendering),
        memory=memory,
        free=free_bytes(where),
    )


def _system(rendering: Any) -> str | None:
    """Why the model takes no system prompt."""
    text = "placeholder of a system prompt"
    try:
        prompt = rendering.prompt([{"role": "system", "content": text}, {"role": "user", "content": "hello"}])
    except ConfigError as error:
        return error.message
    return None if text in rendering.decode(prompt.ids) else "the chat template drops it"


def show(report: ModelReport) -> None:
    """Print a report, a line for each thing."""
    console = terminal.console(soft_wrap=True)

    def line(name: str, value: str, fine: bool = True) -> None:
        console.print(f"{name:<20}{value}", style="" if fine else "yellow", markup=False)

    line("model", report.directory)
    tied = ", output layer tied to it" if report.tied else ""
    line("", f"{report.architecture}, {report.parameters:,} parameters, vocabulary of {report.vocabulary:,}{tied}")
    line("context", report.shortened or f"{report.context:,} tokens", not report.shortened)
    line("messages", f"by {report.renderer}; an answer ends with {' or '.join(report.stops)}")
    for name, refusal in (("system prompts", report.system), ("tools", report.tools)):
        line(name, "yes" if refusal is None else f"no: {refusal}", refusal is None)
    for name, reason in report.continued.items():
        what = "continued token for token" if reason is None else f"the conversation forks: {reason}"
        line(f"after {name}", what, reason is None)
    for name, reason in report.refused.items():
        line("where it forks", f"no {name.removeprefix('a ').removeprefix('an ')}: {reason}", False)
    free = "" if report.free is None else f"; {report.free / 2**30:.1f} GiB are free here"
    for name, needed in report.memory.items():
        fits = report.free is None or needed < report.free
        line(f"train {name}", f"{needed / 2**30:.1f} GiB{free}{'' if fits else ': too little'}", fits)
