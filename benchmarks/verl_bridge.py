"""Step time of verl with agl's manager against verl with its own agent loop, and the bytes that each moves per token.

The same single-turn job for both: the same model, tasks, batch, answers of the same length at most, and one reward per
answer. verl's own loop renders a chat, samples and scores in its workers; agl's side runs a function agent that speaks
HTTP through the OpenAI SDK, with its spans, calls and rewards in the store. Both look for finished groups equally often
(verl's own interval of 2 s would round each step up). Runs alternate, and the median step of each side counts.

    python benchmarks/verl_bridge.py --model DIR [--device cpu] [--steps 6] [--rounds 2] [--json FILE]

The default model is a small one, made here: sampling then costs little, and the agents' own work most.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests" / "verl")]

BATCH, GROUP, TOKENS, PROMPT = 16, 8, 48, 160
WARM = 2
"""Steps at the start that do not count."""


def reward_of(text: str) -> float:
    """Any number in the answer: a reward that costs nothing."""
    return float(any(c.isdigit() for c in text))


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> float:
    """verl's side of it."""
    return reward_of(solution_str)


def question(i: int) -> str:
    return f"What is {i % 89} + {i % 53}?"


_client: Any = None


async def agent(task: dict[str, Any]) -> float:
    """agl's side: one call through the SDK that people use, whose client is made once."""
    global _client
    if _client is None:
        from openai import AsyncOpenAI

        _client = AsyncOpenAI(api_key="not used in training")
    answer = await _client.chat.completions.create(
        model="any", messages=[{"role": "user", "content": task["question"]}], max_completion_tokens=TOKENS
    )
    return reward_of(answer.choices[0].message.content or "")


def settings(device: str) -> dict[str, Any]:
    small = {
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 64,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 128,
        "actor_rollout_ref.rollout.max_num_seqs": BATCH * GROUP,
    }
    small |= {"trainer.checkpoint_callback_class": "verl_weighed.Weighed", "trainer.logger": ["console"]}
    if device != "cpu":
        return small
    import verl_cpu.settings

    os.environ.update(verl_cpu.settings.environment())
    return {**verl_cpu.settings.config(), **small}


def algorithm(model: Path, device: str, steps: int) -> Any:
    import agl

    return agl.VERL(
        settings(device), backend="cluster", model=str(model), group_size=GROUP, batch_size=BATCH, steps=steps,
        device=device, max_prompt_tokens=PROMPT, max_response_tokens=TOKENS, val_before_train=False,
        checkpoint_every=steps, learning_rate=1e-6,
    )  # fmt: skip


# -- the two sides ----------------------------------------------------------------------------------------------------


def ours(model: Path, device: str, steps: int, directory: Path) -> list[dict[str, float]]:
    """Metrics of each step with agl's manager."""
    import agl

    trainer = agl.Trainer(algorithm(model, device, steps), n_workers=BATCH * GROUP, directory=directory, progress=False)
    result = trainer.fit(agl.rollout(agent), [{"question": question(i)} for i in range(512)])
    return [{k.removeprefix("verl/"): v for k, v in h.items() if k.startswith("verl/")} for h in result.history]


def verls(model: Path, device: str, steps: int, directory: Path) -> list[dict[str, float]]:
    """Metrics of each step with verl's own agent loop."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import ray
    import ray.util.queue

    from agl_verl import cluster
    from agl_verl.config.compose import compose
    from agl_verl.overrides import environment, ray_init, runtime_env, total_gpus

    rows = [
        {
            "data_source": "bench", "prompt": [{"role": "user", "content": question(i)}],
            "reward_model": {"style": "rule", "ground_truth": ""}, "extra_info": {"index": i},
        }
        for i in range(512)
    ]  # fmt: skip
    directory.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), directory / "tasks.parquet")
    plan = algorithm(model, device, steps).plan
    environment()
    config = compose(
        plan,
        {
            **settings(device),
            "data.train_files": str(directory / "tasks.parquet"), "data.val_files": str(directory / "tasks.parquet"),
            "data.dataloader_num_workers": 0, "reward.num_workers": 1,
            "reward.custom_reward_function.path": str(Path(__file__).resolve()),
            "reward.custom_reward_function.name": "compute_score",
            "actor_rollout_ref.rollout.agent.num_workers": 1, "actor_rollout_ref.rollout.calculate_log_probs": True,
            "actor_rollout_ref.rollout.max_model_len": plan.max_context, "transfer_queue.enable": True,
            "trainer.default_local_dir": str(directory / "checkpoints"), "trainer.resume_mode": "disable",
            "trainer.val_before_train": False, "trainer.test_freq": -1, "trainer.save_freq": steps,
        },
    )  # fmt: skip

    async def run() -> list[dict[str, float]]:
        async with cluster.connection(ray_init(plan), gpus=total_gpus(plan)):
            env = runtime_env(plan)
            env["env_vars"]["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
            job = ray.remote(OwnLoop).options(num_cpus=1, runtime_env=env).remote()
            return await job.run.remote(config)

    return asyncio.run(run())


class OwnLoop:
    """verl's trainer with its own manager, which keeps the metrics of its steps."""

    def run(self, config: Any) -> list[dict[str, float]]:
        import transfer_queue as tq
        from omegaconf import OmegaConf
        from verl.trainer.ppo.v1 import AgentLoopManagerTQ, get_trainer_cls

        from agl_verl.trainer_hooks import POLL_SECONDS, scalars

        steps: list[dict[str, float]] = []
        base: Any = get_trainer_cls("sync")

        class Trainer(base):
            def _compute_metrics(self, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> None:
                super()._compute_metrics(batch, metrics, *args, **kwargs)
                steps.append(scalars(metrics))

        OmegaConf.resolve(config)
        tq.init(config.transfer_queue)
        trainer: Any = Trainer(config=config)
        trainer.replay_buffer.poll_interval = POLL_SECONDS
        trainer.init()
        trainer.fit(
            AgentLoopManagerTQ.create(
                config=config, llm_client=trainer.get_llm_client(), teacher_client=trainer.get_teacher_client(),
                reward_loop_worker_handles=trainer.get_reward_handles(),
            )
        )  # fmt: skip
        tq.close()
        return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.steps <= WARM:
        parser.error(f"--steps: more than {WARM}, which do not count")
    with tempfile.TemporaryDirectory() as scratch:
        model = options.model
        if model is None:
            from agl.trainer.quickstart.policy import make_policy

            model = Path(scratch) / "policy"
            make_policy(model, seed=0, threads=1)
        steps: dict[str, list[dict[str, float]]] = {"agl": [], "verl": []}
        weighed: dict[str, dict[str, int]] = {}
        for i in range(options.rounds):
            for side, run in (("verl", verls), ("agl", ours)):
                directory = Path(scratch) / f"{side}-{i}"
                metrics = run(model, options.device, options.steps, directory)
                steps[side] += metrics[WARM:]
                where = directory / "checkpoints" / f"global_step_{options.steps}" / "weighed.json"
                weighed[side] = json.loads(where.read_text())
                print(f"round {i + 1} {side}: " + " ".join(f"{m['timing_s/step']:.2f}" for m in metrics), flush=True)
    report(steps, weighed, options.json)


def report(steps: dict[str, list[dict[str, float]]], weighed: dict[str, dict[str, int]], file: Path | None) -> None:
    facts: dict[str, Any] = {}
    for phase in ("step", "gen", "old_log_prob", "adv", "update_actor", "update_weights"):
        of = {side: statistics.median(m[f"timing_s/{phase}"] for m in ms) for side, ms in steps.items()}
        facts[phase] = {**of, "ratio": of["agl"] / of["verl"]}
        print(f"{phase:14s} verl {of['verl']:.3f} s   agl {of['agl']:.3f} s   {facts[phase]['ratio']:.2f}x")
    for side, w in weighed.items():
        facts[f"{side} bytes/token"] = w["bytes"] / w["tokens"]
        print(f"{side}: {w['bytes'] / w['tokens']:.1f} bytes per token of a row ({w['tokens']} tokens)")
    if file is not None:
        file.write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
