"""What a search found is trained, and where the device disagrees with the prediction, the device
wins."""

import time
from dataclasses import replace

import pytest
from fake_backend import (
    SAMPLE_BYTES,
    FakeBackend,
    batch_of,
    chain_graph,
    chain_problem,
    quick_plan,
    scaling_of,
    store_all_peak,
)

from keras_remat.batch_size.search import search_batch_size
from keras_remat.batch_size.size_chooser import MOST_SIZES, SizeChooser
from keras_remat.batch_size.sizes import RESOLUTION
from keras_remat.batch_size.trials import SizeRunner, verified_search
from keras_remat.core.limit import Limit
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule, Usage
from keras_remat.core.simulate import simulate
from keras_remat.errors import UnsupportedModelError

BUDGET = store_all_peak(400)


def verified(surplus, *, max_overhead="forward", limit=BUDGET, graph_of=None, **options):
    """The verified search where a step of ``size`` samples takes ``surplus(size)`` bytes more than
    its schedule (``None``: out of memory)."""
    backend, scaling, trained = FakeBackend(), scaling_of(), []
    graph_of = graph_of or (lambda size: scaling.at(size).graph)
    limit = Limit(limit).reserving(limit - BUDGET)
    search = search_batch_size(
        scaling, 40, limit, backend, time_limit_s=20.0, max_overhead=max_overhead
    )

    def train(size, plan):
        assert plan.problem.graph == graph_of(size)
        more, usage = surplus(size), simulate(plan.problem, plan.solution.schedule)
        peak = None if more is None else usage.peak_bytes + more
        trained.append((size, peak))
        return None if peak is None else Usage(1.0, peak)

    chooser = SizeChooser.after(
        backend, search, solver="greedy", solve_s=2.0, max_overhead=max_overhead, **options
    )
    found = verified_search(search, scaling, chooser, limit, train, graph_of)
    return search, found, trained


def test_prediction_that_holds_is_kept():
    search, found, trained = verified(lambda size: 0)
    assert found.max_batch_size >= search.max_batch_size
    assert trained[0][0] == search.max_batch_size
    assert found.plan.measured is not None
    assert found.plan.measured.peak_bytes <= BUDGET == found.plan.budget_bytes
    assert not found.ended_by_clock


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5])
def test_what_was_measured_above_the_prediction_is_taken_off(share):
    search, found, trained = verified(lambda size: int(share * BUDGET))
    assert found.max_batch_size < search.max_batch_size
    assert dict(trained)[found.max_batch_size] <= BUDGET
    assert found.plan.measured.peak_bytes == dict(trained)[found.max_batch_size]
    failed = min((size, peak) for size, peak in trained if peak > BUDGET)
    assert (found.failed_batch_size, found.failed_peak_bytes) == failed
    assert len(trained) <= MOST_SIZES


def test_plans_keep_the_margin_free_and_a_measured_peak_may_take_it():
    """As inside ``fit``."""
    more = int(0.04 * BUDGET)
    search, found, trained = verified(lambda size: more, limit=int(1.05 * BUDGET))
    assert found.max_batch_size >= search.max_batch_size
    assert trained[0][0] == search.max_batch_size
    assert BUDGET < found.plan.measured.peak_bytes <= 1.05 * BUDGET
    assert found.plan.predicted.peak_bytes <= BUDGET


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
    assert (found.max_batch_size, found.plan) == (search.max_batch_size, search.plan)
    assert found.plan.measured is None
    assert found.none_trained
    assert "No batch that ran kept to" in str(found)
    assert "by prediction" in str(found)
    assert len(trained) <= MOST_SIZES
    sizes = [size for size, _ in trained]
    assert sizes == sorted(set(sizes), reverse=True)


@pytest.mark.parametrize("bound", [0.0, "forward"])
def test_every_size_keeps_to_the_overhead(bound):
    _, found, _ = verified(lambda size: -int(0.1 * BUDGET), max_overhead=bound)
    assert found.plan.overhead <= (0.5 if bound == "forward" else bound)


def test_late_verification_ends_with_the_first_size_that_trains():
    """Nothing is left of the time: sizes run until one has trained, and none above it."""
    _, found, trained = verified(
        lambda size: 0 if size <= 300 else None, deadline_s=time.perf_counter() - 1
    )
    assert found.max_batch_size <= 300
    assert [peak is not None for _, peak in trained] == [False] * (len(trained) - 1) + [True]
    assert found.ended_by_clock


def test_sizes_that_the_model_does_not_take_are_passed_by():
    def graph_of(size):
        if size % 4:
            raise UnsupportedModelError(f"no batch of {size}")
        return chain_graph(size)

    _, found, _ = verified(lambda size: 0, graph_of=graph_of)
    assert found.max_batch_size % 4 == 0
    assert found.plan.measured is not None


def test_size_whose_graph_has_other_ops_is_planned_anew():
    """At even sizes the framework folds a layer away; orders of the others are not legal there."""

    def graph_of(size):
        return chain_graph(size, 7 if size % 2 == 0 else 8)

    _, found, trained = verified(lambda size: 0, graph_of=graph_of)
    assert any(size % 2 == 0 for size, _ in trained)
    assert found.max_batch_size in dict(trained)
    assert found.plan.measured.peak_bytes <= BUDGET


def test_size_whose_own_graph_fits_under_no_schedule_says_so():
    def graph_of(size):
        return chain_graph(size, 8) if size <= 300 else chain_graph(20 * size, 7)

    _, found, _ = verified(lambda size: 0, graph_of=graph_of)
    assert found.max_batch_size <= 300 < found.failed_batch_size
    assert any("14 ops at this size, 16 at others" in probe.reason for probe in found.probes)


@pytest.mark.parametrize("in_order", [True, False])
def test_variables_lie_close_together_before_a_size_runs_in_order(monkeypatch, in_order):
    """The step before may have left them anywhere in the pool, where they are in the way."""
    happened = []

    class Noting(FakeBackend):
        def snapshot(self, model):
            return lambda: happened.append("put back")

        def measure(self, run, *, wait=True):
            happened.append("step")
            return super().measure(run, wait=wait)

    backend = Noting()
    backend.memory.order_matters, backend.measures_op_times = in_order, False
    monkeypatch.setattr("keras_remat.batch_size.trials.repeated_batch", lambda batch, size: batch)
    batch = batch_of(0, 40)
    traced = backend.trace(None, batch)
    problem = Problem(traced.graph, backend.estimated_profile(traced))
    plan = quick_plan(problem, BUDGET, backend)
    runner = SizeRunner(backend, None, batch, scaling_of())
    runner._traced = 40, traced
    assert runner(40, plan) is not None
    assert happened == ["put back"] * in_order + ["step", "step", "put back"]


class Switching(FakeBackend):
    """From 100 samples on, every kernel takes as much for itself as its output has."""

    def __init__(self, **options):
        super().__init__(surplus_bytes=lambda what, size: self.scratch(size), **options)

    @staticmethod
    def scratch(size):
        return SAMPLE_BYTES * size if size >= 100 else 0

    def _stop_recording(self, lowered, resident_bytes):
        profile = super()._stop_recording(lowered, resident_bytes)
        count = len(lowered.problem.graph.ops)
        size = lowered.problem.graph.values[0].nbytes // SAMPLE_BYTES
        return profile and replace(profile, op_workspace_bytes=(self.scratch(size),) * count)


@pytest.mark.parametrize(
    ("device", "profiler", "sizes", "counts"),
    [
        ("GPU:0", "free", {40, 120}, (2, 3)),
        ("GPU:0", "busy", {40}, (2, 2)),
        ("CPU:0", "free", {40, 120}, (1, 2)),
        ("CPU:0", "busy", {40}, (1, 2)),
    ],
)
def test_a_size_whose_kernels_are_others_is_recorded(monkeypatch, device, profiler, sizes, counts):
    """Where the user's own profiler runs, what was measured above the prediction has to do. A step
    may take seconds: none runs whose numbers are known."""
    monkeypatch.setattr(
        "keras_remat.batch_size.trials.repeated_batch", lambda batch, size: batch_of(0, size)
    )
    backend, scaling = Switching(profiler=profiler, device_name=device), scaling_of()
    scaling.learn(40, chain_problem(40, source="measured"))
    runner = SizeRunner(backend, None, batch_of(0, 40), scaling)
    steps, measure = [], backend.measure
    monkeypatch.setattr(backend, "measure", lambda run: steps.append(size) or measure(run))
    for size in (60, 120):
        plan = quick_plan(chain_problem(size), store_all_peak(size), backend)
        assert runner(size, plan).peak_bytes == store_all_peak(size) + backend.scratch(size)
    assert steps == [60] * counts[0] + [120] * counts[1]
    assert set(scaling.fit.sizes if scaling.fit else {40}) == sizes
    problem = scaling.at(120)
    predicted = backend.memory.peak_bytes(problem, Schedule.store_all(problem.graph))
    assert predicted == store_all_peak(120) + backend.scratch(120)
    assert not backend.recording
