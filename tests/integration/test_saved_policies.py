"""Whatever was trained, plain transformers computes it from what was saved: every target of LoRA, embeddings that are
tied and that are not, rows of tokens that a chat template added, all weights."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from sampled_rows import sampled_rows
from tiny_tokenizers import tiny_tokenizer
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.pytorch_utils import Conv1D

from agl.errors import ConfigError
from agl.mdp.sequence import merge
from agl.mdp.types import Call, FloatArray, IntArray, Trajectory, Transition, int_array
from agl.trainer.engines.base import Request, Sampling
from agl.trainer.local.config import LearnerConfig, LoraSpec
from agl.trainer.local.conversion import prepare
from agl.trainer.local.embeddings import ADDED_TOKENS, prepare_rows, require_adapters, untie
from agl.trainer.local.learner.learner import Learner
from agl.trainer.local.memory import model_of_shapes
from agl.trainer.local.model import LoadedPolicy, add_adapter, export_weights, load_policy, save_model
from agl.trainer.local.policy import LocalPolicy, PolicySpec, start_policies
from agl.trainer.local.prepared import TEMPLATES, template_text
from agl.trainer.local.tokenizer import load_config
from agl.trainer.rendering.rendering import Rendering
from agl_verl.adapters import merged

torch.set_num_threads(1)

CPU = torch.device("cpu")
EXACT = 1e-4
SHAPE: dict[str, Any] = dict(
    hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    max_position_embeddings=128, initializer_range=0.2, bos_token_id=None, pad_token_id=None,
)  # fmt: skip
GPT2: dict[str, Any] = dict(n_embd=16, n_layer=2, n_head=2, n_positions=128, initializer_range=0.2, bos_token_id=None)
FULL = ["full_attention"] * 2
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SHAPE,
    "gemma3_text": {**SHAPE, "head_dim": 8, "layer_types": FULL},
    "gpt_neox": SHAPE,
    "qwen2": SHAPE,
    "qwen3": {**SHAPE, "head_dim": 8},
    "mistral": {**SHAPE, "sliding_window": None},
    "gemma2": {**SHAPE, "head_dim": 8, "layer_types": FULL},
    "phi3": SHAPE,
    "phi": SHAPE,
    "cohere": SHAPE,
    "olmo2": SHAPE,
    "granite": {**SHAPE, "embedding_multiplier": 3.0, "logits_scaling": 2.0},
    "gpt2": GPT2,
    "gptj": {**GPT2, "rotary_dim": 8},
}
"""model_type -> a small random configuration. Scaled embeddings, scaled logits, biases and soft caps are among them."""
NAMES = {"gpt_neox": ("embed_in", "embed_out"), "gpt2": ("wte", "lm_head"), "gptj": ("wte", "lm_head")}
"""The embeddings that are not called `embed_tokens` and `lm_head`."""
TIED = pytest.mark.parametrize(
    "tied", [pytest.param(True, id="tied"), pytest.param(False, id="untied", marks=pytest.mark.full)]
)
FAST = ("llama",)
EVERY = [pytest.param(name, marks=() if name in FAST else pytest.mark.full) for name in FAMILIES]


def make(directory: Path, family: str, tied: bool, *, spare_rows: int = 0) -> Path:
    """Write a base model with random weights whose tokenizer knows no chat template's tokens."""
    tokenizer = tiny_tokenizer(("<s>", "</s>"), "</s>", (TEMPLATES / "mistral.jinja").read_text())
    settings: dict[str, Any] = {
        **FAMILIES[family],
        "vocab_size": len(tokenizer) + 1 + spare_rows,  # Qwen's tokenizer adds a token by itself
        "eos_token_id": tokenizer.eos_token_id,
        "tie_word_embeddings": tied,
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**settings))
    if (bias := model.get_output_embeddings().bias) is not None:
        torch.nn.init.normal_(bias)  # it begins at 0
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def with_template(base: Path) -> Path:
    """The model as `chat_template="hermes"` has it; what `model_directory` does in a process."""
    target = base.with_name(f"{base.name}-hermes")
    target.mkdir()
    prepare(str(base), template_text("hermes"), target)
    return target


def change(model: Any, seed: int = 1) -> None:
    """Move whatever is trained, as training does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def trained(policy: LoadedPolicy, ids: IntArray) -> FloatArray:
    return Learner(policy.model, LearnerConfig(), CPU).logprobs(ids)


def plain(model: Any, ids: IntArray) -> FloatArray:
    """What transformers alone computes."""
    with torch.no_grad():
        distribution = torch.log_softmax(model(torch.from_numpy(ids).long()[None]).logits[0, :-1].float(), -1)
    return distribution.gather(1, torch.from_numpy(ids[1:]).long()[:, None])[:, 0].numpy()


def loaded(directory: Path | str) -> Any:
    # Eager: other attention leaves soft caps out.
    return AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")


def assert_saved(
    policy: LoadedPolicy, base: Path | str, target: Path, ids: IntArray, adapter: str | None = None
) -> None:
    """The merged model, and the adapter on its base, give what is trained now; saving changes nothing."""
    before = trained(policy, ids)
    save_model(policy, target, adapter)
    np.testing.assert_allclose(plain(loaded(target), ids), before, atol=EXACT)
    np.testing.assert_array_equal(trained(policy, ids), before)
    if policy.adapters:
        alone = PeftModel.from_pretrained(loaded(base), str(target / "adapter"))
        prepare_rows(alone)  # peft itself drops the bias of an output layer whose rows are trained
        np.testing.assert_allclose(plain(alone, ids), before, atol=EXACT)


def targets(model: Any) -> list[str]:
    kinds = (torch.nn.Linear, torch.nn.Embedding, Conv1D)
    return sorted({name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, kinds)})


@TIED
@pytest.mark.parametrize("family", EVERY)
def test_an_adapter_on_any_layer_is_saved_as_it_was_trained(family: str, tied: bool, tmp_path: Path) -> None:
    base = make(tmp_path / "base", family, tied)
    every = targets(loaded(base))
    embeddings = set(NAMES.get(family, ("embed_tokens", "lm_head")))
    assert embeddings <= set(every)
    ids = np.arange(3, 60, dtype=np.int32)
    for number, names in enumerate(["all-linear", *([name] for name in every), every]):
        spec = LoraSpec(rank=2, alpha=4, target_modules=names if isinstance(names, str) else tuple(names))
        policy = load_policy(base, device="cpu", lora=spec)
        change(policy.model)
        assert_saved(policy, base, tmp_path / str(number), ids)
        apart = names != "all-linear" and embeddings & set(names)
        assert load_config(str(tmp_path / str(number))).tie_word_embeddings == (tied and not apart), names
        assert not np.allclose(trained(policy, ids), plain(loaded(base), ids), rtol=0, atol=1e-3), names


def test_embeddings_that_an_adapter_has_parted_are_declared_so(tmp_path: Path) -> None:
    """By us: peft's merging declares it in the outer configuration alone, and not in each version."""
    lora = LoraSpec(rank=2, target_modules=("lm_head",))
    model = load_policy(make(tmp_path / "base", "llama", True), device="cpu", lora=lora).model
    untie(model)
    assert model.get_base_model().config.tie_word_embeddings is False


@TIED
@pytest.mark.parametrize("family", EVERY)
def test_all_weights_are_saved_as_they_were_trained(family: str, tied: bool, tmp_path: Path) -> None:
    """Also with tokens that a template added, and trained further from there."""
    base = with_template(make(tmp_path / "base", family, tied))
    policy = load_policy(base, device="cpu")
    ids = int_array([*range(3, 40), *added(policy), 5])
    change(policy.model)
    assert_saved(policy, base, tmp_path / "saved", ids)
    further = load_policy(tmp_path / "saved", device="cpu", lora=LoraSpec(rank=2))
    change(further.model)
    assert_saved(further, tmp_path / "saved", tmp_path / "further", ids)


def added(policy: LoadedPolicy) -> list[int]:
    """Ids of the tokens that the template brought."""
    return policy.tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|im_start|>"])


@TIED
@pytest.mark.parametrize("family", EVERY)
def test_rows_of_added_tokens_are_trained_next_to_any_adapter(family: str, tied: bool, tmp_path: Path) -> None:
    """Of two policies on one base, each its own; on spare rows of the model as on new ones."""
    embedding, head = NAMES.get(family, ("embed_tokens", "lm_head"))
    for spare_rows in (0, 20):
        base = with_template(make(tmp_path / f"base{spare_rows}", family, tied, spare_rows=spare_rows))
        for names in ("all-linear", (embedding,), (head,)):
            spec = LoraSpec(rank=2, alpha=4, target_modules=names)
            policy = add_adapter(load_policy(base, device="cpu", lora=spec), spec, seed=1)
            ids = int_array([*range(3, 30), *added(policy), 5, *added(policy)])
            for seed, adapter in enumerate(policy.adapters):
                policy.model.set_adapter(adapter)
                change(policy.model, seed)
            untrained = plain(loaded(base), ids)
            for adapter in policy.adapters:
                policy.model.set_adapter(adapter)
                weights = {n for n, p in policy.model.named_parameters() if p.requires_grad}
                assert all(f".{adapter}" in name for name in weights)
                assert names != "all-linear" or not any(head in name and "lora" in name for name in weights)
                rows = sum("trainable_tokens" in name for name in weights)
                # LoRA trains the other rows; peft can train those of a tied embedding with those of its output alone.
                assert rows == {"all-linear": 2 - tied, (embedding,): 1, (head,): 1 - tied}[names]
                assert_saved(policy, base, tmp_path / "-".join([str(spare_rows), *names, adapter]), ids, adapter)
                assert not np.allclose(trained(policy, ids), untrained, atol=0.01)


def test_added_tokens_begin_as_tokens_of_like_use(tmp_path: Path) -> None:
    base = make(tmp_path / "base", "llama", False, spare_rows=20)
    policy = load_policy(with_template(base), device="cpu")
    end, start = added(policy)
    pieces = load_policy(base, device="cpu").tokenizer.encode("<|im_start|>", add_special_tokens=False)
    assert len(pieces) > 1
    assert end in Rendering(policy.tokenizer).stop_token_ids
    for weight in (policy.model.get_input_embeddings().weight, policy.model.get_output_embeddings().weight):
        torch.testing.assert_close(weight[end], weight[policy.tokenizer.eos_token_id])
        torch.testing.assert_close(weight[start], weight[pieces].mean(0))
    assert sorted(getattr(policy.model.config, ADDED_TOKENS)) == sorted([end, start])


# -- in the policy process ---------------------------------------------------------------------------------------------

PROMPT = int_array([5, 60, 61, 62, 63])


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


def spec(base: str | Path, name: str = "policy", **changes: Any) -> PolicySpec:
    options: dict[str, Any] = {"lora": LoraSpec(rank=4), "learner": LearnerConfig(learning_rate=0.05)}
    return PolicySpec(str(base), name, device="cpu", threads=1, **options | changes)


async def learn(policy: LocalPolicy, seed: int) -> dict[str, float]:
    rows = await sampled_rows(policy, PROMPT, (-1.0, 1.0, -1.0, 1.0), seed)
    before = await policy.engine_logprobs(PROMPT)
    metrics = await policy.train(rows)
    unpublished = np.array_equal(await policy.engine_logprobs(PROMPT), before)
    assert unpublished == (policy.spec.max_staleness > 0)
    await policy.publish()
    return metrics


async def assert_engine_agrees(policy: LocalPolicy, saved: Path, end: int) -> None:
    """What samples, what learns and what was saved agree, also on the tokens that were added."""
    answer = await policy.generate(Request(PROMPT, Sampling(max_tokens=12, seed=5)))
    ids = np.concatenate([PROMPT, answer.token_ids, int_array([end, 7, end - 1, 8])])
    learner = await policy.logprobs(ids)
    np.testing.assert_allclose(answer.logprobs, learner[PROMPT.size - 1 :][: answer.token_ids.size], atol=EXACT)
    np.testing.assert_allclose(await policy.engine_logprobs(ids), learner, atol=EXACT)
    await policy.save_model(saved)
    np.testing.assert_allclose(plain(loaded(saved), ids), learner, atol=EXACT)


@TIED
def test_a_policy_learns_to_end_its_answers_with_a_token_that_was_added(
    tied: bool, runner: asyncio.Runner, tmp_path: Path
) -> None:
    base = with_template(make(tmp_path / "base", "llama", tied))
    end = load_policy(base, device="cpu").tokenizer.convert_tokens_to_ids("<|im_end|>")

    async def probability(policy: LocalPolicy) -> float:
        return float(np.exp((await policy.logprobs(np.append(PROMPT, int_array([end]))))[-1]))

    async def main() -> None:
        policy = await LocalPolicy.start(spec(base, learner=LearnerConfig(learning_rate=0.02, policy_loss="nll")))
        try:
            answer = int_array([70, end])
            call = Call("c", "r", 1, 0, "agent", "policy", 0, PROMPT, answer, np.zeros(2, np.float32))
            rows = merge(Trajectory("r", 1, "policy", "g", (Transition(call),)), {"c": 1.0})
            for _ in range(30):
                await policy.train(rows)
            assert (await policy.logprobs(np.concatenate([PROMPT, answer])))[-1] > np.log(0.9)
            sampled = [
                await policy.generate(Request(np.append(PROMPT, int_array([70])), Sampling(1, seed=seed)))
                for seed in range(10)
            ]
            assert sum(answer.token_ids.tolist() == [end] for answer in sampled) >= 6
            await assert_engine_agrees(policy, tmp_path / "saved", end)
        finally:
            await policy.close()

    runner.run(main())


@pytest.mark.parametrize(
    ("names", "max_staleness"),
    [
        pytest.param("all-linear", 0),
        pytest.param("all-linear", 1, marks=pytest.mark.full),
        pytest.param(("lm_head",), 1, marks=pytest.mark.full),
        pytest.param(("q_proj", "embed_tokens"), 0, marks=pytest.mark.full),
    ],
)
def test_two_policies_resume_to_the_bit_and_are_saved_each(
    names: str | tuple[str, ...], max_staleness: int, runner: asyncio.Runner, tmp_path: Path
) -> None:
    """With added tokens and with adapters on tied embeddings; in one batch, and with a copy that samples."""
    base = with_template(make(tmp_path / "base", "llama", True))
    end = load_policy(base, device="cpu").tokenizer.convert_tokens_to_ids("<|im_end|>")
    lora = LoraSpec(rank=4, target_modules=names)
    specs = [spec(base, name, lora=lora, seed=seed, max_staleness=max_staleness) for seed, name in enumerate("ab")]

    async def main() -> None:
        policies = await start_policies(specs)
        try:
            for seed, policy in enumerate(policies.values()):
                await learn(policy, 10 * seed)
                await policy.save_state(tmp_path / f"{policy.spec.name}.pt")
            resumed = await start_policies(specs)
            try:
                for policy in resumed.values():
                    await policy.load_state(tmp_path / f"{policy.spec.name}.pt")
                for name, policy in policies.items():
                    assert await learn(policy, 50) == await learn(resumed[name], 50)
                ids = np.concatenate([PROMPT, int_array([end, 7, end])])
                for name, policy in policies.items():
                    expected = await policy.logprobs(ids)
                    np.testing.assert_array_equal(await resumed[name].logprobs(ids), expected)
                    np.testing.assert_array_equal(
                        await resumed[name].engine_logprobs(ids), await policy.engine_logprobs(ids)
                    )
            finally:
                await resumed["a"].close()
            a, b = policies.values()
            alone = [await p.generate(Request(PROMPT, Sampling(max_tokens=12, seed=3))) for p in (a, b)]
            together = await asyncio.gather(
                *(p.generate(Request(PROMPT, Sampling(max_tokens=12, seed=3))) for p in (a, b))
            )
            for one, mixed in zip(alone, together, strict=True):
                assert one.token_ids.tolist() == mixed.token_ids.tolist()
                np.testing.assert_allclose(mixed.logprobs, one.logprobs, atol=EXACT)
            for policy in (a, b):
                await assert_engine_agrees(policy, tmp_path / policy.spec.name, end)
            assert np.abs(await a.logprobs(ids) - await b.logprobs(ids)).max() > 0.01
        finally:
            await policies["a"].close()

    runner.run(main())


# -- for vLLM ----------------------------------------------------------------------------------------------------------


@TIED
def test_vllm_gets_all_weights_of_an_adapter_that_changes_embeddings(tied: bool, tmp_path: Path) -> None:
    base = with_template(make(tmp_path / "base", "llama", tied))
    policy = load_policy(base, device="cpu", lora=LoraSpec(rank=2))
    change(policy.model)
    ids = int_array([*range(3, 30), *added(policy), 5])
    export_weights(policy, tmp_path / "weights", policy.adapters[0], torch.float32)
    assert not (tmp_path / "weights" / "adapter_config.json").exists()
    np.testing.assert_allclose(plain(loaded(tmp_path / "weights"), ids), trained(policy, ids), atol=EXACT)
    # The form of the weights that it began with, which a server can only fill with others.
    assert load_config(str(tmp_path / "weights")).tie_word_embeddings == tied

    policy = load_policy(tmp_path / "base", device="cpu", lora=LoraSpec(rank=2))
    export_weights(policy, tmp_path / "adapter", policy.adapters[0], torch.float32)
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["trainable_token_indices"] is None


def test_what_vllm_cannot_serve_is_refused_before_any_weight_is_loaded(runner: asyncio.Runner, tmp_path: Path) -> None:
    tied, untied = (make(tmp_path / str(t), "llama", t) for t in (True, False))
    with_tokens = with_template(untied)
    inner, head = LoraSpec(rank=2), LoraSpec(rank=2, target_modules=("q_proj", "lm_head"))
    for base, loras, refused in [
        (tied, [inner], None),
        (tied, [inner, inner], None),
        (tied, [head], r"LoRA on lm_head: the model's input and output embedding share their weights"),
        (untied, [head], None),
        (untied, [inner, head], r"adapters that change lm_head: vLLM takes all weights.*here 2 share a model"),
        (with_tokens, [inner], None),
        (with_tokens, [inner, inner], r"model.embed_tokens and lm_head, where rows of the tokens that chat_template="),
    ]:
        shapes = model_of_shapes(load_config(str(base)))
        require_adapters(shapes, loras, vllm=False)
        if refused is None:
            require_adapters(shapes, loras, vllm=True)
            continue
        with pytest.raises(ConfigError, match=refused):
            require_adapters(shapes, loras, vllm=True)
    differing = model_of_shapes(load_config(str(with_tokens)))
    with pytest.raises(
        ConfigError, match=r"different ones of model.embed_tokens and lm_head, where each trains the rows"
    ):
        require_adapters(differing, [inner, head], vllm=False)
    (tied / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ConfigError, match="engine='vllm' cannot serve LoRA on lm_head"):
        runner.run(LocalPolicy.start(spec(tied, lora=head, engine="vllm")))


# -- by verl -----------------------------------------------------------------------------------------------------------


@TIED
@pytest.mark.parametrize("family", EVERY)
def test_an_adapter_that_verl_trained_is_merged(family: str, tied: bool, tmp_path: Path) -> None:
    """verl saves the state of peft's model as that of a plain one."""
    base = make(tmp_path / "base", family, tied)
    policy = load_policy(base, device="cpu")
    policy = replace(
        policy, model=get_peft_model(policy.model, LoraConfig(r=2, lora_alpha=6, target_modules="all-linear"))
    )
    change(policy.model)
    ids = np.arange(3, 60, dtype=np.int32)
    actor = tmp_path / "actor"
    empty = AutoModelForCausalLM.from_config(load_config(str(base)), dtype=torch.float32)
    empty.save_pretrained(actor / "huggingface", state_dict=policy.model.state_dict())
    policy.tokenizer.save_pretrained(actor / "huggingface")
    assert merged(actor) == actor / "huggingface", "all weights were trained"
    (actor / "lora_train_meta.json").write_text(json.dumps({"r": 2, "lora_alpha": 6, "task_type": "CAUSAL_LM"}))
    before = trained(policy, ids)
    assert not np.allclose(plain(loaded(base), ids), before, atol=0.01)
    np.testing.assert_allclose(plain(loaded(merged(actor)), ids), before, atol=EXACT)
    assert load_policy(merged(actor), device="cpu").tokenizer.chat_template
