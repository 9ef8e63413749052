"""Plans: files, and the cache."""

import json
from dataclasses import replace

import pytest
from fake_backend import chain_problem, quick_plan, store_all_peak

from keras_remat.core.graph import Graph, Op, Value
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule, Solution, Usage
from keras_remat.core.writing import Writing
from keras_remat.errors import (
    InvalidProblemError,
    InvalidScheduleError,
    PlanMismatchError,
)
from keras_remat.planning.plan import Plan, load_plan, plan_from_dict
from keras_remat.units import format_bytes

SIZE = 64
PROBLEM = chain_problem(SIZE)
PLAIN = store_all_peak(SIZE)
BUDGET = int(PLAIN * 0.7)


# ------------------------------------------------------------------ files

PLANS = {
    "as planned": quick_plan(PROBLEM, BUDGET),
    "measured, no problem": replace(
        quick_plan(PROBLEM, BUDGET), measured=Usage(0.1 + 0.2, 2**53 + 1), problem=None
    ),
    "bound": Plan(
        "f" * 64,
        2**60,
        Solution(Schedule((0, 1, 0)), "auto", "optimal", 1e-9, 1 / 3, Usage(2 / 3, 7)),
        Usage(0.1, 3),
        Usage(2 / 3, 7),
        None,
        "measured",
        "GPU:0",
        "a model",
    ),
    "for a card": replace(
        quick_plan(PROBLEM, BUDGET), card="H100", compiled=Usage(1 / 3, 2**53 + 1)
    ),
    "written in its own way": replace(quick_plan(PROBLEM, BUDGET), writing=Writing.UPDATED),
    "counts no small array": replace(quick_plan(PROBLEM, BUDGET), smallest_bytes=2**18),
    "no usage, empty": Plan(
        "", 1, Solution(Schedule(()), "x", "feasible", 0.0), Usage(0.0, 0), Usage(0.0, 0)
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_saved_plan_comes_back_as_it_was(name, tmp_path):
    plan = PLANS[name]
    plan.save(tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json")
    assert loaded == plan
    assert loaded.problem == plan.problem
    assert loaded.to_dict() == plan.to_dict()


def test_a_file_of_before_there_were_cards_loads():
    plan = plan_from_dict(edited(card=..., compiled=...))
    assert (plan.card, plan.compiled, plan.writing) == (None, None, None)


def test_an_unknown_way_of_writing_is_refused_with_those_that_are_known():
    with pytest.raises(InvalidProblemError, match="'held', 'strict'; got 'folded'"):
        plan_from_dict(edited(writing="folded"))


def edited(**changes):
    """The JSON object of a plan with fields replaced; ``solution__order`` means
    ``["solution"]["order"]``, ``...`` takes away."""
    document = json.loads(json.dumps(PLANS["as planned"].to_dict()))
    for path, value in changes.items():
        *outer, key = path.split("__")
        target = document
        for part in outer:
            target = target[part]
        if value is ...:
            del target[key]
        else:
            target[key] = value
    return document


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "keras_remat.problem"},
        {"version": 2},
        {"version": "1"},
        {"solution": ...},
        {"solution": []},
        {"solution": None},
        {"solution__order": ...},
        {"solution__order": 3},
        {"solution__order": [0, "1"]},
        {"solution__order": [0, -1]},
        {"solution__order": [0.5]},
        {"solution__order": [0, 99]},
        {"solution__order": [1, 0]},
        {"solution__status": "guessed"},
        {"solution__lower_bound_s": "soon"},
        {"solution__lower_bound_s": float("nan")},
        {"solution__usage": 5},
        {"fingerprint": ...},
        {"fingerprint": 12},
        {"budget_bytes": "8GiB"},
        {"budget_bytes": None},
        {"budget_bytes": 0},
        {"budget_bytes": float("inf")},
        {"store_all": None},
        {"predicted": {"time_s": 1.0}},
        {"predicted": {"time_s": 1.0, "peak_bytes": float("inf")}},
        {"predicted": {"time_s": float("nan"), "peak_bytes": 1}},
        {"predicted": {"time_s": 1.0, "peak_bytes": -1}},
        {"measured": {"time_s": -1.0, "peak_bytes": 1}},
        {"measured": "yes"},
        {"profile_source": "guessed"},
        {"device": 0},
        {"name": None},
        {"problem": 3},
        {"writing": 2},
        {"problem__ops": None},
        {"problem__outputs": [10**6]},
    ],
    ids=str,
)
def test_malformed_plan_file_is_refused_by_name(changes, tmp_path):
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(edited(**changes)))
    with pytest.raises(InvalidProblemError, match=r"broken\.json"):
        load_plan(path)


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "\x00"])
def test_what_is_no_json_object_is_refused(text, tmp_path):
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(InvalidProblemError, match=r"broken\.json"):
        load_plan(path)


def test_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_plan(tmp_path / "nowhere.json")


# ------------------------------------------------------------------ a plan and its graph


def test_plan_fits_its_own_graph_only():
    plan = quick_plan(PROBLEM, BUDGET)
    plan.check(PROBLEM)
    with pytest.raises(PlanMismatchError) as caught:
        plan.check(chain_problem(SIZE + 1))
    assert caught.value.plan_fingerprint == PROBLEM.graph.fingerprint
    assert caught.value.graph_fingerprint == chain_problem(SIZE + 1).graph.fingerprint


def test_a_plan_for_other_data_says_what_differs():
    def reading(*dtypes):
        data = [Value(i, f"y{i}", 64, (16,), dtype) for i, dtype in enumerate(dtypes)]
        loss = Op(0, "loss", "Loss", tuple(range(len(data))), (len(data),))
        graph = Graph((loss,), (*data, Value(len(data), "l", 4, (), None, 0)), (len(data),))
        return Problem(graph, Profile((1.0,), (0,), 100))

    plan = replace(quick_plan(PROBLEM, BUDGET), fingerprint="other", problem=reading("int32"))
    other = r"reads int32 \(16,\) where .* int64 \(16,\): .* that fit trains\.$"
    with pytest.raises(PlanMismatchError, match=other):
        plan.check(reading("int64"))
    with pytest.raises(PlanMismatchError, match=r"reads nothing where .* float32 .* class_weight"):
        plan.check(reading("int32", "float32"))


def test_order_that_is_not_legal_is_refused_under_the_right_fingerprint():
    plan = quick_plan(PROBLEM, BUDGET)
    broken = replace(
        plan, solution=replace(plan.solution, schedule=Schedule(tuple(reversed(range(16)))))
    )
    with pytest.raises(InvalidScheduleError, match="S1"):
        broken.check(PROBLEM)


def test_text_has_the_numbers_and_where_they_are_from():
    plan = quick_plan(PROBLEM, BUDGET)
    assert "not measured yet" in str(plan)
    assert "estimated" in str(plan)
    assert plan.recomputes
    assert plan.overhead == pytest.approx(plan.predicted.time_s / 16 - 1)
    told = replace(plan, compiled=Usage(20.0, 1024))
    assert told.overhead == pytest.approx(20 / 16 - 1)
    assert "overhead 25.0% by what the compiler made of it" in str(told)
    assert "1 KiB measured" in str(replace(plan, measured=Usage(1.0, 1024)))


@pytest.mark.parametrize("smallest_bytes", [0, 2, SIZE * 1024, SIZE * 1024 + 1])
def test_what_a_device_does_not_count_is_told_beside_the_peak(smallest_bytes):
    """All values of the chain have as many bytes; a batch would be one without a producer."""
    plan = quick_plan(PROBLEM, BUDGET)
    held = plan.solution.usage.peak_bytes - PROBLEM.profile.resident_bytes
    plan = replace(
        plan, smallest_bytes=smallest_bytes, predicted=replace(plan.predicted, peak_bytes=0)
    )
    is_told = smallest_bytes > SIZE * 1024
    assert plan.uncounted_bytes == (held if is_told else 0)
    for text in (str(plan), plan.summary()):
        assert ("which the device does not count" in text) == is_told
        assert (f"up to {format_bytes(held)} in arrays below" in text) == is_told
    assert replace(plan, problem=None).uncounted_bytes == 0


def test_what_is_little_beside_the_peak_is_not_told():
    plan = replace(quick_plan(PROBLEM, BUDGET), smallest_bytes=2**18)
    much = replace(plan, predicted=replace(plan.predicted, peak_bytes=10 * plan.uncounted_bytes))
    assert "does not count" in str(plan)
    assert "does not count" not in str(much)
