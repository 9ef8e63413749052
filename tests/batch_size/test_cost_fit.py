"""Costs per op at other batch sizes: fitted to measured ones, or in proportion to bytes."""

from dataclasses import replace

import numpy as np
import pytest
from fake_backend import chain_graph, chain_problem
from scipy.optimize import nnls

from keras_remat.batch_size.cost_fit import CostFit, transfer_costs
from keras_remat.core.graph import Graph, Op, Value
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile


def profile_of(times, workspaces=None):
    return Profile(times, workspaces or (0,) * len(times), 0)


def test_affine_costs_are_found_again_at_any_size():
    def at(size):
        return profile_of((0.5 + 0.25 * size, 3.0, 0.125 * size), (100 + 7 * size, 64, 0))

    fit = CostFit({8: at(8), 16: at(16)})
    assert fit.sizes == (8, 16)
    for size in (1, 12, 118):
        assert fit.op_time_s(size) == pytest.approx(at(size).op_time_s)
        assert fit.op_workspace_bytes(size) == at(size).op_workspace_bytes
    assert fit.residual == pytest.approx(0, abs=1e-12)


def test_workspace_that_only_the_largest_size_shows_is_in_proportion():
    """The first was too small to be seen at the smaller sizes; the second is there at none."""
    fit = CostFit(
        {
            4: profile_of((1.0, 1.0), (0, 0)),
            8: profile_of((1.0, 1.0), (0, 0)),
            16: profile_of((1.0, 1.0), (400, 0)),
        }
    )
    assert fit.op_workspace_bytes(4) == (100, 0)
    assert fit.op_workspace_bytes(160) == (4000, 0)


def test_workspace_of_kernels_that_change_with_the_batch_is_what_was_measured():
    """The first op's takes more from 16 samples on, the second's less; the third's is a straight
    line, and the fourth's grows faster than one through nothing."""
    measured = {1: (10, 90, 17, 1), 2: (20, 100, 24, 4), 16: (800, 40, 122, 160)}
    profiles = {size: profile_of((1.0,) * 4, workspaces) for size, workspaces in measured.items()}
    fit = CostFit(profiles)
    for size, workspaces in measured.items():
        assert fit.op_workspace_bytes(size) == workspaces
    assert fit.op_workspace_bytes(9) == (410, 70, 73, 82)
    assert fit.op_workspace_bytes(32) == (1600, 40, 234, 320)


def test_no_coefficient_is_negative_and_what_the_fit_misses_is_told():
    """The first op is faster at the larger size; the second grows faster than the batch; the third
    does as it should."""
    fit = CostFit({4: profile_of((2.0, 1.0, 1.0)), 8: profile_of((1.0, 4.0, 2.0))})
    assert all(seconds >= 0 for size in (0, 1, 100) for seconds in fit.op_time_s(size))
    assert fit.op_time_s(100)[0] == fit.op_time_s(1)[0]
    assert fit.op_time_s(0)[1] == 0
    assert fit.residual > 0.1


def test_equals_non_negative_least_squares_of_relative_errors():
    source = np.random.default_rng(0)
    for _ in range(50):
        sizes = sorted(
            source.choice(np.arange(1, 40), source.integers(2, 5), replace=False).tolist()
        )
        seconds = source.random((len(sizes), 6))
        fit = CostFit(
            {size: profile_of(tuple(row)) for size, row in zip(sizes, seconds, strict=True)}
        )
        weight = 1 / seconds.sum(axis=1)
        matrix = np.array([[1.0, size] for size in sizes]) * weight[:, None]
        for op in range(6):
            (fixed, per_sample), _ = nnls(matrix, seconds[:, op] * weight)
            assert fit.op_time_s(7)[op] == pytest.approx(fixed + 7 * per_sample, abs=1e-9)


def test_ops_that_take_no_time_have_no_residual():
    fit = CostFit({1: profile_of((0.0, 0.0)), 2: profile_of((0.0, 0.0))})
    assert fit.residual == 0.0
    assert fit.op_time_s(5) == (0.0, 0.0)


@pytest.mark.parametrize(
    "profiles", [{}, {4: profile_of((1.0,))}, {0: profile_of((1.0,)), 4: profile_of((1.0,))}]
)
def test_too_few_sizes_are_refused(profiles):
    with pytest.raises(ValueError, match="two sizes"):
        CostFit(profiles)


def test_profiles_of_other_ops_are_refused():
    with pytest.raises(ValueError, match="same ops"):
        CostFit({1: profile_of((1.0,)), 2: profile_of((1.0, 2.0))})


# ------------------------------------------------------------------ carried over


def test_same_ops_cost_the_same_per_byte():
    problem = chain_problem(4)
    carried = transfer_costs(problem, chain_graph(12))
    assert carried.graph == chain_graph(12)
    assert carried.profile.op_time_s == pytest.approx([3.0] * 16)
    assert carried.profile.resident_bytes == problem.profile.resident_bytes


def test_other_ops_cost_what_their_kind_does_per_byte():
    """The other trace has a first op that this one has folded away; names tell which ops are the
    same."""
    values = (Value(0, "x", 100), Value(1, "a", 100, producer=0), Value(2, "b", 200, producer=1))
    graph = Graph((Op(0, "a", "mul", (0,), (1,)), Op(1, "b", "add", (1,), (2,))), values, (2,))
    problem = Problem(graph, Profile((2.0, 6.0), (50, 30), 1000))
    values = tuple(
        Value(i, name, nbytes, producer=producer)
        for i, (name, nbytes, producer) in enumerate(
            [("x", 200, None), ("new", 200, 0), ("a", 200, 1), ("b", 400, 2)]
        )
    )
    ops = (
        Op(0, "new", "mul", (0,), (1,)),
        Op(1, "a", "mul", (1,), (2,)),
        Op(2, "b", "add", (2,), (3,)),
    )
    carried = transfer_costs(problem, Graph(ops, values, (3,)))
    assert carried.profile.op_time_s == pytest.approx((4.0, 4.0, 12.0))
    assert carried.profile.op_workspace_bytes == (0, 100, 60)
    assert carried.profile.resident_bytes == 1100
    other = replace(ops[0], kind="unheard of")
    carried = transfer_costs(problem, Graph((other, *ops[1:]), values, (3,)))
    assert carried.profile.op_time_s[0] == pytest.approx(8.0 / 500 * 400)
    carried = transfer_costs(problem, carried.graph, expected=(7, 8, 9))
    assert carried.profile.op_workspace_bytes == (7, 100, 60), "the others are known"


def test_ops_of_one_name_are_told_apart_by_their_order():
    """So are PyTorch's gradients, of which the other trace has one more of another kind."""
    problem, larger = chain_problem(4), chain_graph(8)
    ops = tuple(replace(op, name="backward", kind="same") for op in problem.graph.ops)
    workspaces = tuple(range(10, 10 + len(ops)))
    graph = Graph(ops, problem.graph.values, problem.graph.outputs)
    problem = Problem(graph, replace(problem.profile, op_workspace_bytes=workspaces))
    last = len(larger.values)
    more = Op(len(ops), "more", "other", larger.outputs[:1], (last,))
    value = Value(last, "more", 8, producer=more.id)
    ops = (*(replace(op, name="backward", kind="same") for op in larger.ops), more)
    carried = transfer_costs(problem, Graph(ops, (*larger.values, value), larger.outputs))
    assert carried.profile.op_workspace_bytes == (*(2 * n for n in workspaces), 0)
