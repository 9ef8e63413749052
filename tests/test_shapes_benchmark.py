"""Texts of many lengths in one ``fit``: within the limit, with few orders, and plain's losses."""

import json
import random
from pathlib import Path

import own_process
import pytest

TESTS = Path(__file__).resolve().parent
pytestmark = pytest.mark.skipif(
    not (TESTS.parent / "benchmarks").exists(), reason="an installed package has no benchmarks"
)


def check(lengths, epochs, batch, share, solve_s):
    arguments = map(json.dumps, (lengths, epochs, batch, share, solve_s))
    said = own_process.came_of(TESTS / "shapes_case.py", *arguments)
    if said is None:
        pytest.skip("the allocator keeps no statistics")
    assert said["over"] == {}, (said["limit"], said["events"])
    assert said["losses"] == pytest.approx(said["plain_losses"], abs=1e-4)
    assert 1 <= said["orders"] <= 4
    assert said["planned_late"] == [], "planned after the first epoch"
    return said


@pytest.mark.slow
def test_a_few_lengths_train_within_the_limit():
    lengths = [96, 384, 128, 384, 320, 384, 96, 320, 384, 320]
    planned = check(lengths, 2, 4, 0.6, 2.0)["planned_lengths"]
    assert 384 in planned
    assert 96 not in planned


@pytest.mark.slow
def test_bucketed_lengths_from_32_to_512_train_within_the_limit():
    lengths = [*range(32, 513, 32)] * 4
    random.Random(0).shuffle(lengths)
    check(lengths, 3, 16, 0.5, 10.0)
