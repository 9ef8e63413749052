"""The score of a program on a suite of two tiny problems: what counts, what does not, and going
on."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest
from random_problems import chain_problem

from benchmarks.suite import make_problems, score
from keras_remat.core.graph import chain_example
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.serialize import load_problem

SOLVE = """
import json, sys
from keras_remat import load_problem, solve
problem = load_problem(sys.argv[1])
try:
    order = solve(problem, solver="chen_sqrt_n").schedule.order
except Exception:
    order = [0]
json.dump({"order": order, "lower_bound_s": problem.store_all_time_s}, open(sys.argv[2], "w"))
"""
DOES_NOT_STOP = """
import json, sys, time
json.dump({"order": [0, 1, 2, 3, 0, 4]}, open(sys.argv[1], "w"))
time.sleep(60)
"""
CHAIN = Problem(chain_example(), Profile((1.0,) * 5, (0,) * 5, 0), name="five")


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A suite of two problems with eight budgets each, and a program."""
    index = {}
    for problem in (CHAIN, chain_problem(9)):
        document = make_problems.document_of(problem)
        document["name"] = problem.name
        text = make_problems.write(document, tmp_path / "problems")
        index[problem.name] = make_problems.entry_of(document, text)
    (tmp_path / "index.json").write_text(json.dumps({"problems": index}))
    (tmp_path / "solve.py").write_text(SOLVE)
    return tmp_path


def command(suite: Path) -> list[str]:
    return ["--", sys.executable, str(suite / "solve.py"), "{problem}", "{solution}"]


def test_files_come_back_without_names_and_with_budgets(suite: Path) -> None:
    entry = json.loads((suite / "index.json").read_text())["problems"]["five"]
    assert (entry["floor_bytes"], entry["store_all_peak_bytes"]) == (7, 11)
    assert entry["budgets_bytes"] == [10, 10, 9, 9, 8, 8, 7, 7]
    packed = (suite / "problems" / "five.json.gz").read_bytes()
    (suite / "five.json").write_bytes(gzip.decompress(packed))
    loaded = load_problem(suite / "five.json")
    assert loaded.profile.op_time_s == CHAIN.profile.op_time_s
    assert [op.inputs for op in loaded.graph.ops] == [op.inputs for op in CHAIN.graph.ops]


def test_the_score_of_a_program(suite: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = suite / "results.json"
    common = [str(results), "--suite", str(suite), "--only", "chain9", "--budgets", "0", "7"]
    assert score.main([*common, "--seconds", "20", *command(suite)]) == 0
    found = json.loads(results.read_text())
    assert list(found) == ["chain9/0", "chain9/7"]
    assert found["chain9/0"]["time_s"] > 18.0
    assert found["chain9/0"]["bound_s"] == 18.0
    assert found["chain9/7"]["time_s"] is None  # its order was no schedule
    assert capsys.readouterr().out.splitlines()[-1] == "score 1.0000 of 1"
    (suite / "best.json").write_text(
        json.dumps({"chain9/0": {"time_s": 9.0}, "chain9/7": {"time_s": 25.0}})
    )
    assert score.main(common) == 0  # nothing runs again
    share = 9.0 / found["chain9/0"]["time_s"]
    assert capsys.readouterr().out == f"score {share:.4f} of 2\n"


def test_a_program_that_does_not_stop_is_ended_and_its_file_counts(
    suite: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(score, "GRACE_S", 1.0)
    command = [sys.executable, "-c", DOES_NOT_STOP, "{solution}"]
    result = score.solved(suite, "five", 0, command, 1.0)
    assert result["time_s"] == 6.0


def test_what_is_better_is_recorded() -> None:
    old = {"a/0": {"time_s": 2.0, "found_by": "x", "bound_s": 1.0}}
    results = {
        "a/0": {"time_s": 3.0, "bound_s": 1.5},
        "a/1": {"time_s": 4.0, "bound_s": None},
        "a/2": {"time_s": None, "bound_s": 0.5},
    }
    assert score.recorded(old, results, "y") == {
        "a/0": {"time_s": 2.0, "found_by": "x", "bound_s": 1.5},
        "a/1": {"time_s": 4.0, "found_by": "y", "bound_s": None},
        "a/2": {"time_s": None, "found_by": None, "bound_s": 0.5},
    }
    assert score.score_of(results, old) == (2.0 / 3.0 + 1.0, 2)
