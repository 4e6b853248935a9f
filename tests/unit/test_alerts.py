"""What looks wrong in a run's numbers: which steps, said once, and sent on."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from running import say
from tiny_run import TRAIN

import agl
from agl.errors import ConfigError
from agl.trainer.report.alerts import Alert, Watch
from agl.trainer.report.statistics import reward_interval


def alerts_of(history: list[dict[str, Any]]) -> list[tuple[str, str, int, int]]:
    watch = Watch()
    began = [alert for entry in history for alert in watch.add(entry)]
    assert [(a.kind, a.policy, a.since) for a in began] == [(a.kind, a.policy, a.since) for a in watch.alerts]
    return [(a.kind, a.policy, a.since, a.step) for a in watch.alerts]


def steps(name: str, values: list[float | None], **same: float) -> list[dict[str, Any]]:
    return [{"step": i + 1, name: value, **same} for i, value in enumerate(values)]


@pytest.mark.parametrize(
    ("history", "wanted"),
    [
        (steps("learner/entropy", [1.6, 0.9, 0.2, 0.15, 0.1]), [("entropy", "", 4, 5)]),
        (steps("a/learner/entropy", [1.0, 0.05, 0.5, 0.05]), [("entropy", "a", 2, 2), ("entropy", "a", 4, 4)]),
        (steps("learner/approx_kl", [0.0, -0.2, None, 0.2, 0.01]), [("kl", "", 2, 4)]),
        (steps("learner/approx_kl", [float("nan"), 0.05]), []),
        (steps("train/zero_variance_groups", [11, 12, 16, 3], **{"train/groups": 16}), [("flat", "", 2, 3)]),
        (steps("train/zero_variance_groups", [1, 1], **{"train/groups": 1}), []),
        (steps("train/failed_rollouts", [12, 13, 64], **{"train/rollouts": 64}), [("failed", "", 2, 3)]),
        (steps("train/policy_faults/length", [20, 0, 20], **{"train/rollouts": 64}),
         [("faults", "", 1, 1), ("faults", "", 3, 3)]),
        ([{"step": s, "val/reward": v, "val/reward_low": v - 0.1, "val/reward_high": v + 0.1}
          for s, v in ((0, 0.2), (10, 0.6), (20, 0.45), (30, 0.3), (40, 0.55))], [("held-out", "", 30, 30)]),
        # The intervals of 32 tasks overlap, and yet the difference is more than chance.
        ([{"step": 0, "val/reward": 0.65, "val/reward_low": 0.48, "val/reward_high": 0.79},
          {"step": 5, "val/reward": 0.40, "val/reward_low": 0.25, "val/reward_high": 0.56}], [("held-out", "", 5, 5)]),
        ([{"step": 0, "val/reward": 0.65, "val/reward_low": 0.48, "val/reward_high": 0.79},
          {"step": 5, "val/reward": 0.50, "val/reward_low": 0.34, "val/reward_high": 0.66}], []),
        ([{"step": 0, "val/reward": 0.5}, {"step": 5, "val/reward": 0.1}], []),
    ],
)  # fmt: skip
def test_what_looks_wrong(history: list[dict[str, Any]], wanted: list[tuple[str, str, int, int]]) -> None:
    assert alerts_of(history) == wanted


@pytest.mark.parametrize(("tasks", "worth"), [(5, 1), (20, 1), (50, 1), (20, 2)])
def test_a_policy_that_does_not_change_has_seldom_lost_held_out_reward(tasks: int, worth: int) -> None:
    draws = np.random.default_rng(0)
    alarmed = 0
    for _ in range(100):
        history = []
        for step in range(20):
            rewards = (draws.random(tasks) < 0.5) * worth
            low, high = reward_interval([[float(reward)] for reward in rewards])
            history.append({"step": step, "val/reward": rewards.mean(), "val/reward_low": low, "val/reward_high": high})
        alarmed += bool(alerts_of(history))
    assert alarmed <= 15


def test_rewards_without_a_spread_say_nothing_of_chance() -> None:
    history = [
        {"step": step, "val/reward": reward, "val/reward_low": reward, "val/reward_high": reward}
        for step, reward in enumerate((2.0, 1.9))
    ]
    assert alerts_of(history) == []


def test_alerts_are_the_spans_of_steps_in_which_the_rule_holds() -> None:
    """Another way to count: the runs of steps at which the share of failures is above a fifth."""
    draw = random.Random(0)
    for _ in range(200):
        failed = [draw.choice([0, 5, 30]) for _ in range(draw.randrange(1, 30))]
        spans, since = [], None
        for step, n in enumerate([*failed, 0], 1):
            if n / 64 > 0.2:
                since = since or step
            elif since:
                spans.append(("failed", "", since, step - 1))
                since = None
        assert alerts_of(steps("train/failed_rollouts", list(failed), **{"train/rollouts": 64})) == spans


@pytest.fixture
def receiver() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    got: list[dict[str, Any]] = []

    class Take(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(204 if len(got) < 3 else 500)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Take)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/hook", got
    server.shutdown()


@agl.rollout
def third(task: dict[str, str], llm: agl.LLM) -> float:
    """One of four tasks has rewards that differ."""
    answer = say(llm, task["question"])
    return float(len(answer)) if task == TRAIN[0] else 1.0


@pytest.mark.full
def test_a_run_tells_callbacks_the_terminal_and_a_webhook(
    untrained_model: Path, tmp_path: Path, receiver: tuple[str, list[dict[str, Any]]], capfd: pytest.CaptureFixture[str]
) -> None:
    url, got = receiver
    told: list[Alert] = []

    class Told(agl.Callback):
        def on_alert(self, run: Any, alert: Alert) -> None:
            told.append(alert)

    algorithm = agl.GRPO(
        model=str(untrained_model), group_size=2, batch_size=4, steps=3, max_response_tokens=6, max_context=128,
        learning_rate=1e-3, temperature=2.0,
    )  # fmt: skip
    trainer = agl.Trainer(algorithm, n_workers=4, directory=tmp_path, callbacks=[Told(), agl.Webhook(url)])
    result = trainer.fit(third, TRAIN)
    watch = Watch()
    assert told == [alert for entry in result.history for alert in watch.add(entry)]
    assert [alert.kind for alert in told] == ["flat"]
    sent = [(fact["event"], fact["kind"], fact["text"]) for fact in got]
    assert sent == [*(("alert", a.kind, a.text) for a in told), ("end", "succeeded", "the run has succeeded")]
    assert {fact["run_id"] for fact in got} == {got[0]["run_id"]}
    shown = " ".join(capfd.readouterr().err.split())
    assert all(alert.text in shown for alert in told)


def test_a_webhook_that_is_no_url_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Webhook\('hooks\.example'\)"):
        agl.Webhook("hooks.example")
