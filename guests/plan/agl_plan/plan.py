"""Memory, time, idle share and cost of a run in each layout: from shapes, data sheets and assumptions, or a run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from agl.errors import ConfigError, nearest
from agl.options import checked_options, reject_unknown
from agl.trainer.local.config import LearnerConfig
from agl.trainer.local.memory import BFLOAT16, GIB, model_of_shapes, update_memory, with_adapters
from agl.trainer.store.location import read_store
from agl_plan.simulate import Layout, Pace, run
from agl_plan.workload import Workload, recorded, tool_times

SIMULATED = 12
"""Steps of a longer run that are simulated."""
VERL = {"verl sync": 0, "verl colocate_async": 1, "verl separate_async": 1}
"""Layout -> batches in flight beyond a step's own (`num_warmup_batches`)."""


@checked_options
@dataclass(frozen=True, slots=True)
class Machine:
    """A GPU: dense bfloat16 FLOP a second, bytes, bytes a second, US dollars an hour (round numbers, not offers)."""

    flops: float = 989e12
    memory: float = 80e9
    bandwidth: float = 3.35e12
    price: float = 2.5


MACHINES = {
    "a100": Machine(312e12, 80e9, 2.04e12, 1.5),
    "h100": Machine(),
    "h200": Machine(989e12, 141e9, 4.8e12, 3.5),
    "rtx4090": Machine(165e12, 24e9, 1.01e12, 0.5),
}


@checked_options
@dataclass(frozen=True, slots=True)
class Reached:
    """Assumptions, until you measure: shares of a device's FLOP in updates (`learn`) and prompts, of its bandwidth in
    decoding; seconds of an engine's `iteration` besides; bytes a second of new weights to the engines (`transfer`);
    seconds of a `switch` between sampling and learning; share of a GPU that vLLM takes, and bytes of it for neither
    weights nor keys and values (`reserved`); tokens of a forward pass of an update."""

    learn: float = 0.3
    prefill: float = 0.5
    decode: float = 0.6
    iteration: float = 0.005
    transfer: float = 10e9
    switch: float = 5.0
    gpu_memory: float = 0.5
    reserved: float = 2e9
    pass_tokens: int = 16384


@dataclass(frozen=True)
class Model:
    """A model as it was named, and its configuration."""

    name: str
    config: Any

    @cached_property
    def shapes(self) -> Any:
        """The model on device "meta"."""
        return model_of_shapes(self.config)

    @cached_property
    def parameters(self) -> tuple[float, float]:
        """(all, those that a token goes through)."""
        text, names = self.config.get_text_config(), ("num_local_experts", "num_experts", "n_routed_experts")
        experts = sum(p.numel() for name, p in self.shapes.named_parameters() if ".experts." in name)
        every = next((n for name in names if (n := getattr(text, name, None))), 1)
        total = sum(p.numel() for p in self.shapes.parameters())
        return total, total - experts * (1 - getattr(text, "num_experts_per_tok", every) / every)

    @cached_property
    def attention(self) -> tuple[float, float]:
        """Of layers with attention to all tokens: (FLOP for each pair of tokens, numbers that are kept of each)."""
        text = self.config.get_text_config()
        kinds = getattr(text, "layer_types", None) or [""] * text.num_hidden_layers
        size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        layers = sum("linear" not in kind for kind in kinds)
        return 4.0 * layers * text.num_attention_heads * size, 2.0 * layers * text.num_key_value_heads * size


@dataclass(frozen=True, slots=True)
class Request:
    """What is planned, on `gpus` of the machine's kind, for `steps`; `lora` is the rank of an adapter, 0 for none."""

    model: Model
    machine: Machine
    workload: Workload
    reached: Reached
    gpus: int = 1
    steps: int = 200
    lora: int = 0
    seed: int = 0


def request(name: str, machine: str, tool: str, values: dict[str, float]) -> Request:
    """The request of a command line; `values` are of any of its parts.

    Raises:
        ConfigError, ModelLoadError: a part of it is none.
    """
    if "=" not in machine and machine not in MACHINES:
        hint = f"{nearest(machine, MACHINES)} or --machine flops=989e12,memory=80e9,bandwidth=3.35e12,price=2.5"
        raise ConfigError(f"--machine {machine}: no such machine", hint=hint)
    device = Machine(**numbers(machine.split(","), "--machine")) if "=" in machine else MACHINES[machine]
    parts = [{n: v for n, v in values.items() if n in of.__dataclass_fields__} for of in (Workload, Reached, Request)]
    reject_unknown(values, {n for of in (Workload, Reached) for n in of.__dataclass_fields__} | {*parts[2]}, "--set")
    workload: Any = Workload(**parts[0], tools=tool_times(tool))  # type: ignore[arg-type]
    return Request(model(name), device, workload, Reached(**parts[1]), **parts[2])  # type: ignore[arg-type]


def model(name: str) -> Model:
    """The model of a directory or hub id, of which config.json alone is read; or "7B": a Llama of about that size.

    Raises:
        ModelLoadError: there is no such directory, or the hub has no such model.
    """
    from transformers import LlamaConfig

    from agl.trainer.local.prepared import model_directory, require_local_model
    from agl.trainer.local.tokenizer import load_config

    if name[-1:] in "bB" and name[:-1].replace(".", "", 1).isdigit():
        # As many layers as heads of 128, a fourth as many for keys, an MLP 3.5 times as wide as the model.
        n = min(range(4, 129, 4), key=lambda n: abs(13 * 2**14 * n**3 + 2004 * 2**14 * n - float(name[:-1]) * 1e9))
        shape = {"num_attention_heads": n, "num_key_value_heads": n // 4, "vocab_size": 128256}
        return Model(name, LlamaConfig(hidden_size=128 * n, intermediate_size=448 * n, num_hidden_layers=n, **shape))
    directory = model_directory(os.path.expanduser(name))
    require_local_model(directory)
    return Model(name, load_config(directory))


def numbers(texts: Sequence[str], option: str) -> dict[str, Any]:
    """Name -> number of each NAME=NUMBER.

    Raises:
        ConfigError: one is not of this form, or below 0.
    """
    try:
        values = {n.strip(): int(v) if v.isdigit() else float(v) for n, _, v in (text.partition("=") for text in texts)}
        if min(values.values(), default=0) >= 0:
            return values
    except ValueError:
        pass
    raise ConfigError(f"{option} {','.join(texts)}: no NAME=NUMBER from 0 on", hint=f"as in {option} NAME=16")


def plan(of: Request, layouts: Sequence[str], staleness: Sequence[int]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(what it is computed from, the rows): "local" and "vllm" with each `max_staleness`, "verl" in each of its modes.

    Returns:
        Rows as JSON values: "layout", "staleness", "devices", "learning" and "sampling" (bytes of each device then),
        "note" (what to set, or why it does not fit), and if it fits, what `timed` adds.

    Raises:
        ConfigError: none of them fits; with what would.
    """
    reject_unknown(layouts, ("local", "vllm", "verl"), "--layout")
    wanted = [(name, k) for name in layouts for k in staleness if name != "verl"]
    wanted += VERL.items() if "verl" in layouts else ()
    laid_out = [lay_out(of, name, k) for name, k in wanted]
    if all(layout is None for layout, _ in laid_out):
        raise ConfigError(f"{of.model.name}, {wanted[0][0]}: {laid_out[0][1]['note']}", hint=_fitting(of, *wanted[0]))
    price, steps = of.machine.price, of.steps
    rows = [row | timed(layout, of.workload, steps, of.seed, price) if layout else row for layout, row in laid_out]
    own = {name: getattr(of, name) for name in ("gpus", "steps", "lora", "seed")}
    facts = own | asdict(of.workload) | asdict(of.machine) | asdict(of.reached) | {"parameters": of.model.parameters[0]}
    del facts["recorded"]
    return facts, rows


def measured(place: str, staleness: Sequence[int], steps: int = 0) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(what was measured in a finished run, its row with each `max_staleness` in as many `steps`; 0: those it had).

    Raises:
        StoreError: there is no run. ConfigError: it cannot be measured.
    """
    of, seconds, workload = read_store(place, recorded)
    publish = seconds.get("seconds/publishing", 0.0)
    # What a step takes besides: updates, rewards, rows and records.
    update = seconds["seconds"] - seconds["seconds/sampling"] - publish
    facts = {"seconds": seconds["seconds"], "token": seconds["token"], "update": update, "publish": publish}
    layout = Layout(0, Pace(row=seconds["token"]), update=update, publish=publish, workers=of.config["n_workers"])
    rows = []
    for k in staleness:
        row = {"layout": "local", "staleness": k, "devices": 1, "learning": None, "sampling": None, "note": ""}
        rows.append(row | timed(replace(layout, staleness=k), workload, steps or of.step))
    return {"run": of.run_id, "rollouts": len(workload.recorded), **facts}, rows


def timed(layout: Layout, workload: Workload, steps: int, seed: int = 0, price: float = 0.0) -> dict[str, Any]:
    """Of a row: "seconds" of a step, "idle" share of devices' time, "tokens_per_second" of answers, "hours", "usd"."""
    came = run(layout, workload, min(steps, SIMULATED), seed)
    hours = came.total(steps) / 3600
    return {
        "seconds": 3600 * hours / steps, "idle": came.idle, "tokens_per_second": came.sampled / sum(came.seconds),
        "hours": hours, "usd": hours * price * layout.devices,
    }  # fmt: skip


def lay_out(of: Request, name: str, staleness: int) -> tuple[Layout | None, dict[str, Any]]:
    """A layout, None if it does not fit; and its row, without times."""
    machine, reached, has = of.machine, of.reached, of.machine.memory
    (parameters, active), (pairs, kept) = of.model.parameters, of.model.attention
    verl, separate, longest = name in VERL, name == "verl separate_async", of.workload.max_context
    devices = of.gpus if verl else 1
    samplers, learners = (max(1, devices // 2), max(1, devices - devices // 2)) if separate else (devices, devices)
    weights, passed = BFLOAT16 * parameters, max(longest, reached.pass_tokens)
    config, size = LearnerConfig(activation_checkpointing=True), {"row_tokens": longest, "trained": passed // 2}
    update = update_memory(of.model.shapes, config, passed, **size, autocast=True)
    update = with_adapters(of.model.shapes, of.lora, update) if of.lora else update
    resident = update.resident / learners + (weights if name == "local" and staleness else 0.0)
    learning = resident + update.weight_copies / learners + update.activations + update.logits
    # The local engine keeps 0.45 of what is left (docs/one-gpu.md).
    tp, share, sampling, room = 1, 0.0, resident, 0.45 * (has - resident)
    if name != "local":
        share = has * (0.9 if separate else reached.gpu_memory)
        tp = next((n for n in (1, 2, 4, 8) if weights / n <= share / 2 or 2 * n > samplers), 8)
        room = (share - reached.reserved) * tp - weights
        sampling, learning = share + resident * (not verl), learning + share * (name == "vllm" and staleness > 0)
    row = {"layout": name, "staleness": staleness, "devices": devices, "learning": learning, "sampling": sampling}
    if (needed := max(learning, sampling)) > has:
        what = "learning" if learning == needed else "sampling"
        return None, row | {"note": f"does not fit: {what} takes {needed / GIB:.1f} of {has / GIB:.1f} GiB"}
    if (fitting := max(0, int(room / (BFLOAT16 * kept)))) < longest:
        return None, row | {"note": f"does not fit: there is room for {fitting:,} tokens, max_context is {longest:,}"}
    flops, bandwidth = machine.flops * reached.prefill * tp, machine.bandwidth * reached.decode * tp
    pace = Pace(
        reached.iteration, weights / bandwidth, BFLOAT16 * active / bandwidth, 2 * active / flops,
        BFLOAT16 * kept / bandwidth, 2 * active / flops, pairs / flops,
    )  # fmt: skip
    # Forward, backward, and forward again for what is not kept; verl also computes log-probs before the update.
    passes = (5 if verl else 4) / (machine.flops * reached.learn * learners)
    sharing = "separate" if separate else "turns" if verl or (share and not staleness) else "shared"
    publish = (weights / reached.transfer if share and not of.lora else 0.0) + reached.switch * (sharing == "turns")
    layout = Layout(
        staleness, pace, max(1, samplers // tp), fitting, 0.0, 2 * active * passes, pairs * passes, publish, sharing,
        samplers, learners, verl,
    )  # fmt: skip
    return layout, row | {"note": f"tensor_parallel={tp}" if verl else "activation_checkpointing=True"}


def _fitting(of: Request, name: str, staleness: int) -> str:
    """The first change, from the least on, with which a layout fits."""
    tried = {"--set pass_tokens=1": (name, replace(of, reached=replace(of.reached, pass_tokens=1)))}
    tried["--set lora=16"] = name, replace(of, lora=16)
    tried |= {f"--layout verl --set gpus={2**n}": ("verl sync", replace(of, gpus=2**n)) for n in range(1, 11)}
    for change, (layout, other) in tried.items():
        fits, row = lay_out(other, layout, staleness if layout == name else 0)
        if fits is not None:
            return f"{change} would fit: {max(row['learning'], row['sampling']) / GIB:.1f} GiB of a device"
    return "shorter conversations (--set max_context=...), or a smaller model"
