"""Which plan follows one in slices that measured over the limit."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from keras_remat.core.limit import Limit
from keras_remat.errors import InfeasibleBudgetError, ScheduleNotFoundError
from keras_remat.training import tighter


@dataclass(frozen=True)
class Request:
    """What of a request decides what is asked for."""

    below_bytes: int | None
    avoid: frozenset = frozenset()
    failure: Exception | None = None


@pytest.mark.parametrize(
    ("same_s", "others_s", "compared", "taken_s"),
    [
        (1.2, 1.1, False, 1.2),
        (3.0, 1.1, True, 1.1),
        (3.0, 4.0, True, 3.0),
        (3.0, None, True, 3.0),
        (None, 4.0, True, 4.0),
    ],
    ids=["cheap", "others are cheaper", "others are dearer", "no others", "others alone"],
)
@pytest.mark.parametrize("is_whole", [False, True])
def test_a_dear_tighter_plan_is_compared_with_other_slices(
    is_whole, same_s, others_s, compared, taken_s, monkeypatch
):
    """The whole step takes a second."""
    asked = []

    def plan_of(time_s):
        if time_s is None:
            raise ScheduleNotFoundError(1, 0)
        return SimpleNamespace(predicted=SimpleNamespace(time_s=time_s))

    def in_slices(shape, costs, error, below_s=float("inf")):
        asked.append(below_s)
        if others_s is None or others_s >= below_s:
            raise error
        return plan_of(others_s), "others"

    monkeypatch.setattr(tighter, "plan_for", lambda request: plan_of(same_s))
    plans = SimpleNamespace(
        request=lambda *_, **__: None,
        reused=lambda *_: None,
        not_found=lambda *_: ScheduleNotFoundError(1, 0),
        in_slices=in_slices,
    )
    problem = SimpleNamespace(store_all_time_s=1.0, floor_bytes=1)
    costs = SimpleNamespace(problem=problem, is_whole=is_whole)
    costs.as_whole = costs
    shape = SimpleNamespace(
        costs=costs, batch_size=8, peak_bytes=2, tries=SimpleNamespace(replan_failed=False)
    )
    fit = SimpleNamespace(limit=Limit(2, 0.0))
    tools = SimpleNamespace(plans=plans, fit=fit, known=lambda _: None)
    if is_whole and same_s is not None:  # slices are for where whole ops have no plan
        compared, taken_s = False, same_s
    found, its = tighter.tighter(tools, shape, 3, ())
    assert found.predicted.time_s == taken_s
    assert (its == "others") == (taken_s == others_s)
    assert asked == ([float("inf") if same_s is None else same_s] if compared else [])


@pytest.mark.parametrize("helps", [True, False], ids=["slices help", "nothing helps"])
@pytest.mark.parametrize("known", [True, False], ids=["failed before", "not asked before"])
def test_slices_come_before_the_least_plan_of_whole_ops_where_one_op_needs_too_much(
    known, helps, monkeypatch
):
    asked = []

    def plan_for(request):
        asked.append("limit" if request.below_bytes is None else "least")
        if asked[-1] == "limit":
            raise InfeasibleBudgetError(2, 3, "op")
        return "least"

    def in_slices(shape, costs, error):
        asked.append("slices")
        if not helps:
            raise error
        return "slices", costs

    monkeypatch.setattr(tighter, "plan_for", plan_for)
    plans = SimpleNamespace(
        request=lambda problem, batch_size, **asked: Request(**asked),
        reused=lambda *_: None,
        not_found=lambda *_: InfeasibleBudgetError(2, 3, "op"),
        in_slices=in_slices,
    )
    costs = SimpleNamespace(problem=SimpleNamespace(floor_bytes=3), is_whole=True)
    tries = SimpleNamespace(replan_failed=known)
    shape = SimpleNamespace(costs=costs, batch_size=8, peak_bytes=4, tries=tries)
    fit = SimpleNamespace(limit=Limit(2, 0.0))
    tools = SimpleNamespace(plans=plans, fit=fit, known=lambda _: None)
    found, _ = tighter.tighter(tools, shape, 4, ())
    tried = ["limit", "slices", *([] if helps else ["least"])]
    assert (found, asked) == (tried[-1], tried)
