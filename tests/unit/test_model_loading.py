"""Loading a policy: what loads can be sampled and trained, what cannot says why."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from agl.errors import ConfigError, ModelLoadError
from agl.trainer.local.config import LearnerConfig, LoraSpec
from agl.trainer.local.learner.learner import Learner
from agl.trainer.local.model import load_policy, save_model

torch.set_num_threads(1)

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer in which each digit is a token, as a user may train one."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [
            pre_tokenizers.Split(Regex(r"\d| "), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    backend.train_from_iterator(["what is 12 + 34? the answer's 46, isn't it?"] * 3, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|im_end|>")
    fast.chat_template = TEMPLATE
    return fast


SHAPE: dict[str, Any] = dict(
    vocab_size=304,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=128,
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_id=1,
    pad_token_id=1,
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory that is as it should be."""
    directory = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture
def directory(whole: Path, tmp_path: Path) -> Path:
    """A copy of it to break."""
    return Path(shutil.copytree(whole, tmp_path / "model"))


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


class TestGood:
    def test_a_directory_loads_as_it_was_saved(self, whole: Path):
        policy = load_policy(whole, device="cpu")
        assert policy.device == torch.device("cpu")
        assert policy.dtype == policy.model.dtype == torch.float32
        assert policy.max_context == 128
        assert policy.model.config._attn_implementation == "eager"
        assert not policy.model.training
        assert all(p.requires_grad for p in policy.model.parameters())
        assert policy.tokenizer.decode(policy.tokenizer.encode("12 + 34")) == "12 + 34"

    def test_the_attention_kernel_can_be_chosen(self, whole: Path):
        assert load_policy(whole, device="cpu", attention="sdpa").model.config._attn_implementation == "sdpa"

    def test_a_saved_policy_loads_again_and_scores_the_same(self, whole: Path, tmp_path: Path):
        policy = load_policy(whole, device="cpu")
        save_model(policy, tmp_path / "saved")
        again = load_policy(tmp_path / "saved", device="cpu")
        ids = torch.arange(20)[None]
        assert torch.equal(policy.model(ids).logits, again.model(ids).logits)
        assert again.tokenizer.chat_template == TEMPLATE

    def test_lora_trains_the_adapter_alone_and_starts_as_the_model_itself(self, whole: Path):
        ids = torch.arange(20)[None]
        policies = [load_policy(whole, device="cpu", lora=LoraSpec(rank=2), seed=k) for k in (1, 1, 2)]
        assert torch.equal(load_policy(whole, device="cpu").model(ids).logits, policies[0].model(ids).logits)
        starts = [{n: p for n, p in x.model.named_parameters() if p.requires_grad} for x in policies]
        assert all("lora_" in n for n in starts[0])
        assert all(torch.equal(p, starts[1][n]) for n, p in starts[0].items())
        assert not all(torch.equal(p, starts[2][n]) for n, p in starts[0].items())

    def test_a_frozen_base_may_be_bfloat16_while_the_adapter_is_float32(self, whole: Path):
        model = load_policy(whole, device="cpu", dtype="bfloat16", lora=LoraSpec(rank=2)).model
        kinds = {p.requires_grad: p.dtype for p in model.parameters()}
        assert kinds == {True: torch.float32, False: torch.bfloat16}
        assert Learner(model, LearnerConfig(), torch.device("cpu")).logprobs(torch.arange(5).numpy()).shape == (4,)

    def test_a_saved_adapter_lies_merged_with_the_adapter_beside_it(self, whole: Path, tmp_path: Path):
        policy = load_policy(whole, device="cpu", lora=LoraSpec(rank=2))
        with torch.no_grad():
            for name, parameter in policy.model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_()
        ids = torch.arange(20)[None]
        before = policy.model(ids).logits
        save_model(policy, tmp_path)
        assert torch.equal(policy.model(ids).logits, before)
        merged = AutoModelForCausalLM.from_pretrained(tmp_path)
        torch.testing.assert_close(merged(ids).logits, before, atol=1e-4, rtol=1e-4)
        assert (tmp_path / "adapter" / "adapter_config.json").is_file()
        assert load_policy(tmp_path, device="cpu").tokenizer.chat_template == TEMPLATE

    def test_settings_load_no_torch(self):
        import subprocess
        import sys

        code = (
            "import sys, agl.trainer.local.config, agl.trainer.objectives.advantages;"
            "print(sorted({'torch', 'transformers', 'peft'} & set(sys.modules)))"
        )
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert out.stdout.strip() == "[]"


class TestBroken:
    def refused(self, path: Path | str, message: str) -> ModelLoadError:
        with pytest.raises(ModelLoadError, match=message) as caught:
            load_policy(path, device="cpu")
        assert caught.value.hint
        assert caught.value.where["path"] == str(path)
        return caught.value

    def test_no_such_directory(self, tmp_path: Path):
        self.refused(tmp_path / "nowhere", "no such directory")

    def test_a_hub_id_that_does_not_exist(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        assert "hub" in str(self.refused("nobody/nothing", "configuration does not load").hint)

    def test_a_file(self, directory: Path):
        self.refused(directory / "config.json", "not a directory")

    def test_no_config(self, directory: Path):
        (directory / "config.json").unlink()
        self.refused(directory, r"no config\.json")

    def test_an_adapter_alone(self, tmp_path: Path):
        (tmp_path / "adapter_config.json").write_text("{}")
        self.refused(tmp_path, "only an adapter")

    def test_no_weights(self, directory: Path):
        (directory / "model.safetensors").unlink()
        self.refused(directory, "no weights")

    def test_no_tokenizer(self, directory: Path):
        (directory / "tokenizer.json").unlink()
        self.refused(directory, "no tokenizer")

    def test_no_chat_template(self, directory: Path):
        (directory / "chat_template.jinja").unlink()
        self.refused(directory, "no chat template")

    def test_an_unknown_architecture(self, directory: Path):
        edit_json(directory / "config.json", model_type="hal9000")
        self.refused(directory, "hal9000")

    def test_a_config_that_is_no_json(self, directory: Path):
        (directory / "config.json").write_text("{")
        self.refused(directory, "configuration does not load")

    def test_corrupt_weights(self, directory: Path):
        file = directory / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
        self.refused(directory, "model does not load")

    def test_weights_of_another_shape(self, directory: Path):
        edit_json(directory / "config.json", intermediate_size=48)
        self.refused(directory, r"3 of the model's tensors.*mlp\.down_proj")

    def test_weights_that_lack_a_tensor(self, directory: Path):
        file = directory / "model.safetensors"
        tensors = load_file(file)
        del tensors["model.layers.0.mlp.up_proj.weight"]
        save_file(tensors, file, metadata={"format": "pt"})
        self.refused(directory, r"1 of .*start at random.*up_proj")

    def test_a_corrupt_tokenizer(self, directory: Path):
        (directory / "tokenizer.json").write_text("{}")
        self.refused(directory, "tokenizer")

    def test_a_tokenizer_with_more_ids_than_the_model(self, directory: Path):
        bigger = AutoTokenizer.from_pretrained(directory)
        bigger.add_tokens([f"<extra{i}>" for i in range(100)])
        bigger.save_pretrained(directory)
        self.refused(directory, "304 rows")

    def test_a_recurrent_model(self, tmp_path: Path):
        config = MambaConfig(vocab_size=304, hidden_size=16, num_hidden_layers=1, state_size=4)
        MambaForCausalLM(config).save_pretrained(tmp_path)
        tokenizer().save_pretrained(tmp_path)
        self.refused(tmp_path, "recurrent state")

    def test_a_tokenizer_that_the_model_type_overrides(self, tmp_path: Path):
        Qwen2ForCausalLM(Qwen2Config(**SHAPE)).save_pretrained(tmp_path)
        tokenizer().save_pretrained(tmp_path)
        error = self.refused(tmp_path, r"Qwen2Tokenizer does not tokenise as .*tokenizer\.json")
        assert "llama" in str(error.hint)


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"device": "tpu9"}, "device"),
            ({"device": "meta"}, "device"),
            ({"dtype": "int8"}, "dtype"),
            ({"attention": "flash"}, "attention"),
            ({"dtype": "bfloat16"}, "rounded away"),
            ({"lora": LoraSpec(target_modules=("no_such_layer",))}, "no_such_layer"),
        ],
    )
    def test_options_that_cannot_be_had(self, whole: Path, options: dict[str, Any], message: str):
        with pytest.raises(ConfigError, match=message):
            load_policy(whole, **{"device": "cpu", **options})

    @pytest.mark.skipif(torch.backends.mps.is_available(), reason="needs a machine without an Apple GPU")
    def test_an_apple_gpu_where_there_is_none(self, whole: Path):
        with pytest.raises(ConfigError, match="finds no Apple GPU here"):
            load_policy(whole, device="mps")

    @pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without cuda")
    def test_cuda_where_there_is_none(self, whole: Path):
        with pytest.raises(ConfigError, match="torch sees 0 cuda devices"):
            load_policy(whole, device="cuda")
        assert load_policy(whole).device.type == "cpu"

    @pytest.mark.parametrize("options", [{"rank": 0}, {"alpha": 0}, {"dropout": 1.0}])
    def test_adapters_that_cannot_be(self, options: dict[str, Any]):
        with pytest.raises(ConfigError, match=next(iter(options))):
            LoraSpec(**options)
