"""Fetches are ops of the problem: what they take, what they must follow, and what they hold."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest
from random_problems import mixed_problem
from random_schedules import random_schedule

from keras_remat.core.graph import chain_example
from keras_remat.core.offload import Offload
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule, Usage
from keras_remat.core.serialize import problem_from_dict, problem_to_dict
from keras_remat.core.simulate import live_bytes, simulate
from keras_remat.core.validate import check_rules, executed_peak_bytes
from keras_remat.errors import InvalidProblemError, InvalidScheduleError

PLAIN = Problem(chain_example(), Profile((1.0,) * 5, (3,) * 5, 0))
CHAIN = replace(PLAIN, offload=Offload(16.0, latency_s=0.25))


def with_random_fetches(rng: random.Random, problem: Problem, order: tuple[int, ...]) -> Schedule:
    """The order with fetches of what has run put in anywhere."""
    result: list[int] = []
    for op_id in order:
        while result and rng.random() < 0.3:
            result.append(len(problem.graph.ops) + problem.source_of(rng.choice(result)))
        result.append(op_id)
    return Schedule(result)


def test_a_fetch_takes_latency_and_what_no_other_op_hides() -> None:
    assert Offload(10.0).fetch_time_s(5) == 0.5
    assert Offload(10.0, 1.0, 0.75).fetch_time_s(40) == 2.0
    assert Offload(math.inf).fetch_time_s(2**60) == 0.0
    assert Offload(0.0, overlap=1.0).fetch_time_s(1) == math.inf


@pytest.mark.parametrize(
    "numbers", [(-1.0,), (math.nan,), (True,), ("1",), (1.0, math.inf), (1.0, 0.0, 1.5)]
)
def test_numbers_out_of_range_are_refused(numbers: tuple[float, ...]) -> None:
    with pytest.raises(InvalidProblemError, match=r"offload\.|must be a number"):
        Offload(*numbers)


def test_the_chain_example() -> None:
    """``a`` is fetched for ``e``: 4 bytes at 16 a second, and no workspace."""
    schedule = Schedule((0, 1, 2, 3, 5, 4))
    assert simulate(CHAIN, schedule) == Usage(5.5, 10)
    assert live_bytes(CHAIN, schedule).tolist() == [7, 8, 10, 10, 5, 10]


def test_without_bandwidth_there_are_no_fetches() -> None:
    without = replace(PLAIN, offload=Offload(0.0))
    assert without.ops == PLAIN.ops
    for problem in (without, PLAIN):
        with pytest.raises(InvalidScheduleError, match="S2: unknown op id 5"):
            check_rules(problem, Schedule((0, 1, 2, 3, 5, 4)))


@pytest.mark.parametrize("order", [(5, 0, 1, 2, 3, 4), (0, 1, 8, 2, 3, 4), (5, 1, 2, 3, 0, 4)])
def test_a_fetch_comes_after_its_op(order: tuple[int, ...]) -> None:
    with pytest.raises(InvalidScheduleError, match=r"S1|S5"):
        check_rules(CHAIN, Schedule(order))


def test_what_must_not_run_again_can_be_fetched() -> None:
    """Neither S3 nor S4 binds a fetch, and an output of such an op can be given up for a while."""
    ops = tuple(
        replace(op, recomputable=False, after=(0,) if op.id == 3 else ()) for op in PLAIN.graph.ops
    )
    problem = replace(CHAIN, graph=replace(PLAIN.graph, ops=ops))
    check_rules(problem, Schedule((0, 1, 2, 3, 5, 4)))
    with pytest.raises(InvalidScheduleError, match="S3"):
        check_rules(problem, Schedule((0, 1, 2, 3, 0, 4)))


def test_simulate_equals_the_validators_executor() -> None:
    fetches = 0
    for seed in range(400):
        rng = random.Random(seed)
        problem = replace(mixed_problem(seed, budget=False), offload=Offload(2.0, 0.5))
        order = random_schedule(rng, problem.graph).order
        schedule = with_random_fetches(rng, problem, order)
        check_rules(problem, schedule)
        assert simulate(problem, schedule).peak_bytes == executed_peak_bytes(problem, schedule)
        fetches += len(schedule) - len(order)
    assert fetches > 1000


@pytest.mark.parametrize("rate", [0.0, 12e9, math.inf])
def test_files_keep_it(rate: float) -> None:
    problem = replace(PLAIN, offload=Offload(rate, 1e-5, 0.5))
    document = json.loads(json.dumps(problem_to_dict(problem), allow_nan=False))
    assert problem_from_dict(document) == problem


def test_files_without_it_are_what_they_were() -> None:
    assert "offload" not in problem_to_dict(PLAIN)
    assert problem_from_dict({**problem_to_dict(PLAIN), "offload": None}) == PLAIN


@pytest.mark.parametrize(
    ("offload", "field"),
    [
        (3, "offload"),
        ({}, "offload.bytes_per_s"),
        ({"bytes_per_s": "fast"}, "offload.bytes_per_s"),
        ({"bytes_per_s": 1, "overlap": 2}, "offload.overlap"),
        ({"bytes_per_s": 1, "latency_s": -1}, "offload.latency_s"),
    ],
)
def test_malformed_files_name_the_field(offload: object, field: str) -> None:
    with pytest.raises(InvalidProblemError, match=field):
        problem_from_dict({**problem_to_dict(PLAIN), "offload": offload})
