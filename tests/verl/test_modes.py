"""verl's modes, estimators and losses by configuration, two steps each, and what credit makes of them."""

from __future__ import annotations

import asyncio
import math
import shutil
from collections import Counter, defaultdict
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch
from jobs import algorithm, quickstart, train
from processes import gateway_processes
from running import say
from transformers import AutoModelForCausalLM

import agl
from agl.mdp.builder import AttemptTrajectory, build_trajectory
from agl.mdp.selection import select
from agl.mdp.span_index import SpanIndex
from agl.mdp.types import Call
from agl.trainer.quickstart.tasks import arithmetic_tasks
from agl.trainer.store import open_store

pytestmark = [pytest.mark.night, pytest.mark.slow, pytest.mark.timeout(900)]


def test_credit_per_call_reaches_verls_advantages(
    cluster: None, left_clean: None, tiny_policy: Path, tmp_path: Path
) -> None:
    """Colocated and asynchronous, RLOO with GSPO's loss, truncated importance sampling and a reference; a tool's
    success is rewarded, and it is the call that asked for the tool whose tokens have the advantage."""
    rules = agl.AIR()

    @rules.on_tool_success
    def used(tool_name: str, output: str) -> float:
        return 1.0

    result = train(
        quickstart(),
        algorithm(
            tiny_policy,
            {
                "trainer.checkpoint_callback_class": "captured.Captured",
                "algorithm.rollout_correction.rollout_is": "token",
                "algorithm.rollout_correction.rollout_is_threshold": 2.0,
            },
            steps=2, checkpoint_every=2, mode="colocate_async", adv_estimator="rloo", policy_loss="gspo",
            kl_coef=0.001,
        ),
        tmp_path / "run", credit=agl.credit.PerCall(), air=rules, heldout=16,
    )  # fmt: skip
    assert [h["step"] for h in result.history] == [0, 1, 2]
    assert result.history[-1]["verl/rollout_corr/rollout_is_mean"] == pytest.approx(1.0, abs=0.2)
    assert math.isfinite(result.history[-1]["verl/actor/kl_loss"])
    rows = torch.load(tmp_path / "run" / "checkpoints" / "global_step_2" / "rows.pt")
    groups = asyncio.run(_groups(result.store))
    due = {tuple(c.ids.tolist()): (c, a) for g in groups for c, a in _rloo(g)}
    checked = set()
    for row in rows.values():
        ids, n = torch.cat([row["prompts"], row["responses"]]).tolist(), row["prompts"].numel()
        mask = row["response_mask"].bool().numpy()
        for end in (np.flatnonzero(np.diff(np.append(mask, False).astype(int)) == -1) + 1).tolist():
            call, advantage = due[tuple(ids[: n + end])]
            got = row["advantages"].numpy()[end - call.response_ids.size : end]
            assert np.abs(got - advantage).max() <= 1e-6
            checked.add(round(advantage, 6))
    assert len(checked) > 3, "calls of one rollout have the same advantage, so this shows nothing"


def test_ppo_with_a_critic_on_adapters(cluster: None, left_clean: None, tiny_policy: Path, tmp_path: Path) -> None:
    """Generalised advantage estimation by verl's critic, and LoRA."""
    result = train(
        quickstart(),
        algorithm(
            tiny_policy,
            {
                "critic.model.path": str(tiny_policy), "critic.optim.lr": 1e-3, "algorithm.lam": 0.95,
            },
            steps=2, adv_estimator="gae", lora_rank=8,
        ),
        tmp_path / "run", heldout=16,
    )  # fmt: skip
    last = result.history[-1]
    assert last["step"] == 2
    assert last["verl/critic/vf_loss"] > 0
    assert last["verl/agl/probe/moved"] > 0
    # The reward to go of a row's first token is its rollout's reward.
    assert last["verl/critic/score/mean"] == pytest.approx(last["train/reward"], abs=1e-5)
    assert result.policy is not None
    # verl writes peft's names; what is published has the adapter merged in.
    trained, info = AutoModelForCausalLM.from_pretrained(result.policy, output_loading_info=True)
    assert not info["missing_keys"] | info["unexpected_keys"]
    before = AutoModelForCausalLM.from_pretrained(tiny_policy)
    same = [torch.equal(a, b) for a, b in zip(trained.parameters(), before.parameters(), strict=True)]
    assert any(same)
    assert not all(same)


def test_a_dry_run_with_a_gateway_process_for_every_few_runners_and_a_template_from_outside(
    cluster: None, left_clean: None, tiny_policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from agl_verl import bridge

    monkeypatch.setattr(bridge, "RUNNERS_PER_GATEWAY", 3)
    monkeypatch.setenv("AGL_CACHE", str(tmp_path / "cache"))
    model = Path(shutil.copytree(tiny_policy, tmp_path / "without template"))
    template = (model / "chat_template.jinja").rename(tmp_path / "template.jinja")
    ports: Counter[int | None] = Counter()
    processes: set[int] = set()

    @agl.rollout
    def agent(task: dict[str, str], llm: agl.LLM) -> float:
        ports[urlsplit(llm.endpoint).port] += 1
        processes.update(gateway_processes())
        return float(say(llm, task["question"]) == task["answer"])

    verl = algorithm(model, steps=1, chat_template=str(template))
    trainer = agl.Trainer(verl, directory=tmp_path / "run", n_workers=4)
    result = trainer.dev(agent, arithmetic_tasks(8, seed=0, split="train"), n_tasks=4)
    assert result.history == [{**result.history[0], "step": 0, "train/rollouts": 4}]
    assert result.checkpoint is None
    assert capsys.readouterr().out.count("training rows") == 4
    assert (len(processes), list(ports.values())) == (2, [2, 2])
    assert gateway_processes() == []


async def _groups(url: str) -> list[list[AttemptTrajectory]]:
    """The training groups, rollouts built as the run built them."""
    store = await open_store(url)
    try:
        groups = defaultdict(list)
        for r in await store.query_rollouts(mode="train"):
            if r.status == "succeeded":
                calls = await store.query_calls(r.rollout_id, r.attempts)
                spans = await store.query_spans(r.rollout_id, r.attempts)
                groups[r.group].append(
                    build_trajectory(r.rollout_id, r.attempts, r.group, SpanIndex(calls, spans), select(None))
                )
    finally:
        await store.close()
    return list(groups.values())


def _rloo(group: list[AttemptTrajectory]) -> list[tuple[Call, float]]:
    """arXiv 2402.14740 with one return per call: its own reward less the mean of the other rollouts' means."""
    means = [np.mean([x.reward for x in b.trajectory.transitions]) for b in group]
    return [
        (x.call, float(x.reward - np.mean(means[:i] + means[i + 1 :])))
        for i, b in enumerate(group)
        for x in b.trajectory.transitions
    ]
