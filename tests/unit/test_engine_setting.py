"""`engine=` of the algorithms of one machine: what it takes, and what it says where vLLM is missing."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

import agl
from agl.errors import ConfigError
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
    with pytest.raises(ConfigError, match=r'pip install "agl\[vllm\]"'):
        agl.PPO(model="m", steps=1, engine="vllm")


def test_one_vllm_holds_one_model() -> None:
    adapters = [PolicySpec("m", name, lora=LoraSpec(rank=r)) for name, r in (("a", 4), ("b", 8))]
    require_one_model(adapters)
    require_one_model([PolicySpec("m", "a")])
    for specs in ([*adapters, PolicySpec("m", "c")], [*adapters, PolicySpec("n", "c", lora=LoraSpec())]):
        with pytest.raises(ConfigError, match=r"a, b, c.*\n.*LoRA on the same model"):
            require_one_model(specs)
