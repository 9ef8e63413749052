"""The command line: outputs, files, exit statuses, and no tracebacks."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from own_process import output_of

import keras_remat
from keras_remat import cli
from keras_remat.cli import main
from keras_remat.core.graph import Graph, chain_example
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule
from keras_remat.core.serialize import load_problem, save_problem
from keras_remat.core.simulate import simulate
from keras_remat.planning.plan import Plan
from keras_remat.reporting.fit_report import AutotuneReport, EpochUsage
from keras_remat.solvers import SOLVERS, solve


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


def test_what_no_memory_is_left_for_is_told(
    problem_file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(_: object) -> int:
        raise MemoryError("Unable to allocate 5.82 TiB")

    monkeypatch.setattr(cli, "_run_solve", full)
    assert main(["solve", problem_file, "--budget", "7"]) == 2
    assert "too little memory (Unable to allocate 5.82 TiB): free some" in capsys.readouterr().err


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
    said = output_of(
        "-m", "keras_remat", "solve", problem_file, "--budget", "7", "--solver", "greedy"
    )
    assert "overhead 20.00%" in said


def test_a_reader_that_has_seen_enough_is_no_error(problem_file: str) -> None:
    """As ``| head -1`` is: it closes the pipe."""
    command = [sys.executable, "-m", "keras_remat", "show", problem_file]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    assert (process.returncode, said) == (0, "")


COMMANDS = ["solve", "plan", "max-batch", "show", "compare"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert f"examples:\n  keras-remat {command} " in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"keras-remat {keras_remat.__version__}\n"


def test_a_misspelled_solver_is_told_the_right_one(
    problem_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["solve", problem_file, "--budget", "7", "--solver", "gredy"]) == 2
    assert "did you mean 'greedy'?" in capsys.readouterr().err


@pytest.mark.parametrize("limit", ["inf", "nan", "-1", "0", "soon", "1e400"])
def test_time_limits_that_are_none(
    problem_file: str, limit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["solve", problem_file, "--budget", "7", f"--time-limit={limit}"])
    assert caught.value.code == 2
    told = capsys.readouterr().err
    assert "--time-limit" in told
    assert ("'soon'" if limit == "soon" else "positive and finite, got") in told


@pytest.mark.parametrize("budget", ["1" + "0" * 400, str(2**63), "9" * 25 + "TiB"], ids=len)
def test_budgets_that_no_device_has(
    problem_file: str, budget: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["solve", problem_file, "--budget", budget]) == 2
    assert "no device has so much memory" in capsys.readouterr().err


@pytest.mark.parametrize("nbytes", [2**70, 10**400], ids=["2**70", "10**400"])
def test_files_with_numbers_that_no_device_has_are_no_tracebacks(
    nbytes: int, problem_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = json.loads(Path(problem_file).read_text())
    document["values"][0]["bytes"] = nbytes
    path = tmp_path / "huge.json"
    path.write_text(json.dumps(document))
    assert main(["solve", str(path), "--budget", "50%"]) == 3
    assert main(["solve", str(path), "--budget", "100%", "--time-limit", "1"]) == 2
    assert main(["show", str(path)]) == 2
    assert "too large" in capsys.readouterr().err
    document["values"][0]["bytes"] = 4
    document["budget_bytes"] = nbytes
    path.write_text(json.dumps(document))
    assert main(["solve", str(path)]) == 2
    assert "no device has so much memory" in capsys.readouterr().err


def test_json(problem_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["solve", problem_file, "--budget", "7", "--solver", "greedy", "--json"]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["peak_bytes"] == 7
    assert main(["show", problem_file, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["floor_bytes"] == 7


def test_solution_files_can_be_shown_and_compared(
    problem_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = []
    for budget in ("7", "11"):
        files.append(str(tmp_path / f"{budget}.json"))
        command = ["solve", problem_file, "--budget", budget, "--solver", "greedy"]
        assert main([*command, "--output", files[-1]]) == 0
    capsys.readouterr()
    assert main(["show", files[0]]) == 0
    assert "6 runs, 1 ops run again" in capsys.readouterr().out
    page = tmp_path / "page.html"
    assert main(["show", files[0], "--problem", problem_file, "--html", str(page)]) == 0
    assert "1 of 1 op" in capsys.readouterr().out
    assert "Who holds the peak" in page.read_text()
    assert main(["show", files[0], "--html", str(page)]) == 2
    assert "--problem" in capsys.readouterr().err
    assert main(["compare", *files]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["peak_bytes", "7", "B", "11", "B", "+57.1", "%"] in rows
    assert ["time_s", "6", "s", "5", "s", "-16.7", "%"] in rows


def test_a_problem_without_ops_can_be_solved_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(tmp_path / name) for name in ("problem.json", "solution.json")]
    save_problem(Problem(Graph((), (), ()), Profile((), (), 0)), files[0])
    assert main(["solve", files[0], "--budget", "7", "--output", files[1]]) == 0
    assert main(["show", files[1], "--problem", files[0]]) == 0
    assert "recomputed nothing" in capsys.readouterr().out


def test_a_page_is_written_and_the_text_printed_in_any_encoding(
    problem_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = load_problem(problem_file)
    save_problem(replace(problem, profile=Profile((1e-6,) * 5, (0,) * 5, 0)), problem_file)
    printed = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", printed)
    page = tmp_path / "page.html"
    assert main(["show", problem_file, "--html", str(page)]) == 0
    printed.seek(0)
    assert "time 5 ?s" in printed.read()
    assert "time 5 µs" in page.read_text(encoding="utf-8")


def test_a_page_is_written_though_nobody_reads_the_text(
    problem_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, write = os.pipe()
    os.close(read)
    monkeypatch.setattr(sys, "stdout", open(write, "w"))  # noqa: SIM115
    page = tmp_path / "page.html"
    assert main(["show", problem_file, "--html", str(page)]) == 0
    assert "Who holds the peak" in page.read_text()


def test_a_plan_and_a_report_can_be_shown(
    problem_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = load_problem(problem_file).with_budget(7)
    solution = solve(problem, solver="greedy", time_limit_s=1)
    store_all = simulate(problem, Schedule.store_all(problem.graph))
    assert solution.usage is not None
    plan = Plan(problem.graph.fingerprint, 7, solution, store_all, solution.usage, problem=problem)
    plan.save(tmp_path / "plan.json")
    report = AutotuneReport(limit_bytes=8, epochs=[EpochUsage(0, 8, 2, 1.0, 0.5, 7, 4)], plan=plan)
    report.save(tmp_path / "report.json")
    for name in ("plan.json", "report.json"):
        page = tmp_path / f"{name}.html"
        assert main(["show", str(tmp_path / name), "--by", "op", "--html", str(page)]) == 0
        assert "1 of 1 op" in capsys.readouterr().out
        assert "What is in memory when" in page.read_text()
    assert main(["compare", str(tmp_path / "plan.json"), str(tmp_path / "report.json")]) == 0
    assert "limit_bytes" in capsys.readouterr().out
    assert main(["solve", str(tmp_path / "plan.json"), "--budget", "7"]) == 2
    assert "this is a plan file" in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_told_before_the_work(
    problem_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for output in (tmp_path / "nowhere" / "solution.json", tmp_path):
        command = ["solve", problem_file, "--budget", "7", "--output", str(output)]
        assert main(command) == 2
        told = capsys.readouterr()
        assert str(output) in told.err
        assert "gap" not in told.err


def test_no_model_from_a_wrong_name(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("keras")
    command = ["plan", "--memory-limit", "1GiB"]
    for name in ("nowhere.keras", "no_such_module:build", "keras_remat.cli:main_program"):
        assert main([*command, name]) == 2
        assert name.partition(":")[0] in capsys.readouterr().err
    assert main(["plan", "model.keras", "--memory-limit", "8"]) == 2
    assert 'did you mean "8GiB"?' in capsys.readouterr().err


def test_a_model_with_open_shapes_is_planned_from_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorflow")
    (tmp_path / "open_models.py").write_text(
        "import keras\n"
        "def build():\n"
        "    inputs = keras.Input((None, 4), name='rows')\n"
        "    model = keras.Model(inputs, keras.layers.Dense(3)(inputs))\n"
        "    model.compile('sgd', 'mse', jit_compile=False)\n"
        "    return model\n"
    )
    monkeypatch.chdir(tmp_path)
    command = ["open_models:build", "--memory-limit", "1GiB", "--profile", "estimated", "--json"]
    assert main(["plan", *command]) == 2
    assert "give --shape" in capsys.readouterr().err
    command += ["--batch-size", "8", "--shape", "rows=16384,4"]
    assert main(["plan", *command]) == 0
    assert json.loads(capsys.readouterr().out)["predicted"]["peak_bytes"] > 0


@pytest.mark.slow
def test_models_from_a_file_and_from_a_function(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorflow")
    (tmp_path / "my_models.py").write_text(
        "import keras\n"
        "def build():\n"
        "    layers = [keras.Input((16,)), keras.layers.Dense(64, 'relu'), keras.layers.Dense(4)]\n"
        "    model = keras.Sequential(layers)\n"
        "    model.compile('sgd', 'mse', jit_compile=False)\n"
        "    return model\n"
    )
    monkeypatch.chdir(tmp_path)
    options = ["--batch-size", "8", "--memory-limit", "1GiB", "--profile", "estimated", "--json"]
    assert main(["plan", "my_models:build", "--output", "plan.json", *options]) == 0
    fingerprint = json.loads(capsys.readouterr().out)["fingerprint"]
    sys.modules["my_models"].build().save("model.keras")
    assert main(["plan", "model.keras", *options]) == 0
    assert json.loads(capsys.readouterr().out)["fingerprint"] == fingerprint
    assert main(["max-batch", "model.keras", *options]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["max_batch_size"] >= 8
