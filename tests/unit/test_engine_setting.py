"""`engine=` of the algorithms of one machine: what it takes, and what it says where vLLM is missing."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from running import say
from scripted import ScriptedEngine, quick_tokenizer

import agl
from agl.errors import ConfigError
from agl.trainer.engines import Completion, ServedModel
from agl.trainer.local.config import LoraSpec
from agl.trainer.local.policy import PolicySpec
from agl.trainer.policies.vllm import require_one_model


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": "vlm"}, "did you mean 'vllm'"),
        ({"engine": agl.VLLMEngine("http://gpu:8000")}, "a server elsewhere cannot be trained"),
        ({"gpu_memory": 0.5}, "with engine='torch'"),
        ({"engine": "vllm", "gpu_memory": 40}, "between 0 and 1"),
    ],
)
def test_a_wrong_engine_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        agl.GRPO(model="m", steps=1, **settings)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm_the_hint_is_how_to_install_it() -> None:
    with pytest.raises(ConfigError, match=r'pip install "\.\[vllm\]"'):
        agl.PPO(model="m", steps=1, engine="vllm")


def test_one_vllm_holds_one_model() -> None:
    adapters = [PolicySpec("m", name, lora=LoraSpec(rank=r)) for name, r in (("a", 4), ("b", 8))]
    require_one_model(adapters)
    require_one_model([PolicySpec("m", "a")])
    for specs in ([*adapters, PolicySpec("m", "c")], [*adapters, PolicySpec("n", "c", lora=LoraSpec())]):
        with pytest.raises(ConfigError, match=r"a, b, c.*\n.*LoRA on the same model"):
            require_one_model(specs)


class Held(ServedModel):
    """An engine of the user's own, which says where its tokenizer is."""

    def __init__(self, tokenizer: Path) -> None:
        self._tokenizer, self.closed = str(tokenizer), False
        self._engine = ScriptedEngine(quick_tokenizer(), lambda asked: "four")

    @property
    def tokenizer(self) -> str:
        return self._tokenizer

    @property
    def max_context(self) -> int:
        return 256

    async def generate(self, *args: Any, **options: Any) -> Completion:
        return await self._engine.generate(*args, **options)

    async def close(self) -> None:
        self.closed = True


@agl.rollout
def adds(task: str, llm: agl.LLM) -> float:
    return float(say(llm, task) == "four")


def test_any_engine_that_says_its_tokenizer_is_measured(untrained_model: Path, tmp_path: Path) -> None:
    engine = Held(untrained_model)
    trainer = agl.Trainer(agl.Baseline(engine=engine), directory=tmp_path / "run", progress=False)
    assert trainer.fit(adds, ["2+2", "1+3"]).history[0]["train/reward"] == 1.0
    assert engine.closed
    evaluation = agl.evaluate(adds, ["2+2"], {"mine": engine}, directory=tmp_path / "eval", progress=False)
    assert evaluation.policies["mine"].success.value == 1.0
    assert agl.Distill(model="m", teacher=engine, steps=1).teacher is engine
    with pytest.raises(ConfigError, match=r"engine= is 'http://gpu:8000'.*\n.*ServedModel"):
        agl.Baseline(engine="http://gpu:8000")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantize": "2bit", "lora": LoraSpec()}, "'2bit' is not known\n  -> did you mean '"),
        ({"quantize": "4bit"}, r"quantize='4bit' without lora(.|\n)*lora=agl.LoraSpec\(rank=16\)"),
        ({"quantize": "4bit", "lora": LoraSpec(), "device": "mps"}, "device='mps'\n  -> use device='cuda' or 'cpu'"),
        ({"quantize": "8bit", "lora": LoraSpec(), "engine": "vllm"}, "engine='vllm'(.|\n)*-> leave engine out"),
        ({"quantize": "8bit", "lora": LoraSpec()}, r'needs bitsandbytes(.|\n)*pip install "\.\[quantize\]"'),
    ],
)
def test_a_base_that_cannot_be_quantised_is_refused(
    settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = {"vllm": object(), "bitsandbytes": None}
    monkeypatch.setattr("agl.extras.find_spec", lambda name: installed.get(name, find_spec(name)))
    with pytest.raises(ConfigError, match=message):
        agl.GRPO(model="m", steps=1, **settings)


def test_verl_does_not_quantise() -> None:
    with pytest.raises(ConfigError, match=r"no option 'quantize'\n  -> .*agl.GRPO\(quantize=\)"):
        agl.VERL(model="m", steps=1, quantize="4bit")  # type: ignore[call-arg]
