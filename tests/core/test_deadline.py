"""A deadline is over when its seconds are spent, and its shares began when it did."""

from __future__ import annotations

import pytest

from keras_remat.core import deadline
from keras_remat.core.deadline import Deadline, work_budget_s


def test_left_spent_and_shares_follow_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(deadline.time, "perf_counter", lambda: clock[0])
    limit = Deadline(10.0)
    half = limit.share(0.5)
    clock[0] = 104.0
    assert (limit.spent_s(), limit.left_s(), half.left_s()) == (4.0, 6.0, 1.0)
    clock[0] = 105.0
    assert half.is_over
    assert not limit.is_over
    clock[0] = 200.0
    assert (limit.left_s(), limit.is_over) == (0.0, True)


def test_a_patient_deadline_lasts_longer_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(deadline.time, "perf_counter", lambda: clock[0])
    limit = Deadline(10.0, patience=4.0)
    half = limit.share(0.5)
    clock[0] = 8.0
    assert (limit.left_s(), half.left_s()) == (8.0, 3.0)
    clock[0] = 20.0
    assert (limit.is_over, half.is_over) == (False, True)
    clock[0] = 40.0
    assert limit.is_over


def test_time_limits_that_differ_by_an_instant_mean_the_same_work() -> None:
    assert [work_budget_s(limit_s) for limit_s in (0.4, 0.99, 1.0, 1.4, 1.6)] == [
        0.4, 0.99, 1.0, 1.0, 2.0,
    ]  # fmt: skip
