"""DTR on the published layer graphs, against published overheads. The graph files are not part of
the repository: the folder is given by the environment variable ``KERAS_REMAT_GRAPHS``, and without
it these tests are skipped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from keras_remat.core import serialize
from keras_remat.core.deadline import Deadline
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate
from keras_remat.solvers import solve
from keras_remat.solvers.papers.dtr import planned_order

GRAPHS = os.environ.get("KERAS_REMAT_GRAPHS")
pytestmark = pytest.mark.skipif(GRAPHS is None, reason="KERAS_REMAT_GRAPHS is not set")
PUBLISHED = {
    "unet_b32": {"0.9": 1.2, "0.8": 3.4, "0.7": 3.9, "0.6": 5.3, "0.5": 7.5, "0.4": 17.5},
    "mobilenet_b512": {
        "0.9": 0.2,
        "0.8": 0.4,
        "0.7": 0.7,
        "0.6": 1.1,
        "0.5": 2.0,
        "0.4": 2.8,
        "0.3": 4.7,
    },
    "resnet50_b256": {
        "0.9": 0.1,
        "0.8": 0.4,
        "0.7": 0.7,
        "0.6": 1.1,
        "0.5": 1.7,
        "0.4": 3.0,
        "0.3": 4.7,
    },
    "vgg16_b256": {"0.9": 2.0},
}
"""Overheads of h_DTR in %, rounded to a tenth."""
ROUNDING = 0.05
CASES = [(graph, share) for graph, rows in PUBLISHED.items() for share in rows]


def load(graph: str, share: str) -> tuple[Problem, float]:
    """The problem under a share of its store-all peak, and its store-all seconds."""
    problem = serialize.load_problem(Path(GRAPHS or ".") / f"{graph}.json")
    store_all = simulate(problem, Schedule.store_all(problem.graph))
    return problem.with_budget(int(float(share) * store_all.peak_bytes)), store_all.time_s


@pytest.mark.parametrize(("graph", "share"), [case for case in CASES if case[0] != "unet_b32"])
def test_one_run_of_h_dtr_within_ten_percent_of_the_published_overhead(
    graph: str, share: str
) -> None:
    problem, store_all_s = load(graph, share)
    order = planned_order(problem, "dtr", problem.budget_bytes or 0, 0, Deadline(float("inf")))
    assert order is not None
    overhead = 100 * (simulate(problem, Schedule(tuple(order))).time_s / store_all_s - 1)
    published = PUBLISHED[graph][share]
    assert 0.9 * (published - ROUNDING) <= overhead <= 1.1 * (published + ROUNDING)


@pytest.mark.slow
@pytest.mark.parametrize(("graph", "share"), CASES)
def test_the_solver_is_never_ten_percent_worse_than_published(graph: str, share: str) -> None:
    """It tries budgets around the real one, which helps most on the U-Net, whose single run at the
    budget itself is up to half worse."""
    problem, store_all_s = load(graph, share)
    usage = solve(problem, solver="dtr", time_limit_s=60.0).usage
    assert usage is not None
    assert 100 * (usage.time_s / store_all_s - 1) <= 1.1 * (PUBLISHED[graph][share] + ROUNDING)
