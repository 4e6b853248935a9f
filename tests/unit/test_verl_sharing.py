"""Shared prefixes under verl: which runs cannot have them, and which rows each GPU gets."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import agl
from agl.errors import ConfigError
from agl_verl.config.checks import check
from agl_verl.config.plan import Plan, read
from agl_verl.config.shorthand import expand
from agl_verl.sharing import together

MODEL, ACTOR = "actor_rollout_ref.model", "actor_rollout_ref.actor"


def plan(config: dict[str, Any], **common: Any) -> Plan:
    return read({**expand({"model": "m", "steps": 1, "share_prefixes": True, **common}), **config})


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 50)), min_size=1, max_size=24), st.integers(1, 4))
def test_ranks_get_equal_shares_and_whole_groups(rows: list[tuple[str, int]], ranks: int) -> None:
    rows += [("pad", 2)] * (-len(rows) % ranks)
    groups, tokens = [group for group, _ in rows], [size for _, size in rows]
    order = together(groups, tokens, ranks)
    assert sorted(order) == list(range(len(rows)))
    size = len(rows) // ranks
    shares = [[groups[i] for i in order[k * size :][:size]] for k in range(ranks)]
    for share in shares:
        assert sum(a != b for a, b in pairwise(share)) == len(set(share)) - 1, "a group is in one piece"
    pieces = sum(len(set(share)) for share in shares)
    assert pieces - len(set(groups)) < ranks, "fewer groups are cut than there are ranks"


def test_groups_that_fit_are_not_cut_and_tokens_are_balanced() -> None:
    groups, tokens = [g for g in "abcdefgh" for _ in range(8)], [10 * (k // 8 + 1) for k in range(64)]
    order = together(groups, tokens, 2)
    first, second = order[:32], order[32:]
    assert not {groups[i] for i in first} & {groups[i] for i in second}
    assert sum(tokens[i] for i in first) == sum(tokens[i] for i in second)


@pytest.mark.parametrize(
    ("config", "common", "why"),
    [
        ({f"{ACTOR}.strategy": "megatron"}, {}, "for FSDP only"),
        ({f"{MODEL}.use_fused_kernels": True}, {}, "whole vocabulary"),
        ({f"{ACTOR}.ulysses_sequence_parallel_size": 2}, {}, "several GPUs"),
        ({f"{MODEL}.external_lib": "mine"}, {}, "agl's own is needed"),
        ({}, {"adv_estimator": "gae"}, "critic"),
    ],
)
def test_it_is_refused_where_verl_would_compute_something_else(
    config: dict[str, Any], common: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=f"share_prefixes .*{why}"):
        check(plan(config, **common), lambda key: None)
    check(plan(config, **common, share_prefixes=False), lambda key: None)


def test_this_machine_shares_them_anyway() -> None:
    agl.VERL(model="m", steps=1, share_prefixes=True, backend="local")
