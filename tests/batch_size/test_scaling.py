"""One train step at any batch size: exact bytes from two traces, costs fitted or in proportion."""

from dataclasses import replace

import pytest
from fake_backend import (
    RESIDENT_BYTES,
    FakeBackend,
    batch_of,
    chain_graph,
    chain_problem,
    scaling_of,
)

from keras_remat.backends.base import TracedStep
from keras_remat.batch_size.graph_scaling import GraphScaling
from keras_remat.batch_size.scaling import BatchScaling, batch_scaling
from keras_remat.core.graph import Graph, Op, Value
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.errors import UnsupportedModelError


@pytest.mark.parametrize("size", [1, 3, 4, 6, 8, 13, 4096])
def test_chain_at_another_size_is_the_chain_traced_there(size):
    problem = scaling_of().at(size)
    assert problem.graph == chain_graph(size)
    assert problem.profile.op_time_s == pytest.approx([size / 4] * 16)
    assert problem.profile.resident_bytes == RESIDENT_BYTES


def rounded(nbytes):
    return -(-nbytes // 256) * 256


def affine(batch):
    """Bytes rounded up to 256: a weight, the batch, a value with one row more than the batch, and
    one of unknown shape."""
    values = (
        Value(0, "w", 256, (), "float32"),
        Value(1, "x", rounded(batch * 20), (batch, 5), "float32"),
        Value(2, "padded", rounded((batch + 1) * 40), (batch + 1, 5), "float64", 0),
        Value(3, "unknown", 512 + 256 * batch, None, None, 1),
        Value(4, "flags", rounded(batch * 100), (batch, 100), "bool", 1),
    )
    ops = (Op(0, "a", "a", (0, 1), (2,)), Op(1, "b", "b", (2,), (3, 4)))
    return Graph(ops, values, (3,))


@pytest.mark.parametrize("size", [1, 4, 5, 6, 100])
def test_a_slice_that_a_small_batch_leaves_empty_has_no_bytes(size):
    def tail(batch):
        rows = max(0, batch - 5)
        values = (
            Value(0, "x", batch * 8, (batch, 2), "float32"),
            Value(1, "x[5:]", rows * 8, (rows, 2), "float32", 0),
        )
        return Graph((Op(0, "slice", "slice", (0,), (1,)),), values, (1,))

    problem = Problem(tail(16), Profile((1.0,), (0,), 128))
    assert BatchScaling(problem, 16, tail(32), 32).at(size).graph == tail(size)


def looped(batch):
    """A loop keeps a list of arrays, which count from 100 samples on."""
    kept = 1000 * batch if batch >= 100 else 0
    values = (
        Value(0, "x", batch * 8, (batch, 2), "float32"),
        Value(1, "list", kept, (), "variant", 0),
        Value(2, "y", batch * 8, (batch, 2), "float32", 1),
    )
    ops = (Op(0, "loop", "loop", (0,), (1,)), Op(1, "back", "loop", (0, 1), (2,)))
    return Graph(ops, values, (2,))


def test_what_a_loop_keeps_in_small_arrays_is_learnt_from_a_larger_trace():
    profile = Profile((1.0, 1.0), (0, 40), 128)
    scaling = BatchScaling(Problem(looped(4), profile), 4, looped(8), 8)
    assert scaling.may_need_more
    assert scaling.at(400).graph.values[1].nbytes == 0
    assert scaling.learn_trace(400, looped(400), (2000, 8000))
    at = scaling.at(400)
    assert at.graph == looped(400)
    assert at.profile.op_workspace_bytes == (2000, 4000), "one that was known stays"
    at = scaling.at(200)
    assert at.graph.values[1].nbytes == pytest.approx(200_000, rel=0.02)
    assert at.profile.op_workspace_bytes[0] == 1000
    assert not scaling.learn_trace(400, looped(400), (2000, 4000)), "it is known"
    assert not scaling.learn_trace(50, looped(50), (0, 500)), "fewer bytes are no reason"
    assert scaling.at(400).graph == looped(400)
    measured = Problem(looped(400), Profile((1.0, 1.0), (500, 4000), 128, "measured"))
    scaling.learn(400, measured)
    assert scaling.at(200).profile.op_workspace_bytes[0] == 250, "measured bytes replace expected"


@pytest.mark.parametrize("size", [1, 2, 5, 7, 11, 1000])
def test_constants_stay_affine_sizes_follow_and_inputs_are_resident(size):
    problem = Problem(affine(3), Profile((1.0, 1.0), (1000, 0), 5000, "measured", "D"))
    at = BatchScaling(problem, 3, affine(7), 7).at(size)
    assert at.graph == affine(size)
    assert at.profile.resident_bytes == 5000 + rounded(size * 20) - 256
    assert (at.profile.source, at.profile.device) == ("measured", "D")
    ratio = (256 + rounded(size * 20) + rounded((size + 1) * 40)) / 768
    assert at.profile.op_time_s[0] == pytest.approx(ratio)
    assert at.profile.op_workspace_bytes == (round(1000 * ratio), 0)


@pytest.mark.parametrize("change", ["fewer ops", "other kind", "other edge"])
def test_graphs_that_differ_are_refused(change):
    large = chain_graph(8)
    if change == "fewer ops":
        large = chain_graph(8, layers=7)
    elif change == "other kind":
        large = Graph(
            (replace(large.ops[0], kind="other"), *large.ops[1:]), large.values, large.outputs
        )
    else:
        large = Graph(
            (*large.ops[:2], replace(large.ops[2], inputs=(0,)), *large.ops[3:]),
            large.values,
            large.outputs,
        )
    with pytest.raises(UnsupportedModelError, match=r"batch 4 and .* batch 8"):
        BatchScaling(chain_problem(4), 4, large, 8)


def test_scaling_traces_once_at_twice_the_batch():
    backend = FakeBackend()
    scaling = batch_scaling(backend, None, chain_problem(5), batch_of(0, 5))
    assert backend.traced == [10]
    assert scaling.at(7).graph == chain_graph(7)


def test_a_second_measured_size_gives_fitted_costs_and_residuals():
    problem = chain_problem(8, source="measured")
    half = Profile((0.75,) * 16, (0,) * 16, RESIDENT_BYTES)
    scaling = BatchScaling(problem, 8, chain_graph(4), 4, {4: half})
    assert scaling.at(16).graph == chain_graph(16)
    assert scaling.at(16).profile.op_time_s == pytest.approx([1.5] * 16)
    assert scaling.fit.residual == pytest.approx(0)


def test_what_a_size_measured_later_is_learnt():
    """A size that was measured stands for an estimate; two are fitted; other ops tell nothing."""
    scaling = BatchScaling(chain_problem(8), 8, chain_graph(4), 4)

    def learn(size, time_s, source="measured", layers=8):
        problem = chain_problem(size, layers=layers, source=source)
        times = (time_s,) * len(problem.graph.ops)
        scaling.learn(size, replace(problem, profile=replace(problem.profile, op_time_s=times)))
        return scaling.at(16).profile

    assert learn(4, 9.0, source="estimated").op_time_s == pytest.approx([2.0] * 16)
    assert learn(4, 9.0, layers=7).op_time_s == pytest.approx([2.0] * 16)
    assert learn(4, 0.75).source == "measured"
    assert scaling.fit is None
    assert scaling.at(16).profile.op_time_s == pytest.approx([3.0] * 16)
    assert learn(8, 1.0).op_time_s == pytest.approx([1.5] * 16)
    assert scaling.fit.sizes == (4, 8)


@pytest.mark.parametrize("source", ["measured", "estimated"])
def test_one_measured_size_or_an_estimate_stays_in_proportion(source):
    estimated = replace(chain_problem(4).profile, source="estimated")
    measured = {4: estimated} if source == "measured" else None
    scaling = BatchScaling(chain_problem(8, source=source), 8, chain_graph(4), 4, measured)
    assert scaling.fit is None
    assert scaling.at(16).profile.op_time_s == pytest.approx([2.0] * 16)


@pytest.mark.parametrize("size", [1, 4, 8, 80])
def test_workspace_that_is_the_same_at_every_size_stays(size):
    """Of 100 bytes 60 follow the batch, and of 50 none do."""
    graph, other = affine(8), affine(16)
    problem = Problem(graph, Profile((1.0, 1.0), (100, 50), 0))
    scaling = BatchScaling(problem, 8, other, 16, fixed_bytes=(40, 70))
    assert scaling.fixed_workspace_bytes == (40, 50)
    first, second = scaling.at(size).profile.op_workspace_bytes
    assert second == 50
    following = Problem(graph, Profile((1.0, 1.0), (60, 0), 0))
    alone, _ = BatchScaling(following, 8, other, 16).at(size).profile.op_workspace_bytes
    assert first == pytest.approx(40 + alone, abs=1)
    half = Profile((0.5, 0.5), (70, 50), 0)
    fitted = BatchScaling(problem, 8, other, 16, {4: half})
    assert fitted.fixed_workspace_bytes == (40, 50)


def test_sizes_with_the_same_ops_are_looked_for_above():
    """The given batch has other ops than larger ones; its costs are carried over to theirs."""
    backend = FakeBackend(folds=lambda size: size < 8)
    scaling = batch_scaling(backend, None, chain_problem(5, layers=7), batch_of(0, 5))
    assert backend.traced == [10, 20]
    assert scaling.at(40).graph == chain_graph(40)
    assert scaling.at(40).profile.op_time_s[:7] == pytest.approx([8.0] * 7)


def test_ops_that_differ_at_every_size_are_refused():
    backend = FakeBackend()
    backend.trace = lambda model, batch: TracedStep(chain_graph(len(batch[0]), len(batch[0])), {})
    with pytest.raises(UnsupportedModelError, match=r"batch 4 and .* batch 8"):
        batch_scaling(backend, None, chain_problem(4, layers=4), batch_of(0, 4))


# ------------------------------------------------------------------ on TensorFlow


@pytest.mark.parametrize("name", ["convnet", "transformer"])
def test_traced_at_two_sizes_tells_the_graph_traced_at_a_third(models, name):
    from keras_remat.backends.tensorflow import backend as tensorflow_backend

    backend = tensorflow_backend()
    model, batch = models.MODELS[name](optimizer="sgd")
    arrays = backend.example_batch(model, batch)
    graphs = {
        size: backend.trace(model, backend.resized_spec(arrays, size)).graph for size in (8, 16, 11)
    }
    profile = Profile((1.0,) * len(graphs[8].ops), (0,) * len(graphs[8].ops), 2**20)
    scaling = BatchScaling(Problem(graphs[8], profile), 8, graphs[16], 16)
    for size in (16, 11):
        predicted = scaling.at(size).graph
        assert [v.nbytes for v in predicted.values] == [v.nbytes for v in graphs[size].values]
        assert [v.shape for v in predicted.values] == [v.shape for v in graphs[size].values]
        assert predicted.fingerprint == graphs[size].fingerprint


# ------------------------------------------------------------------ several sizes


def texts(batch, length):
    """Rows of a batch of texts, its attention scores, and one row less than a text is long."""
    values = (
        Value(0, "w", 400, (10, 10), "float32"),
        Value(1, "rows", 4 * batch * length * 10, (batch * length, 10), "float32", 0),
        Value(2, "scores", 4 * batch * length**2, (batch, length, length), "float32", 1),
        Value(3, "shifted", 8 * batch * (length - 1), (batch, length - 1), "int64", 1),
    )
    return Graph((Op(0, "a", "a", (0,), (1,)), Op(1, "b", "b", (1,), (2, 3))), values, (2, 3))


def test_three_traces_tell_every_batch_and_length():
    scaling = GraphScaling(texts(16, 512), (16, 512, 16))
    assert scaling.at((16, 512, 16)) == texts(16, 512)
    assert scaling.at((16, 100, 16)) is None
    scaling.learn(texts(16, 384), (16, 384, 16))
    assert scaling.at((16, 100, 16)) == texts(16, 100)
    assert scaling.at((7, 100, 7)) is None
    scaling.learn(texts(7, 300), (7, 300, 7))
    for batch, length in ((16, 32), (1, 512), (7, 299), (40, 1000)):
        assert scaling.at((batch, length, batch)) == texts(batch, length)
    assert scaling.at((7, 299, 6)) is None


def test_a_trace_in_which_two_sizes_vary_first_tells_nothing():
    scaling = GraphScaling(texts(16, 512), (16, 512, 16))
    scaling.learn(texts(8, 256), (8, 256, 8))
    assert scaling.at((8, 256, 8)) is None


def test_a_trace_that_is_not_what_was_said_ends_it():
    scaling = GraphScaling(texts(16, 512), (16, 512))
    scaling.learn(texts(16, 384), (16, 384))
    scaling.learn(texts(16, 200), (16, 201))
    assert not scaling.is_exact
    assert scaling.at((16, 300)) is None
