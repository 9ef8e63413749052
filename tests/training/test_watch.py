"""Looks are as seldom as their cost asks for, and nothing that they find out is lost."""

from types import SimpleNamespace
from unittest import mock

import pytest

from keras_remat.training.watch import Pace, Watch


class Clock:
    """Stands still unless it is told to go on."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    clock = Clock()
    with mock.patch("time.perf_counter", clock):
        yield clock


def test_the_first_looks_may_come_at_once_and_later_ones_after_250_times_their_cost(clock):
    pace = Pace(2)
    for _ in range(2):
        assert pace.is_due()
        pace.looked(0.01)
    clock.now_s += 2.4
    assert not pace.is_due()
    clock.now_s += 0.2
    assert pace.is_due()


def test_a_look_that_costs_nothing_is_always_due(clock):
    pace = Pace(0)
    pace.looked(0.0)
    assert pace.is_due()


def watch_of(clock, peaks, first_looks=1, look_s=1.0):
    """A watch of a device that shows these peaks, and that takes seconds to answer."""
    shown = iter(peaks)

    def peak():
        clock.now_s += look_s
        return next(shown)

    device = SimpleNamespace(begin_watch=lambda: None, watched_peak_bytes=peak)
    return Watch(SimpleNamespace(synchronize=lambda: None), device, first_looks)


def test_a_look_tells_of_all_steps_since_the_last_one(clock):
    watch = watch_of(clock, [5, 7])
    assert watch.step_begins() is None  # nothing was before it
    clock.now_s += 2.0
    first = watch.step_begins()
    assert (first.steps, first.usage.time_s, first.usage.peak_bytes) == (1, 2.0, 5)
    clock.now_s += 0.2  # to take that in costs time, too
    watch.look_ends()
    for _ in range(3):
        clock.now_s += 2.0
        assert watch.passes()
    clock.now_s += 290.0
    assert watch.passes()
    clock.now_s += 10.0
    assert not watch.passes()  # a look is due, and the step is not counted yet
    last = watch.step_begins()
    assert (last.steps, last.usage.peak_bytes) == (5, 7)
    assert last.usage.time_s == pytest.approx((0.2 + 3 * 2.0 + 300.0) / 5)
