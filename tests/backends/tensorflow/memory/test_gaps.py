"""Orders in which ops change places, so that less of the pool is in use in vain."""

import random
from collections import Counter
from math import inf

import pytest
from random_problems import mixed_problem, seeds
from random_schedules import random_schedule

from keras_remat.backends.tensorflow.memory import gaps
from keras_remat.backends.tensorflow.memory.replay import Replay, Uses
from keras_remat.backends.tensorflow.memory.replayed import ReplayedMemory
from keras_remat.core.graph import Graph, Op, Value
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate
from keras_remat.core.slices import CUT
from keras_remat.core.validate import check_rules
from keras_remat.units import MIB


def gapped(kind=CUT):
    """The value of 4 MiB gets the chunk of 6 that ``first`` leaves before ``wall``; where the one
    of 3 comes before it, that chunk is split."""
    sizes = {"first": 6, "wall": 1, "large": 4, "half": 3, "end": 1}
    ids = {name: at for at, name in enumerate(sizes)}
    read = {"wall": ["first"], "large": ["wall"], "half": ["wall"], "end": ["large", "half"]}
    ops = [
        Op(at, name, kind, tuple(ids[v] for v in read.get(name, ())), (at,))
        for name, at in ids.items()
    ]
    values = tuple(
        Value(at, name, size * MIB, producer=at) for at, (name, size) in enumerate(sizes.items())
    )
    graph = Graph(tuple(ops), values, (ids["end"],))
    return Problem(graph, Profile((1.0,) * len(ops), (0,) * len(ops), 0))


def test_a_neighbour_takes_the_gap_first():
    problem, memory = gapped(), ReplayedMemory(smallest_bytes=0, region_bytes=256 * MIB)
    order = Schedule.store_all(problem.graph)
    assert memory.peak_bytes(problem, order) > simulate(problem, order).peak_bytes
    within = problem.with_budget(simulate(problem, order).peak_bytes)
    found = memory.with_fewer_gaps(within, order, inf)
    assert sorted(found.order) == sorted(order.order)
    assert memory.peak_bytes(problem, found) == within.budget_bytes
    assert memory.with_fewer_gaps(within, found, inf) is None
    assert memory.with_fewer_gaps(within, order, -inf) is None


@pytest.mark.parametrize(("kind", "room"), [("Other", 0), (CUT, -MIB)])
def test_only_slices_that_may_fit_are_looked_at(kind, room):
    problem, memory = gapped(kind), ReplayedMemory(smallest_bytes=0, region_bytes=256 * MIB)
    order = Schedule.store_all(problem.graph)
    within = problem.with_budget(simulate(problem, order).peak_bytes + room)
    assert memory.with_fewer_gaps(within, order, inf) is None


@pytest.mark.parametrize("seed", seeds(60, 20))
def test_every_order_is_legal_and_has_less_in_use_above_the_limit(seed):
    problem = mixed_problem(seed)
    order = random_schedule(random.Random(seed), problem.graph)
    uses = Uses(problem, 0)
    limit = simulate(problem, order).peak_bytes
    found = gaps.closer(uses, lambda: Replay(uses, 2**40), order, limit)
    if found is None:
        return
    check_rules(problem, found)
    assert Counter(found.order) == Counter(order.order)
    before, after = (
        sum(
            max(0, replay.in_use_bytes - limit)
            for replay in [Replay(uses, 2**40)]
            for _ in replay.step(uses.stretch(one.order))
        )
        for one in (order, found)
    )
    assert after < before


@pytest.mark.parametrize("seed", seeds(60, 20))
def test_the_runs_of_a_stretch_are_those_of_the_whole_order(seed):
    problem, rng = mixed_problem(seed), random.Random(seed)
    uses, order = Uses(problem, 0), random_schedule(rng, problem.graph).order
    runs = uses.stretch(order)
    for _ in range(20):
        moved = gaps._moved(problem.graph, order, Counter(range(len(order))), rng)
        if moved is None:
            continue
        first, stretch = moved
        end = first + len(stretch)
        deaths = Counter(v for run in runs[first:end] for v in run.dying)
        new = (*order[:first], *stretch, *order[end:])
        there = uses.stretch(stretch, first, deaths)
        told, right = (
            [run._replace(dying=sorted(run.dying)) for run in of]
            for of in ([*runs[:first], *there, *runs[end:]], uses.stretch(new))
        )
        assert told == right
