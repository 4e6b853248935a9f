"""Customer service: an assistant is trained to keep a shop's policy, in conversation with a simulated customer.

    python -m examples.customer_service --tiny
    python -m examples.customer_service --model DIR_OR_HUB_ID --endpoint URL --endpoint-model NAME

The customer answers at `--endpoint` (key in OPENAI_API_KEY) and is not trained; with `--tiny` it is scripted. Where
TAU2_DATA_DIR names the data of tau2-bench, `--model` is trained on its retail tasks, else on generated ones.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import agl
from agl.trainer.evaluation.policy_report import PolicyReport
from agl.trainer.report.statistics import pass_hat_k
from examples import common
from examples.customer_service import scripts, tasks
from examples.customer_service.agent import build, chat_model

EXAMPLE = "customer_service"
TRAINED: dict[str, Any] = {"agents": ["assistant"]}


def main(argv: Sequence[str] | None = None) -> dict[str, Any] | None:
    options = common.arguments(EXAMPLE, __doc__, argv)
    folder = None if options.tiny else tasks.retail_folder()
    if folder is not None:
        train, held_out = tasks.retail(folder, "train"), tasks.retail(folder, "test")
    elif options.short:
        train, held_out = tasks.cancellations(options.seed)
    else:
        train, held_out = tasks.train(1600, options.seed), tasks.held_out(48, options.seed)
    lengths: dict[str, Any] = (
        {"max_response_tokens": 48, "max_context": 512}
        if options.tiny
        else {"max_response_tokens": 512, "max_context": 16384}
    )
    run: dict[str, Any] = {**TRAINED, "n_workers": 32, "seed": options.seed}

    with common.provider(options, scripts.customer) as user, common.provider(options, scripts.oracle) as model:
        customer = chat_model(user.url, user.model, user.key)

        def service(endpoint: common.Endpoint) -> agl.Agent:
            assistant = chat_model(endpoint.url, endpoint.model, endpoint.key, lengths["max_response_tokens"])
            size: dict[str, int] = {"turns": 5, "calls": 4} if options.tiny else {}
            return agl.wrap(build(assistant, customer, tasks.open_environment, **size), reward=tasks.reward)

        if options.debug:
            return common.debug(service(model), train, options, **TRAINED)
        imitated: dict[str, Any] = {"epochs": 6, "batch_size": 4} if options.short else {"epochs": 7, "batch_size": 8}
        start = options.model or common.tiny_policy(
            service,
            train,
            scripts.short_beginner if options.short else scripts.beginner,
            options.out / "start",
            seed=options.seed,
            **imitated,
            **TRAINED,
            **lengths,
        )
        grpo = agl.GRPO(
            model=start,
            steps=options.steps or (4 if options.short else 30),
            batch_size=8,
            group_size=4 if options.short else 8,
            learning_rate=5e-4 if options.short else 3e-4 if options.tiny else 1e-6,
            minibatches=4,
            schedule="linear",
            threads=options.threads,
            **lengths,
        )
        agent = service(model)
        trained = agl.Trainer(grpo, directory=options.out / "grpo", **run).fit(agent, train)
        policies = {"before": start, "after": trained.policy}
        samples = 1 if options.short else 4
        report = agl.evaluate(agent, held_out, policies, samples=samples, directory=options.out / "evaluation", **run)
    return common.save(EXAMPLE, report, options, columns=columns(report))


def columns(report: agl.Evaluation) -> dict[str, dict[str, str]]:
    """Of each policy: pass^1 to pass^k, the rollouts in which the customer erred, success on the unseen combination."""
    unseen = {index for index, task in report.tasks.items() if tasks.is_unseen(task)}
    found = {}
    for name, policy in report.policies.items():
        there = [
            rollout.success for rollout in policy.rollouts if rollout.task in unseen and rollout.success is not None
        ]
        found[name] = {
            f"pass^1 to pass^{policy.samples}": ", ".join(f"{value:.3f}" for value in passes(policy).values()),
            "user errors": str(sum(n for cause, n in policy.failures.items() if tasks.USER_ERRED in cause)),
            "unseen combination": f"{100 * sum(there) / len(there):.1f} % of {len(there)}" if there else "",
        }
    return found


def passes(policy: PolicyReport) -> dict[int, float]:
    """pass^k for every k: the probability that k rollouts of a task all succeed, over the tasks of which k ended."""
    ended = [[r.success for r in rollouts if r.success is not None] for rollouts in policy.by_task().values()]
    found = {}
    for k in range(1, policy.samples + 1):
        enough = [task for task in ended if len(task) >= k]
        if enough:
            n, c = [len(task) for task in enough], [sum(task) for task in enough]
            found[k] = float(pass_hat_k(n, c, k).mean())
    return found


if __name__ == "__main__":
    try:
        main()
    except agl.AglError as error:
        sys.exit(f"error: {error}")
