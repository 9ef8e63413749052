"""The driver of the size rule: what ran decides about the next size, and its order."""

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from fake_backend import FakeBackend, chain_problem, quick_plan, store_all_peak

from keras_remat.batch_size.found import is_allowed
from keras_remat.batch_size.size_chooser import MOST_SIZES, SizeChooser
from keras_remat.batch_size.sizes import RESOLUTION
from keras_remat.core.limit import Limit
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate

LIMIT = store_all_peak(100)


class Scaling:
    """The chain at any size, at costs in proportion."""

    fit = None

    def at(self, size):
        return chain_problem(size)


def chooser_of(predicted, **options):
    orders = options.pop("orders", [Schedule.store_all(chain_problem(1).graph)])
    search = SimpleNamespace(max_batch_size=predicted, orders=orders)
    arguments = {
        "at_most": 1000,
        "max_overhead": 0.0,
        "solver": "greedy",
        "solve_s": 1.0,
    } | options
    return SizeChooser.after(FakeBackend(), search, **arguments)


def corrected_bytes(chooser):
    """What predictions are held against."""
    return chooser.corrected(Limit(LIMIT), Scaling()).usable_bytes


def sizes_until(largest, predicted, **options):
    """The sizes that are chosen where those up to ``largest`` train."""
    ran = []

    def train(size, plan):
        ran.append(size)
        peak = plan.predicted.peak_bytes if size <= largest else LIMIT + 1
        return peak, size <= largest

    return ran, run_out(chooser_of(predicted, **options), train)


def run_out(chooser, train):
    """What is known at the end, where ``train(size, plan)`` returns a peak and whether it fits."""
    while True:
        chooser, chosen = chooser.choose(Scaling(), Limit(LIMIT))
        if chosen is None:
            return chooser
        peak, fits = train(*chosen)
        chooser = chooser.after_trial(*chosen, peak, fits=fits)


def test_the_first_size_is_the_one_that_an_order_reaches():
    ran, chooser = sizes_until(1000, 100)
    assert ran[0] == 100
    assert chooser.trained == 100


def test_the_first_size_leaves_room_and_the_next_ones_take_it():
    ran, chooser = sizes_until(1000, 100, first_margin=0.1)
    assert 88 <= ran[0] <= 90
    assert chooser.trained >= 100 / (1 + RESOLUTION)
    wider, (size, _) = chooser_of(100, first_margin=0.1).choose(Scaling(), Limit(LIMIT, 0.2))
    assert 78 <= size <= 80, "a margin that was asked for is no less"
    assert wider.corrected(Limit(LIMIT, 0.2), Scaling()).margin == 0.2
    ran, chooser = sizes_until(1000, 100, first_margin=0.1, next_margin=0.05)
    assert 88 <= ran[0] <= 90
    assert 95 / (1 + RESOLUTION) <= chooser.trained == max(ran) <= 95


def test_an_error_beyond_the_limit_is_taken_to_grow_with_the_size():
    chooser = run_out(
        chooser_of(100),
        lambda size, plan: (6 * (peak := plan.predicted.peak_bytes), 6 * peak <= LIMIT),
    )
    assert 0 < store_all_peak(chooser.trained) <= LIMIT / 6
    assert store_all_peak(chooser.trained + 2) > LIMIT / 6


@pytest.mark.parametrize("largest", [61, 80, 99])
def test_every_size_is_one_that_the_devices_divide(largest):
    ran, chooser = sizes_until(largest, 104, multiple=8, at_most=160)
    assert all(size % 8 == 0 for size in ran)
    assert chooser.trained == largest - largest % 8


def test_it_goes_down_until_a_size_trains_and_up_again():
    ran, chooser = sizes_until(80, 100)
    first = next(size for size in ran if size <= 80)
    assert ran[: ran.index(first)] == sorted(ran[: ran.index(first)], reverse=True)
    assert chooser.trained <= 80
    assert chooser.failed[0] > 80
    assert chooser.failed[0] <= chooser.trained * (1 + 2 * RESOLUTION) + 1


def test_no_size_above_the_most_is_chosen():
    ran, _ = sizes_until(1000, 100, at_most=60)
    assert max(ran) == 60


def test_what_ran_above_its_prediction_is_taken_off_the_budget():
    chooser = chooser_of(100)
    chooser, (size, plan) = chooser.choose(Scaling(), Limit(LIMIT))
    assert corrected_bytes(chooser) == LIMIT
    chooser = chooser.after_trial(size, plan, plan.predicted.peak_bytes + 1000, fits=False)
    assert corrected_bytes(chooser) == LIMIT - 500
    chooser = chooser.after_trial(size, plan, plan.predicted.peak_bytes + 1000, fits=False)
    assert corrected_bytes(chooser) == LIMIT - 1000


def test_out_of_memory_has_no_peak():
    chooser = chooser_of(100)
    chooser, (size, plan) = chooser.choose(Scaling(), Limit(LIMIT))
    chooser = chooser.after_trial(size, plan, 0, fits=False)
    assert chooser.failed == (100, 0)
    assert corrected_bytes(chooser) == LIMIT - int(RESOLUTION * LIMIT)
    # it could not be planned, which tells no bytes
    chooser = chooser.after_trial(size, None, 0, fits=False)
    assert corrected_bytes(chooser) == LIMIT - int(RESOLUTION * LIMIT)
    chooser = chooser.after_trial(size, plan, plan.predicted.peak_bytes, fits=True)
    assert corrected_bytes(chooser) == LIMIT


@pytest.mark.parametrize("largest", [1, 37, 99])
def test_it_ends(largest):
    ran, _ = sizes_until(largest, 100)
    assert len(ran) <= MOST_SIZES


def test_after_the_deadline_nothing_larger_is_tried():
    chooser = chooser_of(60, deadline_s=0.0)
    chooser, (size, plan) = chooser.choose(Scaling(), Limit(LIMIT))
    chooser = chooser.after_trial(size, plan, plan.predicted.peak_bytes, fits=True)
    assert chooser.choose(Scaling(), Limit(LIMIT))[1] is None


def test_where_the_work_is_done_known_orders_are_all_there_is():
    """However many sizes run, they share one budget of work."""
    solved, unsolved = (
        sizes_until(1000, 60, max_overhead=None, trained=1, **more)[1]
        for more in ({}, {"work_s": 0.0})
    )
    assert solved.trained > unsolved.trained == 100


def test_an_order_that_recomputes_too_much_at_few_samples_is_known_where_it_reaches():
    """SegNet's fit on PyTorch began with 38 samples, where its search had found 80."""

    class CheapForwardOps(Scaling):
        def at(self, size):
            problem = chain_problem(size)
            times = (1.0,) * 8 + (size / 50,) * 8
            return replace(problem, profile=replace(problem.profile, op_time_s=times))

    limit, scaling = store_all_peak(60), CheapForwardOps()
    order = quick_plan(chain_problem(90), limit).solution.schedule
    assert not is_allowed(scaling.at(5), simulate(scaling.at(5), order).time_s, 0.2)
    chooser = chooser_of(90, orders=[order], trained=4, max_overhead=0.2, work_s=0.0)
    _, (size, _) = chooser.choose(scaling, Limit(limit))
    assert size >= 90


def test_the_order_that_ran_last_is_known_even_where_it_was_made_anew():
    """There is time to run a size, and none to solve for one."""
    chooser = chooser_of(
        100, max_overhead=None, solve_s=1000.0, deadline_s=time.perf_counter() + 100.0
    )
    chooser, (size, _) = chooser.choose(Scaling(), Limit(LIMIT))
    made_anew = quick_plan(chain_problem(size), LIMIT // 2)
    chooser = chooser.after_trial(size, made_anew, made_anew.predicted.peak_bytes, fits=True)
    chooser, (larger, plan) = chooser.choose(Scaling(), Limit(LIMIT))
    assert larger >= 1.5 * size
    assert plan.solution.schedule == made_anew.solution.schedule


def test_after_out_of_memory_an_order_is_not_taken_that_fills_the_same_bytes():
    """Sizes that shrink alone would be trained by faster and faster orders, each as large."""
    has_bytes = 0.85 * LIMIT
    orders = [
        quick_plan(chain_problem(size), LIMIT).solution.schedule for size in range(100, 151, 2)
    ]
    chooser = chooser_of(150, orders=orders, max_overhead=None)

    def train(size, plan):
        peak = plan.predicted.peak_bytes
        return (peak, True) if peak <= has_bytes else (0, False)

    chooser = run_out(chooser, train)
    fits = [
        size
        for size in range(1, 150)
        if simulate(chain_problem(size), orders[-1]).peak_bytes <= has_bytes
    ]
    assert chooser.trained >= 0.9 * max(fits)
