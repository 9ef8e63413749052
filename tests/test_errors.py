"""Every error carries its numbers, says both, and survives a process border."""

import copy
import pickle
import re
import sys
import traceback
import types

import pytest

from keras_remat import errors
from keras_remat.units import parse_bytes

EXAMPLES = {
    "InvalidScheduleError": errors.InvalidScheduleError(
        "S1", "op 3 reads too early", position=2, op_id=3
    ),
    "InvalidProblemError": errors.InvalidProblemError(
        "unknown id 9", source="p.json", field="ops[3].inputs", value=9
    ),
    "InfeasibleBudgetError": errors.InfeasibleBudgetError(5, 7, "conv"),
    "ScheduleNotFoundError": errors.ScheduleNotFoundError(8, 7, 9, solver="dtr"),
    "PlanMismatchError": errors.PlanMismatchError("a" * 64, "b" * 64),
    "ProcessFailedError": errors.ProcessFailedError(1, "MemoryError: nothing left"),
    "PeakExceededError": errors.PeakExceededError(9, 7),
    "UnsupportedBatchError": errors.UnsupportedBatchError("9 samples do not divide among 2"),
    "UnsupportedModelError": errors.UnsupportedModelError("run_eagerly=True cannot be traced"),
    "MissingPackageError": errors.MissingPackageError(
        "ortools", "The solver 'intervals'", "solvers"
    ),
    "UnknownBatchError": errors.UnknownBatchError(
        "strings do not follow from the model", "give a batch", lacks_shapes=True
    ),
}


def test_there_is_an_example_of_every_error():
    defined = {
        n
        for n, o in vars(errors).items()
        if isinstance(o, type) and issubclass(o, Exception) and not n.startswith("_")
    }
    assert set(EXAMPLES) == defined - {"RematError", "BudgetError"}


@pytest.mark.parametrize("error", EXAMPLES.values(), ids=EXAMPLES)
def test_errors_survive_pickling_and_copying(error):
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is type(error)
        assert str(twin) == str(error)
        assert vars(twin) == vars(error)


@pytest.mark.parametrize(
    ("name", "attributes"),
    [
        ("InvalidScheduleError", {"rule": "S1", "position": 2, "op_id": 3}),
        (
            "InvalidProblemError",
            {"source": "p.json", "field": "ops[3].inputs", "value": 9, "message": "unknown id 9"},
        ),
        ("InfeasibleBudgetError", {"budget_bytes": 5, "floor_bytes": 7, "op_name": "conv"}),
        ("ScheduleNotFoundError", {"budget_bytes": 8, "floor_bytes": 7, "best_peak_bytes": 9}),
        ("PlanMismatchError", {"plan_fingerprint": "a" * 64, "graph_fingerprint": "b" * 64}),
        ("ProcessFailedError", {"process": 1}),
        ("PeakExceededError", {"peak_bytes": 9, "budget_bytes": 7}),
        ("MissingPackageError", {"package": "ortools", "extra": "solvers"}),
    ],
)
def test_attributes(name, attributes):
    assert {k: v for k, v in vars(EXAMPLES[name]).items() if k in attributes} == attributes


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("InvalidScheduleError", ["S1: ", "too early"]),
        ("InvalidProblemError", ["p.json: ops[3].inputs: unknown id 9"]),
        ("InfeasibleBudgetError", ["5 B", "7 B", "'conv'", "Raise the memory limit"]),
        ("ScheduleNotFoundError", ["dtr: ", "8 B", "9 B", "7 B", "more solver time"]),
        ("PlanMismatchError", ["a" * 12, "b" * 12, "make_plan"]),
        ("PeakExceededError", ["9 B", "7 B", "Raise the memory limit"]),
        ("MissingPackageError", ["'ortools'", "pip install 'keras-remat[solvers]'"]),
    ],
)
def test_messages_say_the_numbers_and_what_to_do(name, parts):
    for part in parts:
        assert part in str(EXAMPLES[name])


def test_advice_replaces_the_default():
    message = str(errors.InfeasibleBudgetError(5, 7, None, advice="Use batch 4."))
    assert message.endswith("Use batch 4.")
    assert "every schedule needs 7 B" in message


def test_advice_is_worked_out_when_the_message_is_asked_for_and_once():
    asked = []

    def advice():
        asked.append(None)
        return "Use batch 4."

    error = errors.ScheduleNotFoundError(8, 7, 9, advice=advice)
    assert errors.statement_of(error).endswith("(the best found needs 9 B; the floor is 7 B).")
    assert errors.statement_of(ValueError("why")) == "why"
    retold = error.with_context(solver="dtr", advice=advice)
    assert not asked
    for told in (str(retold), str(retold), str(pickle.loads(pickle.dumps(retold)))):
        assert told.startswith("dtr: ")
        assert told.endswith("Use batch 4.")
    assert len(asked) == 1
    nothing = errors.ScheduleNotFoundError(8, 7, advice=lambda: "")
    assert str(nothing).endswith("or use a smaller batch.")


def test_what_a_search_has_proved_is_more_than_the_budget_and_not_how_much():
    message = str(errors.InfeasibleBudgetError(5, 6, by_search=True))
    assert "every schedule needs more; how much more is not known." in message
    assert "6" not in message
    assert "at least" not in message


def test_numbers_that_round_alike_are_told_exactly():
    limit = 8 * 2**30
    messages = [
        errors.PeakExceededError(limit + 1, limit),
        errors.InfeasibleBudgetError(limit, limit + 1),
        errors.ScheduleNotFoundError(limit, 7, limit + 1),
    ]
    for error in messages:
        assert str(limit) in str(error)
        assert str(limit + 1) in str(error)


def test_the_users_own_number_comes_first_and_the_advice_works():
    error = errors.InfeasibleBudgetError(95 * 2**20, 190 * 2**20, "conv", limit_bytes=100 * 2**20)
    assert str(error).startswith("No schedule fits your limit of 100 MiB less 5 % margin = 95 MiB:")
    assert "at least 200.01 MiB" in str(error)
    assert errors.limit_for(190 * 2**20, 95 * 2**20, 100 * 2**20) * 0.95 >= 190 * 2**20
    not_found = errors.ScheduleNotFoundError(95, 7, 99, solver="dtr", limit_bytes=100)
    assert "under your limit of 100 B less 5 % margin = 95 B" in str(not_found)


@pytest.mark.parametrize("floor", [7, 1023, 5_000_000, 123_456_789, 9_999_999_999])
def test_the_limit_that_is_advised_is_enough(floor):
    advised = re.search(r"at least ([\d.]+ \w+)", str(errors.InfeasibleBudgetError(5, floor)))[1]
    assert parse_bytes(advised) >= floor


def test_builtin_bases():
    assert isinstance(EXAMPLES["InvalidScheduleError"], ValueError)
    assert isinstance(EXAMPLES["InvalidProblemError"], ValueError)
    assert isinstance(EXAMPLES["MissingPackageError"], ImportError)
    assert "pip install cylp" in str(errors.MissingPackageError("cylp", "CBC"))


@errors.without_inner_frames
def entry(error):
    def inner():
        raise error

    inner()


def frames(error):
    with pytest.raises(type(error)) as caught:
        entry(error)
    return [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]


def test_errors_of_the_package_come_without_its_inner_frames(monkeypatch):
    keras = types.SimpleNamespace(config=types.SimpleNamespace())
    monkeypatch.setitem(sys.modules, "keras", keras)
    keras.config.is_traceback_filtering_enabled = lambda: True
    error = errors.UnsupportedModelError("no")
    error.__cause__ = ValueError("why")
    assert frames(error) == ["frames", "called"]
    assert isinstance(error.__cause__, ValueError)
    assert frames(ValueError("a defect"))[-2:] == ["entry", "inner"]
    keras.config.is_traceback_filtering_enabled = lambda: False
    assert frames(errors.UnsupportedModelError("no"))[-2:] == ["entry", "inner"]
