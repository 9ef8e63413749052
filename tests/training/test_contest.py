"""Which way trains, in how many pieces, and at which size: the pure rules."""

import math
from itertools import product

import pytest

from keras_remat.core.limit import Limit
from keras_remat.core.schedule import Usage
from keras_remat.training.contest import Contest, Trial, Tried, better, compared, next_micro_batches


@pytest.mark.parametrize(
    ("tried", "following"),
    [
        ([Tried(1, 1.0, 0.9)], 2),
        ([Tried(1, 1.0, 1.0)], 2),  # no recomputation, but the order costs: it is measured
        ([Tried(1)], 2),
        ([Tried(1), Tried(2)], 4),  # nothing has fit so far
        ([Tried(1), Tried(2, 1.0, 1.0)], 4),  # the first that fits is always the fastest
        ([Tried(1, 1.0, 0.8), Tried(2, 0.9, 0.8)], 4),  # it pays
        ([Tried(1, 1.0, 0.8), Tried(2, 0.9, 0.9)], 4),
        ([Tried(1, 1.0, 0.8), Tried(2, 1.1, 1.0)], 4),  # pieces without recomputation are missing
        ([Tried(1, 1.0, 0.8), Tried(2, 1.4, 1.3)], None),  # and would be too slow
        ([Tried(1, 1.0, 0.8), Tried(2, 1.1, 1.1)], None),  # they were measured
        ([Tried(1, 1.0, 0.8), Tried(2, 0.98, 0.98)], None),  # the same, as far as can be told
        ([Tried(1, 1.0, 0.8), Tried(2)], 4),  # over the limit: fewer samples need less
        ([Tried(2, 1.0, 0.9), Tried(4, 0.9, 0.8)], 8),
        ([Tried(4, 1.0, 0.9), Tried(8, 0.9, 0.8)], None),  # more than the most
        ([Tried(1, over_bytes=50)], 2),
        ([Tried(1, over_bytes=50), Tried(1, over_bytes=50)], 2),  # compiled, then in order
        ([Tried(1, over_bytes=50), Tried(2, over_bytes=25)], 4),  # all of it is the batch's
        ([Tried(1, over_bytes=50), Tried(2, over_bytes=26)], None),  # 1 is over with the least
        ([Tried(1, over_bytes=50), Tried(2, over_bytes=-1)], 4),
        ([Tried(1, over_bytes=-2), Tried(2, over_bytes=-1)], 4),
    ],
)
def test_what_is_tried_next(tried, following):
    assert next_micro_batches(tried, most=8) == following


def test_every_path_ends_at_the_fastest():
    """Whatever is measured, numbers double, and a number without recomputation is reached or too
    slow."""
    times = (0.5, 0.99, 1.0, 1.2, 2.0, math.inf)
    for measured in product(product(times, (0.7, 1.0)), repeat=4):
        tried, pieces = [], 1
        while pieces is not None:
            time_s, share = measured[len(tried)]
            tried.append(
                Tried(pieces) if math.isinf(time_s) else Tried(pieces, time_s, share * time_s)
            )
            best = min(tried[:-1], key=lambda one: one.time_s, default=None)
            pieces = next_micro_batches(([] if best is None else [best]) + tried[-1:], most=8)
        assert [one.micro_batches for one in tried] == [1, 2, 4, 8][: len(tried)]
        newest, before_s = tried[-1], min((t.time_s for t in tried[:-1]), default=math.inf)
        if len(tried) < 4:
            assert newest.least_s == newest.time_s or newest.least_s > 1.25 * before_s
            assert newest.time_s >= 0.97 * before_s


FAST, SLOW, LARGE = Usage(1.0, 50), Usage(2.0, 40), Usage(0.5, 150)


def trial_of(usages):
    """A trial whose sides took these, step by step."""
    trial = Trial("first", "second", 8)
    for usage in usages:
        trial = trial.noting(trial.turn(), usage)
    return trial


def test_both_sides_train_in_turn_and_the_first_step_of_a_turn_tells_nothing():
    trial, order = Trial("first", "second", 8), []
    while (side := trial.turn()) is not None:
        order.append(side)
        time_s = 100.0 if len(order) % 3 == 1 else {"first": 1.0, "second": 2.0}[side]
        trial = trial.noting(side, Usage(time_s, 10 * len(order)))
    assert order == (["first"] * 3 + ["second"] * 3) * 2
    assert trial.usage("first", FAST) == Usage(1.0, 90)
    assert trial.usage("second", SLOW) == Usage(2.0, 120)
    assert trial.noting("first", FAST) is trial, "nobody has a turn left"


def test_a_side_without_turns_took_what_its_settled_step_did():
    assert trial_of([]).usage("second", SLOW) == SLOW


@pytest.mark.parametrize(
    ("old", "new", "more_micro_batches", "stays"),
    [
        (FAST, SLOW, False, "first"),
        (SLOW, FAST, False, "second"),
        (SLOW, SLOW, False, "first"),
        (LARGE, SLOW, False, "second"),  # within the limit comes before faster
        (LARGE, Usage(9.0, 140), False, "second"),  # over it the smaller one
        (SLOW, Usage(1.99, 40), False, "second"),
        (SLOW, Usage(1.99, 40), True, "first"),  # more micro-batches have to pay
        (SLOW, FAST, True, "second"),
        (LARGE, SLOW, True, "second"),
    ],
)
def test_the_faster_side_within_the_limit_stays(old, new, more_micro_batches, stays):
    assert (
        better(trial_of([]), old, new, Limit(100), more_micro_batches=more_micro_batches) == stays
    )


def test_a_failure_of_the_last_mode_that_cannot_be_carried_ends_the_search_for_pieces():
    contest = Contest(running="compiled", modes_left=1, chooses_micro_batches=True)
    assert contest.after_failure(Tried(1), is_unsupported=True).may_try
    last = Contest(running="ordered", modes_left=0, chooses_micro_batches=True)
    assert not last.after_failure(Tried(1), is_unsupported=True).may_try
    assert last.after_failure(Tried(1), is_unsupported=False).next_micro_batches(8) == 2


def test_a_batch_that_has_grown_is_not_cut():
    contest = Contest(running="ordered", modes_left=0, chooses_micro_batches=True, has_grown=True)
    assert contest.judging(Tried(1, 1.0, 0.9)).next_micro_batches(8) is None


@pytest.mark.parametrize(
    ("rates", "size", "step_s", "following"),
    [
        ({}, 10, 2.0, (20, False)),
        ({10: 5.0}, 20, 4.0, (10, True)),  # no faster: the smallest is the answer
        ({10: 5.0}, 20, 2.0, (40, False)),
        ({10: 5.0, 20: 10.0}, 40, 4.0, (10, False)),  # the loader's is measured once more
        ({10: 5.0, 20: 10.0, 40: 10.0}, 10, 1.0, (10, True)),  # the device was slow before
        ({10: 5.0, 20: 10.0}, 25, 1.0, (10, False)),  # the largest that fits
    ],
)
def test_sizes_are_compared_as_long_as_larger_ones_pay(rates, size, step_s, following):
    assert (
        compared(rates, size, step_s, loader=10, largest=25 if size == 25 else 80)[1:] == following
    )
