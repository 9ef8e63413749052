"""The batch search: exact scaling, and the largest batch for which a schedule fits."""

import math
from dataclasses import replace

import pytest
from fake_backend import RESIDENT_BYTES, SAMPLE_BYTES, FakeBackend, batch_of, chain_graph, chain_problem, store_all_peak

from keras_remat.autotune import (
    BatchScaling,
    batch_scaling,
    forward_overhead,
    search_batch_size,
)
from keras_remat.errors import InfeasibleBudgetError, RematError, ScheduleNotFoundError, UnsupportedModelError
from keras_remat.graph import Graph, Op, Value
from keras_remat.max_batch import find_max_batch_size
from keras_remat.planning import plan_problem
from keras_remat.problem import Problem
from keras_remat.profile import Profile
from keras_remat.simulate import simulate

# ------------------------------------------------------------------ scaling


def scaling_of(small=4, large=8, layers=8):
    return BatchScaling(chain_graph(small, layers), small, chain_graph(large, layers), large, chain_problem(small, layers))


@pytest.mark.parametrize("size", [1, 3, 4, 6, 8, 13, 4096])
def test_chain_at_another_size_is_the_chain_traced_there(size):
    problem = scaling_of().at(size)
    assert problem.graph == chain_graph(size)
    assert problem.profile.op_time_s == pytest.approx([size / 4] * 16)
    assert problem.profile.resident_bytes == RESIDENT_BYTES


def rounded(nbytes):
    return -(-nbytes // 256) * 256


def affine(batch):
    """Bytes rounded up to 256: a weight, the batch, a value with one row more than the batch, and one of unknown shape."""
    values = (
        Value(0, "w", 256, (), "float32"),
        Value(1, "x", rounded(batch * 20), (batch, 5), "float32"),
        Value(2, "padded", rounded((batch + 1) * 40), (batch + 1, 5), "float64", 0),
        Value(3, "unknown", 512 + 256 * batch, None, None, 1),
        Value(4, "flags", rounded(batch * 100), (batch, 100), "bool", 1),
    )
    ops = (Op(0, "a", "a", (0, 1), (2,)), Op(1, "b", "b", (2,), (3, 4)))
    return Graph(ops, values, (3,))


@pytest.mark.parametrize("size", [1, 2, 5, 7, 11, 1000])
def test_constants_stay_affine_sizes_follow_and_inputs_are_resident(size):
    problem = Problem(affine(3), Profile((1.0, 1.0), (1000, 0), 5000, "measured", "D"))
    at = BatchScaling(affine(3), 3, affine(7), 7, problem).at(size)
    assert at.graph == affine(size)
    assert at.profile.resident_bytes == 5000 + rounded(size * 20) - 256
    assert (at.profile.source, at.profile.device) == ("measured", "D")
    ratio = (256 + rounded(size * 20) + rounded((size + 1) * 40)) / 768
    assert at.profile.op_time_s[0] == pytest.approx(ratio)
    assert at.profile.op_workspace_bytes == (round(1000 * ratio), 0)


@pytest.mark.parametrize("change", ["fewer ops", "other kind", "other edge"])
def test_graphs_that_differ_are_refused(change):
    small, large = chain_graph(4), chain_graph(8)
    if change == "fewer ops":
        large = chain_graph(8, layers=7)
    elif change == "other kind":
        large = Graph((replace(large.ops[0], kind="other"), *large.ops[1:]), large.values, large.outputs)
    else:
        large = Graph((*large.ops[:2], replace(large.ops[2], inputs=(0,)), *large.ops[3:]), large.values, large.outputs)
    with pytest.raises(UnsupportedModelError, match=r"batch 4 and .* batch 8"):
        BatchScaling(small, 4, large, 8, chain_problem(4))


def test_scaling_traces_once_at_twice_the_batch():
    backend, problem = FakeBackend(), chain_problem(5)
    traced = backend.trace(None, batch_of(0, 5))
    scaling = batch_scaling(backend, None, traced, problem, batch_of(0, 5))
    assert backend.traced == [5, 10]
    assert scaling.at(7).graph == chain_graph(7)


# ------------------------------------------------------------------ the search


def search(budget, *, start=4, backend=None, **options):
    return search_batch_size(scaling_of(), start, budget, budget, backend or FakeBackend(), **{"time_limit_s": 30.0, **options})


def fits(size, budget, backend=None, bound=math.inf):
    """Whether a schedule is found for a batch, by itself."""
    try:
        plan = plan_problem(chain_problem(size), budget, backend or FakeBackend(), solver="greedy", time_limit_s=5.0)
    except (InfeasibleBudgetError, ScheduleNotFoundError):
        return False
    return plan.overhead <= bound


@pytest.mark.parametrize("start", [1, 4, 37, 400])
def test_largest_batch_is_found_from_anywhere(start):
    budget = store_all_peak(40)
    found = search(budget, start=start, max_overhead=None)
    assert found.plain_batch_size == 40
    assert fits(found.max_batch_size, budget)
    assert not fits(found.max_batch_size + max(1, found.max_batch_size // 100), budget)
    assert found.max_batch_size > 60
    assert found.plan.predicted.peak_bytes <= budget
    sizes = [p.batch_size for p in found.probes]
    assert sizes[0] == start
    assert len(set(sizes)) == len(sizes)
    assert all((p.reason == "") == (p.plan is not None) for p in found.probes)


def test_plan_of_the_search_is_for_the_found_size():
    found = search(store_all_peak(40))
    found.plan.check(chain_problem(found.max_batch_size))
    usage = simulate(chain_problem(found.max_batch_size), found.plan.solution.schedule)
    assert usage.peak_bytes == found.plan.predicted.peak_bytes
    assert str(found.max_batch_size) in str(found)


def test_everything_that_was_probed_is_told():
    told = []
    found = search(store_all_peak(40), progress=told.append)
    assert tuple(told) == found.probes
    best = max(found.probes, key=lambda p: p.samples_per_s)
    assert found.fastest_batch_size == best.batch_size


@pytest.mark.parametrize("at_most", [1, 3, 4, 30, 50])
def test_no_size_above_at_most_is_tried(at_most):
    found = search(store_all_peak(64), at_most=at_most)
    assert found.max_batch_size == at_most
    assert max(p.batch_size for p in found.probes) == at_most


def test_overhead_bound_holds_and_costs_batch_size():
    budget = store_all_peak(40)
    plain, forward, free = (search(budget, max_overhead=bound) for bound in (0, "forward", None))
    assert plain.max_batch_size == 40
    assert plain.plan.overhead == 0.0
    assert forward_overhead(chain_problem(4)) == 0.5
    assert forward.plan.overhead <= 0.5
    assert 40 < forward.max_batch_size <= free.max_batch_size
    refused = [p for p in plain.probes if p.plan is None]
    assert refused
    assert any("over the bound" in p.reason for p in refused)


def test_feasibility_that_is_not_monotone_never_ends_on_a_batch_that_does_not_fit():
    """The allocator wastes much at sizes that are no multiple of 4, so large ones fit where smaller ones do not."""
    budget = store_all_peak(40)

    def waste(problem, schedule):
        size = problem.graph.values[0].shape[0]
        return 0 if size % 4 == 0 else 6 * size * SAMPLE_BYTES

    backend = FakeBackend(allocator_bytes=waste)
    found = search(budget, backend=backend, max_overhead=None)
    assert fits(found.max_batch_size, budget, backend)
    assert found.max_batch_size >= 40
    assert backend.predicted_peak_bytes(chain_problem(found.max_batch_size), found.plan.solution.schedule) <= budget


def test_order_that_is_known_is_used_where_the_solver_fails(monkeypatch):
    """The solver works twice and then never again; the orders it found still carry smaller and slightly larger batches."""
    import keras_remat.autotune as module

    real, calls = module.plan_problem, []

    def plan_problem(problem, budget, backend, **options):
        calls.append(problem.graph.values[0].shape[0])
        if len(calls) > 2:
            raise ScheduleNotFoundError(budget, problem.floor_bytes)
        return real(problem, budget, backend, **options)

    monkeypatch.setattr(module, "plan_problem", plan_problem)
    found = search(store_all_peak(40), start=50, max_overhead=None)
    assert found.max_batch_size >= 50
    assert any(p.plan is not None and p.plan.solution.solver == "reused" for p in found.probes)
    assert len(calls) > 2


@pytest.mark.parametrize("start", [1, 16])
def test_not_even_one_sample_fits(start):
    budget = chain_problem(1).floor_bytes - 1
    with pytest.raises(InfeasibleBudgetError) as caught:
        search(budget, start=start)
    assert caught.value.floor_bytes == budget + 1


def test_one_sample_over_the_overhead_bound_is_not_found():
    budget = int(store_all_peak(1) * 0.8)
    assert fits(1, budget)
    with pytest.raises(RematError):
        search(budget, start=1, max_overhead=0)


def test_time_limit_ends_the_search_with_what_is_known():
    found = search(store_all_peak(40), start=40, time_limit_s=1e-9)
    assert found.max_batch_size == 40
    assert len(found.probes) <= 3


# ------------------------------------------------------------------ on TensorFlow


@pytest.fixture(scope="module")
def models():
    """Small Keras models; skips where Keras does not run on TensorFlow."""
    pytest.importorskip("tensorflow")
    import keras

    if keras.backend.backend() != "tensorflow":
        pytest.skip("needs Keras on TensorFlow")
    import keras_models

    return keras_models


@pytest.mark.parametrize("name", ["convnet", "transformer"])
def test_traced_at_two_sizes_tells_the_graph_traced_at_a_third(models, name):
    from keras_remat.backends.tensorflow import backend as tensorflow_backend

    backend = tensorflow_backend()
    model, batch = models.MODELS[name]()
    arrays = backend.example_batch(model, batch)
    graphs = {size: backend.trace(model, backend.resized_spec(arrays, size)).graph for size in (8, 16, 11, 32)}
    profile = Profile((1.0,) * len(graphs[8].ops), (0,) * len(graphs[8].ops), 2**20)
    scaling = BatchScaling(graphs[8], 8, graphs[16], 16, Problem(graphs[8], profile))
    for size in (16, 11, 32):
        predicted = scaling.at(size).graph
        assert [v.nbytes for v in predicted.values] == [v.nbytes for v in graphs[size].values]
        assert [v.shape for v in predicted.values] == [v.shape for v in graphs[size].values]
        assert predicted.fingerprint == graphs[size].fingerprint


@pytest.mark.parametrize("profile", ["measured", "estimated"])
def test_search_leaves_the_model_as_it_was_and_keeps_to_the_budget(models, profile):
    from keras_remat.backends.tensorflow import backend as tensorflow_backend

    model, batch = models.mlp(256, width=256, blocks=2)
    tensorflow_backend().example_batch(model, batch)  # builds the optimizer
    before = models.state_of(model)
    limit = tensorflow_backend().bytes_in_use() + 24 * 2**20
    found = find_max_batch_size(model, batch, limit, profile=profile, time_limit_s=5.0)
    models.assert_same_bits(models.state_of(model), before)
    assert found.limit_bytes == limit
    usage = found.plan.predicted if profile == "estimated" else found.plan.measured
    assert usage.peak_bytes <= found.plan.budget_bytes == int(limit * 0.95)
    assert found.plan.profile_source == profile
    assert found.max_batch_size >= found.plain_batch_size > 256


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"memory_limit": "8Gb"}, ValueError, "GiB"),
        ({"memory_limit": -1}, ValueError, "positive"),
        ({"profile": "guessed"}, ValueError, "estimated"),
        ({"max_overhead": -0.5}, ValueError, "max_overhead"),
        ({"max_overhead": float("nan")}, ValueError, "max_overhead"),
        ({"max_overhead": "backward"}, ValueError, "max_overhead"),
        ({"margin": 1.0}, ValueError, "margin"),
        ({"batch": 0}, ValueError, "positive"),
        ({"batch": True}, TypeError, "batch"),
        ({"time_limit_s": 0}, ValueError, "time_limit_s"),
    ],
)
def test_wrong_arguments_say_what_is_accepted(models, arguments, error, says):
    model, batch = models.mlp(4, width=4, blocks=1)
    with pytest.raises(error, match=says):
        find_max_batch_size(model, **{"batch": batch, "memory_limit": "8GiB", "profile": "estimated", **arguments})
