"""examples/text_to_sql from its command line: dry runs on an endpoint, and a real tiny policy that is updated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from scripted import Line, quick_tokenizer

from agl.testing.provider import Reply, serve

pytest.importorskip("sqlglot", reason="the example's databases are made with sqlglot")

from text_to_sql import BROKEN, EXAMPLE, KEY, RIGHT, WRONG, Run, asks, frozen, make_shop, modules


@pytest.fixture(scope="module")
def example() -> Iterator[SimpleNamespace]:
    with modules() as found:
        yield found


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shop(tmp_path_factory.mktemp("sql-eval"))


def command(*options: object, env: Mapping[str, str] = {}) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("OPENAI_API_KEY", "OPENAI_BASE_URL")}
    return subprocess.run(
        [sys.executable, str(EXAMPLE / "train.py"), *map(str, options)],
        env={**clean, **env}, capture_output=True, text=True, timeout=570, check=False,
    )  # fmt: skip


def test_a_dry_run_on_an_endpoint(shop: Path, tmp_path: Path) -> None:
    """All four agents ask the endpoint, with its key alone; nothing is trained."""

    def script(body: dict[str, Any]) -> Reply:
        told, asked = (m["content"] for m in body["messages"])
        if told.startswith(("Write", "The query")):
            return Reply(tools=(("run_sql", {"query": RIGHT if "Query:" in asked else BROKEN}),))
        return Reply("OK" if told.startswith("Does") and "chair" in asked else "Not the chair.")

    with serve(script) as provider:
        done = command(
            "--data", shop, "--out", tmp_path / "run", "--dev", "--endpoint", provider.url, "--api-key-env", "MY_KEY",
            "--json", tmp_path / "facts.json", env={"MY_KEY": KEY, "OPENAI_API_KEY": "sk-another"},
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(provider.seen) == 5
    assert {s.headers["authorization"] for s in provider.seen} == {f"Bearer {KEY}"}
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts["policies"] == {}
    (means,) = facts["rewards"]
    assert means == {
        "step": 0, "mode": "dev", "final_match": 1.0, "query_matches": 0.5, "query_fails": -0.1, "query_runs": 0.1,
        "verdict_is_right": 1.0, "answer_states_result": 1.0,
    }  # fmt: skip


def test_without_its_key_an_endpoint_is_not_given_another(shop: Path, tmp_path: Path) -> None:
    with serve(frozen(lambda asked: "OK")) as provider:
        command(
            "--data", shop, "--out", tmp_path / "run", "--dev", "--endpoint", provider.url, "--api-key-env", "NO_KEY",
            env={"OPENAI_API_KEY": "sk-another"},
        )  # fmt: skip
    assert {s.headers["authorization"] for s in provider.seen} == {"Bearer NO_KEY is not set"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--data", "."], "--model is needed"),
        (["--data", ".", "--model", "m", "--select", "writer,poet"], "no agent is called poet"),
        (["--data", "/nowhere", "--model", "m"], "does not hold"),
        (["--data", ".", "--model", "m", "--joint", "--shared"], "not allowed with"),
    ],
)
def test_what_is_refused(
    example: SimpleNamespace, options: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as stopped:
        example.train.main([*options, "--out", str(tmp_path)])
    assert said in capsys.readouterr().err + str(stopped.value)


# -- for real: a tiny policy that knows the lines of this play, sampled and updated -----------------------------------


@pytest.fixture(scope="module")
def player(example: SimpleNamespace, shop: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny policy that is right and wrong by chance in every role, fitted to the calls of a scripted play."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    queries = [asks(RIGHT), asks(WRONG), asks(BROKEN)]
    script: list[Line] = []
    for first in queries:
        for second in queries:
            for verdict in ("No.", "OK"):
                for answer in ("The chair.", "The mug."):
                    script += [first, verdict]
                    script += [second, verdict, answer] if verdict == "No." else [answer]
    with serve() as provider:
        out = tmp_path_factory.mktemp("play")
        run = Run(example, shop, out, provider, script, "--shared", "--rounds", "1", group_size=36)
    calls = {(c.prompt_ids.tobytes(), c.response_ids.tobytes()): c for calls in run.algorithm.calls for c in calls}

    tokenizer = quick_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=-(-len(tokenizer) // 8) * 8, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=1024, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    shape = len(calls), max(c.ids.size for c in calls.values())
    ids, labels = torch.full(shape, tokenizer.pad_token_id), torch.full(shape, -100)
    for i, call in enumerate(calls.values()):
        ids[i, : call.ids.size] = torch.tensor(call.ids)
        labels[i, call.prompt_ids.size : call.ids.size] = torch.tensor(call.response_ids)
    optimiser = torch.optim.AdamW(model.parameters(), lr=6e-3)
    for _ in range(90):
        optimiser.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        optimiser.step()
    directory = tmp_path_factory.mktemp("player")
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def trained(shop: Path, player: Path, out: Path, *options: object) -> tuple[dict[str, Any], int]:
    """The facts of a run of the command, and how many requests the provider got, whose checker is always right."""
    with serve(frozen(lambda asked: "OK" if "chair" in asked else "No.")) as provider:
        done = command(
            "--data", shop, "--out", out, "--model", player, "--endpoint", provider.url, "--val", 0, "--rounds", 1,
            "--max-tokens", 96, "--json", out.parent / "facts.json", *options,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads((out.parent / "facts.json").read_text()), len(provider.seen)


@pytest.mark.night
@pytest.mark.slow
def test_writer_and_rewriter_learn(shop: Path, player: Path, tmp_path: Path) -> None:
    """Two agents of four become better at what they were coin-flipping at, with the others at their provider."""
    facts, asked = trained(
        shop, player, tmp_path / "run", "--steps", 4, "--batch-size", 4, "--group-size", 8, "--learning-rate", 2e-4
    )
    assert [h["train/failed_rollouts"] for h in facts["history"]] == [0] * 4
    assert all(h["train/rows"] > 0 for h in facts["history"])
    assert facts["history"][-1]["policy_version"] == 4
    assert facts["policies"].keys() == {"policy"}
    assert (Path(facts["policies"]["policy"]) / "model.safetensors").is_file()
    # Of each rollout a verdict and an answer, and a second verdict where the rewriter spoke.
    assert 4 * 32 * 2 <= asked <= 4 * 32 * 3
    final = [r["final_match"] for r in facts["rewards"]]
    assert (final[2] + final[3]) / 2 > final[0] + 0.1
    assert not any({"verdict_is_right", "answer_states_result"} & r.keys() for r in facts["rewards"])


@pytest.mark.night
@pytest.mark.slow
def test_four_policies_are_trained_together(shop: Path, player: Path, tmp_path: Path) -> None:
    facts, asked = trained(
        shop, player, tmp_path / "run", "--joint", "--lora", 4, "--steps", 1, "--batch-size", 2, "--group-size", 4
    )
    assert asked == 0
    (step,) = facts["history"]
    assert step["train/rows"] > 0
    names = ("writer", "checker", "rewriter", "answerer")
    assert {name: step[f"{name}/policy_version"] for name in names} == dict.fromkeys(names, 1)
    assert facts["policies"].keys() == set(names)
    (means,) = facts["rewards"]
    assert {"verdict_is_right", "answer_states_result", "query_matches", "final_match"} <= means.keys()
