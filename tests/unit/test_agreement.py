"""What is proved at loading: engine and learner compute the same, and a row the same whatever is beside it."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from architectures import make_model
from tiny_engine import CPU, tiny_tokenizer

from agl.errors import ModelLoadError
from agl.trainer.local.agreement import refusing_unknown, require_agreement
from agl.trainer.local.architecture import Window, exact_context, model_class, sliding_window
from agl.trainer.local.config import LearnerConfig
from agl.trainer.local.engine.engine import LocalEngine
from agl.trainer.local.learner.learner import Learner

torch.set_num_threads(1)


def parts(name: str) -> tuple[LocalEngine, Learner]:
    model = make_model(name)
    engine = LocalEngine(model, tiny_tokenizer(), device=CPU, max_context=1024)
    return engine, Learner(model, LearnerConfig(), CPU)


def prove(engine: LocalEngine, learner: Learner) -> None:
    require_agreement(learner._model, engine, learner, "policy", "where/it/is")


@pytest.mark.parametrize("name", ["Llama 3.1", "Phi-3, long rope", "Gemma 3"])
def test_a_model_that_is_exact_passes(name: str) -> None:
    prove(*parts(name))


def test_a_context_beyond_the_border_of_long_rope_does_not() -> None:
    engine, learner = parts("Phi-3, long rope")
    assert engine.max_context == 256
    engine.max_context = 1024
    with pytest.raises(
        ModelLoadError, match=r"Phi3ForCausalLM change by \S+ nats beside one at the context's end"
    ) as e:
        prove(engine, learner)
    assert e.value.where["path"] == "where/it/is"


def test_a_model_that_counts_columns_does_not() -> None:
    model = make_model("GPT-Neo", window_size=8)
    engine = LocalEngine(model, tiny_tokenizer(), device=CPU, max_context=1024)
    with pytest.raises(ModelLoadError, match="nats"):
        prove(engine, Learner(model, LearnerConfig(), CPU))


@pytest.mark.parametrize("shift", [1.0, float("nan")])
def test_an_engine_that_decodes_otherwise_does_not(shift: float, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, learner = parts("Llama 3")
    own = engine.logprobs
    monkeypatch.setattr(engine, "logprobs", lambda *a, **k: np.append(own(*a, **k)[:-1], shift).astype(np.float32))
    with pytest.raises(ModelLoadError, match="decoded by the engine"):
        prove(engine, learner)


def test_an_error_of_the_model_is_a_refusal_with_what_to_do() -> None:
    model = make_model("Llama 3")
    what = r"LlamaForCausalLM does not compute what .* IndexError: out"
    with pytest.raises(ModelLoadError, match=what) as caught, refusing_unknown(model, "where/it/is"):
        raise IndexError("out of range")
    assert caught.value.hint
    assert "choose" in caught.value.hint


@pytest.mark.parametrize(
    ("config", "settings", "context"),
    [
        ("LlamaConfig", {}, "131,072 tokens"),
        ("LlamaConfig", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "131,072 tokens"),
        ("Phi3Config", {"sliding_window": 2047}, "131,072 tokens"),
        (
            "Llama4TextConfig",
            {"attention_chunk_size": 8192},
            r"8,192 tokens of 131,072: its chunked attention ends there \(attention_chunk_size\)",
        ),
        (
            "Phi3Config",
            {
                "original_max_position_embeddings": 4096,
                "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
            },
            "4,096 tokens of 131,072: .*long rope",
        ),
    ],
)
def test_how_long_a_conversation_may_be(config: str, settings: dict[str, Any], context: str) -> None:
    made = getattr(transformers, config)(max_position_embeddings=131_072, **settings)
    assert re.fullmatch(context + ".*", str(exact_context(made)))


@pytest.mark.parametrize(
    ("config", "settings", "window"),
    [
        ("LlamaConfig", {}, None),
        ("Phi3Config", {"sliding_window": 2047}, Window(2047, everywhere=True)),
        ("Qwen2Config", {"sliding_window": 512, "use_sliding_window": False}, None),
        ("GptOssConfig", {}, Window(128, everywhere=False)),
        ("Gemma3Config", {"text_config": {"sliding_window": 512}}, Window(512, everywhere=False)),
        ("Qwen3Config", {"sliding_window": 512, "layer_types": ["full_attention"] * 32}, None),
    ],
)
def test_which_layers_look_back_how_far(config: str, settings: dict[str, Any], window: Window | None) -> None:
    assert sliding_window(getattr(transformers, config)(**settings)) == window


def test_a_configuration_without_positions_is_refused_with_what_to_add() -> None:
    with pytest.raises(ModelLoadError, match="max_position_embeddings"):
        exact_context(transformers.MambaConfig(), "where/it/is")


def test_a_model_that_writes_no_text_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="a t5 model is no causal language model"):
        model_class(transformers.T5Config(), "where/it/is")
