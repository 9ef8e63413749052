"""The shipped problems are those of the index, and the best known schedules can be."""

from __future__ import annotations

import gzip
import hashlib
import json
from typing import Any

import pytest

from benchmarks.suite import check, make_problems
from keras_remat.core.schedule import Schedule
from keras_remat.core.serialize import problem_from_dict
from keras_remat.core.simulate import simulate

INDEX: dict[str, dict[str, Any]] = json.loads(make_problems.INDEX.read_text())["problems"]
BEST: dict[str, dict[str, Any]] = json.loads((make_problems.HERE / "best.json").read_text())


def test_there_are_nineteen_networks_at_three_batch_sizes() -> None:
    assert len({name.rpartition("_b")[0] for name in INDEX}) == 19
    assert len(INDEX) == 57
    files = {path.name.removesuffix(".json.gz") for path in make_problems.PROBLEMS.iterdir()}
    assert files == set(INDEX)
    assert sum(path.stat().st_size for path in make_problems.PROBLEMS.iterdir()) < 5 * 2**20


@pytest.mark.parametrize("name", INDEX)
def test_a_file_is_the_one_of_the_index(name: str) -> None:
    entry = INDEX[name]
    text = gzip.decompress((make_problems.PROBLEMS / f"{name}.json.gz").read_bytes())
    assert hashlib.sha256(text).hexdigest() == entry["sha256"]
    budgets = entry["budgets_bytes"]
    assert len(budgets) == make_problems.BUDGETS
    assert budgets == sorted(budgets, reverse=True)
    assert entry["floor_bytes"] < budgets[-1] < budgets[0] < entry["store_all_peak_bytes"]


@pytest.mark.parametrize("name", ["vgg16_b32", "gan_b64"])
def test_the_index_says_what_a_problem_is(name: str) -> None:
    document = check.read(make_problems.PROBLEMS / f"{name}.json.gz")
    problem, entry = problem_from_dict(document), INDEX[name]
    order = Schedule.store_all(problem.graph)
    assert problem.floor_bytes == entry["floor_bytes"]
    assert simulate(problem, order).peak_bytes == entry["store_all_peak_bytes"]
    assert check.evaluate(document, list(order.order))[1] == entry["store_all_peak_bytes"]


def test_best_known_schedules_are_of_the_suite_and_possible() -> None:
    assert BEST
    for key, entry in BEST.items():
        name, _, place = key.partition("/")
        least_s = INDEX[name]["store_all_time_s"] * (1 - 1e-9)
        assert 0 <= int(place) < make_problems.BUDGETS
        assert entry["bound_s"] is None or entry["bound_s"] >= least_s
        if entry["time_s"] is not None:
            assert entry["found_by"]
            assert entry["time_s"] >= max(least_s, (entry["bound_s"] or 0.0) * (1 - 1e-9)), key
