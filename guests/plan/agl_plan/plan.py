"""Memory, time, idle share and cost of a run in each layout: from shapes, data sheets and assumptions, or a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from agl.errors import ConfigError, nearest
from agl.options import checked_options, reject_unknown
from agl.trainer.local.config import LearnerConfig
from agl.trainer.local.memory import BFLOAT16, GIB, model_of_shapes, update_memory, with_adapters
from agl.trainer.report.progress import Progress
from agl.trainer.store.location import read_store
from agl_plan.simulate import Layout, Pace, run
from agl_plan.workload import Workload, recorded, tool_times

Row = dict[str, Any]
# What else is there of a machine and of work is more than nothing.
MAY_BE_0 = {
    "spread",
    "result",
    "price",
    "iteration",
    "switch",
    "reserved",
    "tensor_parallel",
    "lora",
    "share_prefixes",
    "seed",
}
SIMULATED = 12
"""Steps that are simulated of a run."""
SHARES = {"learn", "prefill", "decode", "gpu_memory"}
# Layout -> batches in flight beyond a step's own (`num_warmup_batches`).
VERL = {"verl sync": 0, "verl colocate_async": 1, "verl separate_async": 1}
# By their data sheets; prices are round numbers, not offers.
MACHINES: dict[str, dict[str, Any]] = {
    "a100": {"flops": 312e12, "memory": 80e9, "bandwidth": 2.04e12, "price": 1.5},
    "h100": {"flops": 989e12, "memory": 80e9, "bandwidth": 3.35e12, "price": 2.5},
    "h200": {"flops": 989e12, "memory": 141e9, "bandwidth": 4.8e12, "price": 3.5},
}


@checked_options
@dataclass(frozen=True, slots=True)
class Site:
    """Devices of one kind, how much of them is reached (assumptions, until you measure), and the run.
    `flops` (dense, bfloat16) and `bandwidth` are a second's, `memory` in bytes, `price` in US dollars an hour, each of
    one device. `learn`, `prefill`: shares of `flops` in updates and prompts, `decode`: of `bandwidth`. Seconds of an
    engine's `iteration` besides, and of a `switch` from sampling to learning and back. `transfer`: bytes a second of
    new weights. vLLM takes the share `gpu_memory`, with `reserved` bytes for neither weights nor keys and values.
    `tensor_parallel` GPUs form an engine; 0: as few as hold the weights twice. `pass_tokens`: of a forward pass of an
    update. `lora`: rank of an adapter; 0: none. `share_prefixes`: 1 as `agl.VERL(share_prefixes=True)`.
    """

    flops: float
    memory: float
    bandwidth: float
    price: float = 0.0
    gpus: int = 1
    learn: float = 0.3
    prefill: float = 0.5
    decode: float = 0.6
    iteration: float = 0.005
    switch: float = 5.0
    transfer: float = 10e9
    gpu_memory: float = 0.5
    reserved: float = 2e9
    tensor_parallel: int = 0
    pass_tokens: int = 16384
    lora: int = 0
    share_prefixes: int = 0
    steps: int = 200
    seed: int = 0


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
        text = self.config.get_text_config()
        names = ("num_local_experts", "num_experts", "n_routed_experts")
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


def model(name: str) -> Model:
    """The model of a directory or hub id, of which config.json alone is read (`ModelLoadError` if there is none); or
    "7B": a Llama of about that size."""
    from transformers import LlamaConfig

    from agl.trainer.local.prepared import model_directory, require_local_model
    from agl.trainer.local.tokenizer import load_config

    if name[-1:] in "bB" and name[:-1].replace(".", "", 1).isdigit():
        # Heads of 128 numbers, a fourth as many for keys, an MLP 3.5 times as wide, about as many layers as heads.
        size = float(name[:-1]) * 1e9 / 2**14
        if size < 2**13:
            raise ConfigError(
                f"--model {name}: its embeddings alone would be larger", hint="name a directory or hub id"
            )
        n = min(range(4, 129, 4), key=lambda n: abs(13 * n**3 + 2004 * n - size))
        shape: dict[str, Any] = {"num_attention_heads": n, "num_key_value_heads": n // 4, "vocab_size": 128256}
        shape |= {"num_hidden_layers": max(1, round((size - 2004 * n) / (13 * n * n)))}
        return Model(name, LlamaConfig(hidden_size=128 * n, intermediate_size=448 * n, **shape))
    directory = model_directory(name)
    require_local_model(directory)
    return Model(name, load_config(directory))


def parts(machine: str, tool: str, settings: Sequence[str]) -> tuple[Workload, Site]:
    """The workload and the site of a command line, whose `settings` are NAME=NUMBER; `ConfigError` if it is wrong."""
    if machine not in MACHINES:
        hint = f"{nearest(machine, MACHINES)}; others by --set flops=... --set memory=... --set bandwidth=..."
        raise ConfigError(f"--machine {machine}: no such machine", hint=hint)
    values = numbers(settings)
    known = [{*cls.__dataclass_fields__} - {"tools", "recorded"} for cls in (Workload, Site)]
    reject_unknown(values, known[0] | known[1], "--set")
    for name, value in values.items():
        if (value == 0 and name not in MAY_BE_0) or (value > 1 and name in SHARES):
            hint = "give a share, above 0 and at most 1" if name in SHARES else "give more than 0"
            raise ConfigError(f"--set {name}={value:g}", hint=hint)
    of_workload, of_site = ({name: value for name, value in values.items() if name in names} for names in known)
    if values.get("share_prefixes", 0) > 1:
        raise ConfigError(f"--set share_prefixes={values['share_prefixes']:g}", hint="give 0 or 1")
    workload = Workload(tools=tool_times(tool), **of_workload)
    if workload.prompt >= workload.max_context:
        raise ConfigError(
            f"--set prompt={workload.prompt}: no room for an answer", hint=f"max_context is {workload.max_context}"
        )
    return workload, Site(**MACHINES[machine] | of_site)


def numbers(texts: Sequence[str]) -> dict[str, Any]:
    """Name -> number of each NAME=NUMBER; `ConfigError` for any other text, and for numbers below 0."""
    try:
        values = {n.strip(): int(v) if v.isdigit() else float(v) for n, _, v in (text.partition("=") for text in texts)}
        if min(values.values(), default=0) >= 0:
            return values
    except ValueError:
        pass
    raise ConfigError(f"--set {' '.join(texts)}: no NAME=NUMBER from 0 on", hint="as in --set gpus=8")


def plan(
    model: Model, workload: Workload, site: Site, layouts: Sequence[str], staleness: Sequence[int], progress: Progress
) -> tuple[Row, list[Row]]:
    """(all that is computed from, a row for "local" and "vllm" with each `max_staleness`, for "verl" in each mode).

    Rows are JSON values: "layout", "staleness", "devices", "learning" and "sampling" (bytes of each device then),
    "note" (what to set, or why it does not fit), and if it fits, what `timed` returns. `ConfigError` if none fits.
    """
    reject_unknown(layouts, ("local", "vllm", "verl"), "--layout")
    wanted = [(name, k) for name in layouts for k in staleness if name != "verl"]
    wanted += VERL.items() if "verl" in layouts else ()
    laid_out = [lay_out(model, workload, site, name, k) for name, k in wanted]
    if all(layout is None for layout, _ in laid_out):
        hint = _fitting(model, workload, site, *wanted[0])
        raise ConfigError(f"{model.name}, {wanted[0][0]}: {laid_out[0][1]['note']}", hint=hint)
    facts = {"model": model.name, "parameters": model.parameters[0]} | asdict(workload) | asdict(site)
    del facts["recorded"]
    return facts, simulated(laid_out, workload, site.steps, site.seed, site.price, progress)


def measured(place: str, staleness: Sequence[int], progress: Progress, steps: int = 0) -> tuple[Row, list[Row]]:
    """(what was measured in a finished run, rows with each `max_staleness` in so many `steps`, 0: as it had)."""
    of, means, workload = read_store(place, recorded)
    publish = means.get("seconds/publishing", 0.0)
    # What a step takes besides: updates, rewards, rows and records.
    update = means["seconds"] - means["seconds/sampling"] - publish
    layout = Layout(0, Pace(row=means["busy"]), update=update, publish=publish, workers=of.config["n_workers"])
    facts = {"run": of.run_id, "rollouts": len(workload.recorded), "seconds": means["seconds"], "busy": means["busy"]}
    row = {"layout": "local", "devices": 1, "learning": None, "sampling": None, "note": ""}
    laid_out = [(replace(layout, staleness=k), row | {"staleness": k}) for k in staleness]
    rows = simulated(laid_out, workload, steps or of.step, 0, 0.0, progress)
    return facts | {"update": update, "publish": publish}, rows


def simulated(
    laid_out: Sequence[tuple[Layout | None, Row]],
    workload: Workload,
    steps: int,
    seed: int,
    price: float,
    progress: Progress,
) -> list[Row]:
    """The rows of layouts, with their times if they fit."""
    rows = []
    done = 0
    progress.start(min(steps, SIMULATED) * sum(layout is not None for layout, _ in laid_out), unit="simulated step")

    def stepped() -> None:
        nonlocal done
        progress.advance(done := done + 1, [rows[-1]["layout"]])

    try:
        for layout, row in laid_out:
            rows.append(row)
            if layout is not None:
                rows[-1] = row | timed(layout, workload, steps, seed, price * row["devices"], stepped)
    finally:
        progress.stop()
    return rows


def timed(
    layout: Layout,
    workload: Workload,
    steps: int,
    seed: int = 0,
    price: float = 0.0,
    stepped: Callable[[], object] = lambda: None,
) -> Row:
    """Of a row: "seconds" of a step, "idle" share of the devices' time, and "hours" and "usd" of the run."""
    came = run(layout, workload, min(steps, SIMULATED), seed, stepped)
    # Of a longer run, further steps are like those between the first and the last.
    between = came.seconds[1:-1] or came.seconds
    hours = (sum(came.seconds) + (steps - len(came.seconds)) * sum(between) / len(between)) / 3600
    return {"seconds": 3600 * hours / steps, "idle": came.idle, "hours": hours, "usd": hours * price}


def lay_out(model: Model, workload: Workload, site: Site, name: str, staleness: int) -> tuple[Layout | None, Row]:
    """A layout, None if it does not fit; and its row, without times."""
    (parameters, active), (pairs, kept) = model.parameters, model.attention
    verl = name in VERL
    separate = name == "verl separate_async"
    longest = workload.max_context
    devices = site.gpus if verl else 1
    samplers, learners = (max(1, devices // 2), max(1, devices - devices // 2)) if separate else (devices, devices)
    weights = BFLOAT16 * parameters
    passed = max(longest, site.pass_tokens)
    config = LearnerConfig(activation_checkpointing=True)
    size = {"row_tokens": longest, "trained": passed // 2}
    update = update_memory(model.shapes, config, passed, **size, autocast=True)
    update = with_adapters(model.shapes, site.lora, update) if site.lora else update
    resident = update.resident / learners + (weights if name == "local" and staleness else 0.0)
    learning = resident + update.weight_copies / learners + update.activations + update.logits
    # The local engine keeps 0.45 of what is left (docs/one-gpu.md).
    tp = 1
    share = 0.0
    sampling = resident
    room = 0.45 * (site.memory - resident)
    if name != "local":
        share = site.memory * (0.9 if separate else site.gpu_memory)
        enough = next((n for n in (1, 2, 4, 8) if weights / n <= share / 2 or 2 * n > samplers), 8)
        tp = site.tensor_parallel or enough
        room = (share - site.reserved) * tp - weights
        sampling = share + resident * (not verl)
        learning = learning + share * (name == "vllm" and staleness > 0)
    row = {"layout": name, "staleness": staleness, "devices": devices, "learning": learning, "sampling": sampling}
    if (needed := max(learning, sampling)) > site.memory:
        what = "learning" if learning == needed else "sampling"
        return None, row | {"note": f"does not fit: {what} takes {needed / GIB:.1f} of {site.memory / GIB:.1f} GiB"}
    if (fitting := max(0, int(room / (BFLOAT16 * kept)))) < longest:
        return None, row | {"note": f"does not fit: there is room for {fitting:,} tokens, max_context is {longest:,}"}
    flops = site.flops * site.prefill * tp
    bandwidth = site.bandwidth * site.decode * tp
    pace = Pace(
        site.iteration,
        weights / bandwidth,
        BFLOAT16 * active / bandwidth,
        2 * active / flops,
        BFLOAT16 * kept / bandwidth,
        2 * active / flops,
        pairs / flops,
    )
    # Forward, backward, and forward again for what is not kept; verl also computes log-probs before the update.
    passes = (5 if verl else 4) / (site.flops * site.learn * learners)
    sharing = "separate" if separate else "turns" if verl or (share and not staleness) else "shared"
    publish = (weights / site.transfer if share and not site.lora else 0.0) + site.switch * (sharing == "turns")
    layout = Layout(
        staleness,
        pace,
        max(1, samplers // tp),
        fitting,
        0.0,
        2 * active * passes,
        pairs * passes,
        publish,
        sharing,
        samplers,
        learners,
        verl,
        shares=not verl or bool(site.share_prefixes),
    )
    return layout, row | {"note": f"tensor_parallel={tp}" if verl else "activation_checkpointing=True"}


def _fitting(model: Model, workload: Workload, site: Site, name: str, staleness: int) -> str:
    """The first change, from the least on, with which a layout fits."""
    changes = {"gpu_memory": 0.7}, {"pass_tokens": workload.max_context}, {"lora": 16}
    tried = [(name, staleness, "", change) for change in changes]
    tried += [("verl sync", 0, "--layout verl ", {"gpus": 2**n}) for n in range(1, 11)]
    for layout, k, words, change in tried:
        fits, row = lay_out(model, workload, replace(site, **change), layout, k)
        if fits is not None:
            needed, [(name, value)] = max(row["learning"], row["sampling"]) / GIB, change.items()
            return f"{words}--set {name}={value} would fit: {needed:.1f} GiB of a device"
    return "shorter conversations (--set max_context=...), or a smaller model"
