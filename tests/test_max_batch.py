"""What the search found is trained, and where the device disagrees with the prediction, the device wins."""

import pytest
from fake_backend import FakeBackend, chain_graph, chain_problem, store_all_peak

from keras_remat.autotune import BatchScaling, search_batch_size
from keras_remat.max_batch import MOST_SIZES, RESOLUTION, verified_search
from keras_remat.schedule import Usage
from keras_remat.simulate import simulate

BUDGET = store_all_peak(400)


def scaling_of():
    return BatchScaling(chain_graph(4), 4, chain_graph(8), 8, chain_problem(4))


def verified(surplus, *, at_most=None, max_overhead="forward", budget=BUDGET):
    """The verified search where a step of ``size`` samples takes ``surplus(size)`` bytes more than its schedule (``None``: out of memory)."""
    backend, scaling, trained = FakeBackend(), scaling_of(), []
    search = search_batch_size(
        scaling, 40, budget, budget, backend, time_limit_s=20.0, max_overhead=max_overhead, at_most=at_most
    )

    def train(size, plan):
        more = surplus(size)
        peak = None if more is None else simulate(chain_problem(size), plan.solution.schedule).peak_bytes + more
        trained.append((size, peak))
        return None if peak is None else Usage(1.0, peak)

    found = verified_search(
        search, scaling, train, budget, backend, solver="greedy", solve_s=2.0, at_most=at_most, max_overhead=max_overhead
    )
    return search, found, trained


def test_prediction_that_holds_is_kept():
    search, found, trained = verified(lambda size: 0)
    assert found.max_batch_size >= search.max_batch_size
    assert trained[0][0] == search.max_batch_size
    assert found.plan.measured is not None
    assert found.plan.measured.peak_bytes <= BUDGET == found.plan.budget_bytes


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5])
def test_what_was_measured_above_the_prediction_is_taken_off(share):
    search, found, trained = verified(lambda size: int(share * BUDGET))
    assert found.max_batch_size < search.max_batch_size
    assert dict(trained)[found.max_batch_size] <= BUDGET
    assert found.plan.measured.peak_bytes == dict(trained)[found.max_batch_size]
    assert len(trained) <= MOST_SIZES


def test_what_was_measured_below_the_prediction_is_used():
    search, found, trained = verified(lambda size: -int(0.2 * BUDGET))
    assert found.max_batch_size > search.max_batch_size * (1 + RESOLUTION)
    assert dict(trained)[found.max_batch_size] <= BUDGET


def test_the_largest_that_trains_is_found_within_the_resolution():
    """Sizes above 300 run out of memory, whatever was predicted."""
    _, found, trained = verified(lambda size: 0 if size <= 300 else None)
    assert 300 / (1 + RESOLUTION) - 1 <= found.max_batch_size <= 300
    assert found.failed_batch_size == min(size for size, peak in trained if peak is None)
    assert found.failed_peak_bytes is None


def test_nothing_that_trains_leaves_the_search_as_it_was():
    search, found, trained = verified(lambda size: None)
    assert found == search
    assert len(trained) <= MOST_SIZES
    sizes = [size for size, _ in trained]
    assert sizes == sorted(set(sizes), reverse=True)


@pytest.mark.parametrize("bound", [0.0, "forward"])
def test_every_size_keeps_to_the_overhead(bound):
    _, found, _ = verified(lambda size: -int(0.1 * BUDGET), max_overhead=bound)
    assert found.plan.overhead <= (0.5 if bound == "forward" else bound)


def test_no_size_above_at_most_runs():
    _, found, trained = verified(lambda size: -int(0.3 * BUDGET), at_most=401)
    assert max(size for size, _ in trained) <= 401
    assert found.max_batch_size <= 401
