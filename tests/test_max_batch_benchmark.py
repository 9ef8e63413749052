"""The maximum batch benchmark reads its command line, reports what it was given, and demands what
it says."""

import importlib
from dataclasses import replace
from types import SimpleNamespace

import keras
import pytest
from fake_backend import chain_problem, scaling_of

from keras_remat.batch_size.cost_fit import CostFit


@pytest.fixture
def max_batch(benchmark_of):
    return benchmark_of("max_batch")


def batch_row(**changes):
    return {
        "model": "UNet",
        "row": "batch",
        "solver": "auto",
        "limit_bytes": 1000,
        "batch": 48,
        "ratio": 7.0,
        "searched": 48,
        "predicted_bytes": 990,
        "measured_bytes": 980,
        "overhead": 0.1,
        "time_ratio": 1.1,
        "search_s": 9.0,
        "failed_batch": 50,
        "failed_bytes": 1001,
        "pixels": 96,
    } | changes


def fit_row(**changes):
    row = batch_row(solver="fit", failed_batch=None, failed_bytes=None, **changes)
    del row["searched"]  # it trains what it finds
    return row


def prediction_row(**changes):
    row = {
        "model": "UNet",
        "row": "prediction",
        "profiled": 8,
        "batch": 4,
        "predicted_bytes": 99,
        "measured_bytes": 100,
    }
    return row | changes


def test_models_and_solvers_exist(max_batch):
    models = importlib.import_module("paper_models")
    solvers = importlib.import_module("keras_remat.solvers")
    assert tuple(models.PAPER_MODELS) == max_batch.MODELS
    assert set(max_batch.SOLVERS) - {"fit"} <= set(solvers.SOLVERS)
    assert max_batch.parser().parse_args([]).models == max_batch.MODELS


@pytest.mark.parametrize(
    "arguments",
    [
        ["--models", "AlexNet"],
        ["--solvers", "dtr"],
        ["--limit", "much"],
        ["--backend", "torch", "--pool", "512"],
    ],
)
def test_bad_arguments_are_refused(max_batch, arguments, capsys):
    with pytest.raises(SystemExit) as refusal:
        max_batch.main(arguments)
    assert refusal.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_accepts_what_holds(max_batch):
    assert max_batch.failed_bounds([batch_row(), fit_row(), prediction_row()]) == []


def test_fit_has_to_reach_what_the_search_said(max_batch):
    said = max_batch.failed_bounds([batch_row(), fit_row(batch=46)])
    assert said == ["UNet: fit trains 46, the search said 48"]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (batch_row(measured_bytes=1001), "measured 1001 bytes, limit 1000"),
        (batch_row(failed_bytes=1000), "batch 50 trains too"),
        (batch_row(model="ResNet50", search_s=61.0), "the search took 61 s, more than 60"),
        (batch_row(ratio=6.0), "auto: the best ratio is 6.00, less than 7"),
        (batch_row(ratio=4.9), "auto: the geometric mean is 4.90, less than 5"),
        (fit_row(ratio=4.9), "fit: the geometric mean is 4.90, less than 5"),
        (batch_row(solver="chen_greedy"), "the geometric mean is nan"),
        (prediction_row(predicted_bytes=94), "-6.0% off, more than 5%"),
        (
            {"model": "UNet", "row": "batch", "solver": "auto", "error": "none | found"},
            "UNet auto: none | found",
        ),
    ],
)
def test_names_the_bound_that_fails(max_batch, row, said):
    assert any(said in failure for failure in max_batch.failed_bounds([row]))


def test_every_line_has_the_columns_of_its_table(max_batch):
    plain = batch_row(solver="plain", predicted_bytes=None, search_s=None)
    failed = {"model": "VGG19", "row": "batch", "solver": "", "error": "killed | by\nthe kernel"}
    for row in (batch_row(), plain, failed):
        assert max_batch.line(row).replace("\\|", "").count("|") == len(max_batch.COLUMNS) + 1
    assert "| 9, ended by the clock |" in max_batch.line(batch_row(ended_by_clock=True))
    assert max_batch.line(prediction_row()).count("|") == len(max_batch.PREDICTION_COLUMNS) + 1
    assert "-1.0%" in max_batch.document("machine", [batch_row(), prediction_row()])


def test_what_a_search_has_learned_predicts_the_sizes_that_train(max_batch):
    """A kernel takes scratch from a size on that was not measured before the search."""
    case = importlib.import_module("max_batch_case")
    measurement = object.__new__(case.Measurement)
    measurement.scaling = scaling_of(4, 8)
    profiles = {}
    for size, scratch in ((4, 0), (8, 0), (16, 999)):
        problem = chain_problem(size, source="measured")
        every = (scratch,) * len(problem.graph.ops)
        profiles[size] = replace(problem.profile, op_workspace_bytes=every)
    measurement._learn(SimpleNamespace(fit=None))
    assert measurement.scaling.fit is None
    measurement._learn(SimpleNamespace(fit=CostFit(profiles)))
    assert set(measurement.scaling.at(16).profile.op_workspace_bytes) == {999}


def test_a_crashing_child_is_a_row(max_batch):
    options = {"backend": keras.backend.backend(), "limit_bytes": None}
    rows = list(max_batch.rows_of("no such model", options, 300.0))
    assert [row["model"] for row in rows] == ["no such model"]
    assert "KeyError" in rows[0]["error"]
