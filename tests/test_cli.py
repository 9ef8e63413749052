"""``keras-remat solve``: outputs, files and exit statuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from keras_remat.cli import main
from keras_remat.core.graph import chain_example
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.serialize import save_problem
from keras_remat.solvers import SOLVERS


@pytest.fixture
def problem_file(tmp_path: Path) -> str:
    path = tmp_path / "problem.json"
    save_problem(Problem(chain_example(), Profile((1.0,) * 5, (0,) * 5, 0), name="example"), path)
    return str(path)


def test_solution_file(
    problem_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "solution.json"
    assert (
        main(["solve", problem_file, "--budget", "7", "--time-limit", "3", "--output", str(output)])
        == 0
    )
    document = json.loads(output.read_text())
    assert document["order"] == [0, 1, 2, 3, 0, 4]
    assert document["peak_bytes"] == 7
    assert document["time_s"] == 6.0
    assert document["solver"] in SOLVERS
    assert document["lower_bound_s"] <= 6.0
    assert set(document) == {"order", "peak_bytes", "time_s", "lower_bound_s", "status", "solver"}
    captured = capsys.readouterr()
    assert "overhead 20.00%" in captured.out
    assert "bound" in captured.err
    assert "gap" in captured.err


def test_percent_is_of_the_store_all_peak(
    problem_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["solve", problem_file, "--budget", "70%", "--solver", "greedy"]) == 0
    )  # 70 % of 11 is 7
    assert "7 B of 7 B" in capsys.readouterr().out


def test_the_files_budget_is_the_default(tmp_path: Path, problem_file: str) -> None:
    assert main(["solve", problem_file]) == 2
    path = tmp_path / "with_budget.json"
    save_problem(Problem(chain_example(), Profile((1.0,) * 5, (0,) * 5, 0), 11), path)
    assert main(["solve", str(path)]) == 0


@pytest.mark.parametrize(
    ("budget", "status", "message"),
    [
        ("3", 3, "alone needs"),
        ("0", 2, "positive"),
        ("-5", 2, "positive"),
        ("8Gb", 2, "unknown unit"),
        ("120%", 2, "100%"),
    ],
)
def test_budgets_that_do_not_work(
    problem_file: str, budget: str, status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["solve", problem_file, f"--budget={budget}"]) == status
    assert message in capsys.readouterr().err


def test_none_found(problem_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["solve", problem_file, "--budget", "7", "--solver", "store_all"]) == 4
    assert "no schedule found" in capsys.readouterr().err


def test_wrong_use(problem_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["solve", problem_file, "--budget", "7", "--solver", "nonesuch"]) == 2
    assert "nonesuch" in capsys.readouterr().err
    assert main(["solve", str(tmp_path / "missing.json"), "--budget", "7"]) == 2
    broken = tmp_path / "broken.json"
    broken.write_text('{"format": "keras_remat.problem", "version": 1, "values": [], "ops": "no"}')
    assert main(["solve", str(broken), "--budget", "7"]) == 2
    assert "ops" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main(["no-such-command"])
    assert caught.value.code == 2


def test_as_a_module(problem_file: str) -> None:
    command = [
        sys.executable,
        "-m",
        "keras_remat",
        "solve",
        problem_file,
        "--budget",
        "7",
        "--solver",
        "greedy",
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "overhead 20.00%" in done.stdout
