"""The suite's checker agrees with the package, with which it shares no code."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from random_problems import mixed_problem
from random_schedules import random_schedule

from benchmarks.suite import check
from keras_remat.core.graph import chain_example
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule
from keras_remat.core.serialize import problem_to_dict, save_problem
from keras_remat.core.simulate import simulate
from keras_remat.core.validate import check_rules
from keras_remat.errors import InvalidScheduleError

CHAIN = Problem(chain_example(), Profile((1.0,) * 5, (0,) * 5, 0), 7)


def test_it_counts_as_simulate_does() -> None:
    reused = 0
    for seed in range(600):
        problem = mixed_problem(seed, budget=False)
        document = problem_to_dict(problem)
        for order in (
            Schedule.store_all(problem.graph).order,
            random_schedule(random.Random(seed), problem.graph).order,
        ):
            usage = simulate(problem, Schedule(order))
            seconds, peak = check.evaluate(document, list(order))
            assert (seconds, peak) == (pytest.approx(usage.time_s), usage.peak_bytes), seed
            reused += any(op.may_reuse for op in problem.graph.ops)
    assert reused > 200


def test_it_refuses_what_the_rules_refuse() -> None:
    """Orders with two places exchanged, one left out, or one put in."""
    refused = 0
    for seed in range(600):
        rng = random.Random(seed)
        problem = mixed_problem(seed, budget=False)
        order = list(random_schedule(rng, problem.graph).order)
        a, b = rng.randrange(len(order)), rng.randrange(len(order))
        if seed % 3 == 0:
            order[a], order[b] = order[b], order[a]
        elif seed % 3 == 1:
            del order[a]
        else:
            order.insert(a, order[b])
        try:
            check_rules(problem, Schedule(order))
        except InvalidScheduleError:
            refused += 1
            with pytest.raises(check.RuleBrokenError):
                check.evaluate(problem_to_dict(problem), order)
        else:
            check.evaluate(problem_to_dict(problem), order)
    assert refused > 200


@pytest.mark.parametrize("order", [[5], [-1], [True], [0.0], ["a"], [[0]]])
def test_what_is_no_op_is_refused(order: list[int]) -> None:
    with pytest.raises(check.RuleBrokenError, match="no op"):
        check.evaluate(problem_to_dict(CHAIN), order)


@pytest.mark.parametrize(
    ("order", "status", "text"),
    [
        ([0, 1, 2, 3, 0, 4], 0, "6.0 s, 7 bytes"),
        ([0, 1, 2, 3, 4], 1, "5.0 s, 11 bytes, over the budget of 7"),
        ([0, 1, 2, 3], 1, "illegal: op 4 never runs"),
    ],
)
def test_the_command(
    order: list[int],
    status: int,
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save_problem(CHAIN, tmp_path / "p.json")
    (tmp_path / "s.json").write_text(json.dumps({"order": order}))
    assert check.main([str(tmp_path / "p.json"), str(tmp_path / "s.json")]) == status
    assert capsys.readouterr().out.strip() == text


def test_it_needs_nothing_but_python() -> None:
    imports = [
        line
        for line in Path(check.__file__).read_text().splitlines()
        if "import" in line.split()[:1]
    ]
    assert imports == ["import gzip", "import json", "import sys"]
