"""The timeline keeps the live bytes of simulate, and counts what is above the budget."""

from __future__ import annotations

import random

import numpy as np
import pytest
from random_problems import mixed_problem, seeds

from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import live_bytes, seconds
from keras_remat.core.validate import check_rules
from keras_remat.solvers.orders.timeline import Timeline


@pytest.mark.parametrize("seed", seeds(120, 40))
def test_timeline_equals_simulate_after_every_change(seed: int) -> None:
    problem = mixed_problem(seed)
    rng = random.Random(seed)
    needed = sorted(problem.graph.needed)
    again = [i for i in needed if problem.graph.ops[i].recomputable]
    line = Timeline(problem, needed, compiled=False)
    for _ in range(40):
        cell = rng.randrange(line.end)
        if line.op_at[cell] >= 0:
            line.kernel.remove(*line.state, cell)
        elif again:
            line.kernel.insert(*line.state, rng.choice(again), cell)
        schedule = Schedule(line.order())
        live = line.state[1]
        assert line.excess == np.maximum(live - (problem.budget_bytes or 0), 0).sum()
        check_rules(problem, schedule)
        expected = live_bytes(problem, schedule)
        used = [at for at in range(line.end) if line.op_at[at] >= 0]
        assert live[used].tolist() == expected.tolist()
        assert live.max() == expected.max()
        assert line.state[2][0] == pytest.approx(seconds(problem, schedule))


def test_an_illegal_order_is_refused() -> None:
    problem = mixed_problem(3, "chain")
    with pytest.raises(ValueError, match="op 1 at position 0"):
        Timeline(problem, (1, 0), compiled=False)
