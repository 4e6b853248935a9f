"""Which workers count: those that reported."""

from __future__ import annotations

from agl.trainer.runners.lease_guard import LeaseGuard


def test_a_worker_that_loses_its_leases_waits_twice_as_long_each_time() -> None:
    now = 0.0
    guard = LeaseGuard(steady=lambda: now)
    assert guard.pause("thief") == 0.0
    pauses = []
    for _ in range(10):
        guard.lost("thief")
        pauses.append(guard.pause("thief"))
        now += pauses[-1]
        assert guard.pause("thief") == 0.0
    assert pauses == [5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 600.0, 600.0, 600.0]
    assert guard.pause("other") == 0.0
    guard.reported("thief", 1.0)
    assert guard.is_proven("thief")
    guard.lost("thief")
    assert guard.pause("thief") == 5.0
    assert not guard.is_proven("thief")


def test_patience_grows_with_what_attempts_take() -> None:
    guard = LeaseGuard(patience=30.0)
    guard.reported("a", 3.0)
    assert guard.patience == 30.0
    guard.reported("a", 100.0)
    assert guard.patience == 300.0
    for _ in range(64):
        guard.reported("a", 20.0)
    assert guard.patience == 60.0


def test_what_it_remembers_is_bounded() -> None:
    guard = LeaseGuard()
    for n in range(10_001):
        guard.reported(f"w{n}", 1.0)
    assert not guard.is_proven("w0")
    assert guard.is_proven("w10000")
