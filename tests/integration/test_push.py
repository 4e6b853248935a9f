"""Trained policies on the hub: a stand-in of its endpoint that takes them as `huggingface_hub` sends them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import hub as hubs
import pytest
import tiny_run
import yaml

import agl


@pytest.fixture
def hub() -> Iterator[hubs.Hub]:
    with hubs.serving() as hub:
        yield hub


@pytest.fixture(scope="module")
def run(untrained_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has trained an adapter."""
    directory = tmp_path_factory.mktemp("run")
    algorithm = agl.GRPO(
        model=str(untrained_model), group_size=2, batch_size=2, steps=2, learning_rate=1e-3, max_response_tokens=6,
        max_context=128, threads=1, lora=agl.LoraSpec(rank=2),
    )  # fmt: skip
    held_out = [{"question": f"held out {i}"} for i in range(3)]
    trainer = agl.Trainer(algorithm, n_workers=4, directory=directory, progress=False)
    trainer.fit(tiny_run.agent, tiny_run.TRAIN, held_out)
    return directory


def push(hub: hubs.Hub, tmp_path: Path, *words: object, token: str | None = hubs.TOKEN) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    environment |= hub.environment(tmp_path / "home", token)
    command = [sys.executable, "-c", "from agl.trainer.cli import main; main()", "push", *map(str, words)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def files(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def card(hub: hubs.Hub, name: str) -> tuple[dict[str, object], str]:
    _, head, body = hub.repositories[name].files["README.md"].decode().split("---\n", 2)
    return yaml.safe_load(head), body


@pytest.mark.slow
@pytest.mark.night
def test_a_run_its_adapter_and_its_checkpoint(hub: hubs.Hub, run: Path, tmp_path: Path) -> None:
    done = push(hub, tmp_path, run, "calculator", "--private")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{hub.url}/someone/calculator"
    whole = hub.repositories["someone/calculator"]
    assert whole.private
    expected = {name: data for name, data in files(run / "policy").items() if not name.endswith("README.md")}
    assert {name: data for name, data in whole.files.items() if name != "README.md"} == expected
    assert {"model.safetensors", "tokenizer.json", "adapter/adapter_model.safetensors"} <= expected.keys()
    assert ("PUT", f"/objects/{hubs.hashlib.sha256(expected['model.safetensors']).hexdigest()}") in hub.requests
    metadata, body = card(hub, "someone/calculator")
    assert metadata["library_name"] == "transformers"
    assert {"agl", "grpo"} <= set(metadata["tags"])  # type: ignore[arg-type]
    assert "base_model" not in metadata, "a directory of this machine is no model of the hub"
    assert "| algorithm | GRPO |" in body
    assert "| steps | 2 |" in body
    results = [line.split(" | ") for line in body.splitlines() if line.startswith(("| 0 |", "| 2 |"))]
    assert [len(row[2].split(" to ")) for row in results] == [2, 2]
    assert [row[3] for row in results] == ["3 |", "3 |"]
    assert "## Command" in body
    assert str(run) not in body
    assert 'from_pretrained("someone/calculator")' in body

    # Again, as a checkpoint: what has not changed is not sent twice.
    n_puts = sum(method == "PUT" for method, _ in hub.requests)
    done = push(hub, tmp_path, run / "checkpoints" / "step-000002", "calculator", "--message", "the same")
    assert done.returncode == 0, done.stderr
    assert sum(method == "PUT" for method, _ in hub.requests) == n_puts

    done = push(hub, tmp_path, run / "policy", "someone/adapter", "--adapter")
    assert done.returncode == 0, done.stderr
    alone = hub.repositories["someone/adapter"]
    assert alone.files.keys() == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert card(hub, "someone/adapter")[0]["library_name"] == "peft"


@pytest.mark.slow
def test_what_was_pushed_is_loaded_from_the_hub(hub: hubs.Hub, run: Path, tmp_path: Path) -> None:
    program = f"""
import agl
from pathlib import Path
from transformers import AutoModelForCausalLM
result = agl.trainer.run.trainer.Result("run", Path({str(run)!r}), "", [], {{}}, None)
print(result.push_to_hub("calculator"))
AutoModelForCausalLM.from_pretrained("someone/calculator")
"""
    environment = {**os.environ, **hub.environment(tmp_path / "home")}
    command = [sys.executable, "-c", "import agl.trainer.run.trainer\n" + program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{hub.url}/someone/calculator"


@pytest.mark.parametrize(
    ("repo", "token", "message", "hint"),
    [
        ("calculator", None, "the hub refuses (401)", "hf auth login"),
        ("calculator", "hf_wrong", "the hub refuses (401)", "HF_TOKEN"),
        ("elsewhere/calculator", hubs.TOKEN, "the hub refuses (403): You don't have the rights", "may not write there"),
        ("a/b/c", hubs.TOKEN, "is not a valid name on the hub", "organisation/name"),
    ],
)
def test_a_refusal_says_what_to_do(
    repo: str, token: str | None, message: str, hint: str, hub: hubs.Hub, untrained_model: Path, tmp_path: Path
) -> None:
    done = push(hub, tmp_path, untrained_model, repo, token=token)
    assert done.returncode == 1
    said = " ".join(done.stderr.split())
    assert message in said
    assert hint in said
    assert "Traceback" not in said


def test_what_is_no_policy_is_not_pushed(hub: hubs.Hub, untrained_model: Path, tmp_path: Path) -> None:
    assert "there is no policy here" in push(hub, tmp_path, tmp_path, "calculator").stderr
    assert "there is no LoRA adapter here" in push(hub, tmp_path, untrained_model, "calculator", "--adapter").stderr
    (adapter := tmp_path / "policy" / "adapter").mkdir(parents=True)
    (adapter / "adapter_config.json").write_text("{}")
    (tmp_path / "policy" / "config.json").write_text('{"agl_added_tokens": [300, 301]}')
    for words in ((tmp_path / "policy", "calculator", "--adapter"), (adapter, "calculator")):
        assert "a model with 2 more tokens than its base" in push(hub, tmp_path, *words).stderr
    assert hub.requests == []


def test_passwords_in_urls_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from agl.trainer.run.hub import COMMAND_FILE, save_command

    monkeypatch.setattr(sys, "argv", ["/usr/bin/agl", "train", "--store", "postgresql://me:secret@db/agl"])
    save_command(tmp_path)
    assert (tmp_path / COMMAND_FILE).read_text() == "agl train --store postgresql://...@db/agl\n"


def test_a_notebook_has_no_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from agl.trainer.run.hub import COMMAND_FILE, save_command

    def in_shell(shell: object) -> bool:
        monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
        (tmp_path / COMMAND_FILE).unlink(missing_ok=True)
        save_command(tmp_path)
        return (tmp_path / COMMAND_FILE).exists()

    monkeypatch.setattr(sys, "argv", ["train.py"])
    assert not in_shell(SimpleNamespace(kernel=object()))
    assert in_shell(SimpleNamespace()), "ipython in a terminal"
    assert in_shell(None), "a program that has only imported it"
