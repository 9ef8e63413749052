"""Curves, bands, holders and groups say what the simulator says."""

import random

import pytest
from random_problems import mixed_problem
from random_schedules import random_schedule

from keras_remat.core.graph import Graph, Op, Value, chain_example
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import live_bytes, simulate
from keras_remat.reporting.curves import RESIDENT, REST, Curve, groups, intervals, top_holders

CHAIN = Problem(chain_example(), Profile((1.0, 2.0, 3.0, 4.0, 5.0), (0, 0, 2, 0, 0), 1))
RECOMPUTE_A = Schedule((0, 1, 2, 3, 0, 4))


@pytest.mark.parametrize("seed", range(40))
def test_holders_add_up_to_what_is_alive_at_every_position(seed):
    problem = mixed_problem(seed)
    schedule = random_schedule(random.Random(seed), problem.graph)
    curve = Curve(problem, schedule)
    assert curve.live == live_bytes(problem, schedule).tolist()
    assert curve.peak_bytes == simulate(problem, schedule).peak_bytes
    for position in range(len(schedule)):
        assert sum(curve.holders(position).values()) == curve.live[position]
    (row,) = top_holders([curve], 2)
    assert sum(row.values()) == curve.peak_bytes


def test_holders_of_the_example():
    curve = Curve(CHAIN, RECOMPUTE_A)
    assert curve.starts_s == [0, 1, 3, 6, 10, 11, 16]
    assert curve.peak_position == 2
    assert curve.holders(2) == {"c": 6, "b": 1, "workspace": 2, RESIDENT: 1}
    plain = Curve(CHAIN, Schedule.store_all(CHAIN.graph))
    assert top_holders([plain, curve], 1) == [
        {"c": 6, REST: 5, "workspace": 2, RESIDENT: 1},
        {"c": 6, REST: 1, "workspace": 2, RESIDENT: 1},
    ]


def phased(phases, times=None):
    n = len(phases)
    ops = tuple(Op(i, f"o{i}", "K", (), (i,), p) for i, p in enumerate(phases))
    graph = Graph(ops, tuple(Value(i, "v", 1, producer=i) for i in range(n)), tuple(range(n)))
    return Problem(graph, Profile(tuple(times or [1.0] * n), (0,) * n, 0))


F, B, U = "forward", "backward", "update"


@pytest.mark.parametrize(
    ("phases", "order", "bands"),
    [
        ([F, F, B, U], None, [(F, 0, 2), (B, 2, 3), (U, 3, 4)]),
        ([F, F], None, [(F, 0, 2)]),
        ([F, F, B, B], (0, 1, 2, 0, 3), [(F, 0, 2), (B, 2, 5)]),  # a recomputation is no border
        ([F, F, B, U, B, B, U, U], None, [(F, 0, 2), (B, 2, 6), (U, 6, 8)]),  # an early update
        ([], None, []),
    ],
)
def test_bands_lie_where_least_is_on_the_wrong_side(phases, order, bands):
    problem = phased(phases)
    schedule = Schedule(order) if order else Schedule.store_all(problem.graph)
    assert Curve(problem, schedule).bands == bands


def test_scalars_of_the_optimizer_move_no_border():
    problem = phased([F, F, B, B, F, U], [1, 1, 1, 1, 1e-6, 1e-6])
    curve = Curve(problem, Schedule.store_all(problem.graph))
    assert [band[:2] for band in curve.bands[:2]] == [(F, 0), (B, 2)]
    assert curve.backward_begins == 2


def test_a_profile_without_times_is_drawn_by_position():
    problem = phased([F, F, F], [0, 0, 0])
    assert Curve(problem, Schedule.store_all(problem.graph)).starts_s == [0, 1, 2, 3]


@pytest.mark.parametrize("most", [1, 3, 100])
def test_thinned_curves_keep_the_peak_and_the_end(most):
    curve = Curve(CHAIN, RECOMPUTE_A)
    edges, heights = curve.thinned(most)
    assert len(edges) == len(heights) + 1 <= most + 2
    assert max(heights) == curve.peak_bytes
    assert (edges[0], edges[-1]) == (0, 16)
    if most == 100:
        assert heights == curve.live


def test_groups_of_the_example_add_up():
    rows = {row.name: row for row in groups(CHAIN, RECOMPUTE_A)}
    assert (rows["a"].recomputed, rows["a"].runs, rows["a"].added_s) == (1, 1, 1.0)
    assert (rows["a"].kept_bytes, rows["a"].plain_bytes, rows["a"].saved_bytes) == (0, 4, 4)
    assert sum(row.added_s for row in rows.values()) == pytest.approx(
        simulate(CHAIN, RECOMPUTE_A).time_s - CHAIN.store_all_time_s
    )


def stays(order, most):
    found = intervals(Curve(CHAIN, Schedule(order)), most)
    return [(s.value_id, s.begin, s.end, s.again) for s in found]


def test_intervals_tell_what_is_computed_again():
    assert stays((0, 1, 2, 3, 4), 9) == [(0, 0, 4, False)]
    assert stays((0, 1, 2, 3, 0, 4), 9) == [(3, 3, 5, False)]
    again = [(0, 0, 1, False), (0, 3, 5, True), (2, 2, 4, False)]
    assert stays((0, 1, 2, 0, 3, 4), 9) == again
    assert stays((0, 1, 2, 0, 3, 4), 1) == again[2:]
    assert len(stays((0, 1, 2, 0, 3, 4), None)) == 6
