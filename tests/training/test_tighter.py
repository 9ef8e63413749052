"""Which plan follows one in slices that measured over the limit."""

from types import SimpleNamespace

import pytest

from keras_remat.errors import ScheduleNotFoundError
from keras_remat.training import tighter


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
    problem = SimpleNamespace(store_all_time_s=1.0)
    costs = SimpleNamespace(problem=problem, is_whole=is_whole)
    costs.as_whole = costs
    shape = SimpleNamespace(
        costs=costs, batch_size=8, peak_bytes=2, tries=SimpleNamespace(replan_failed=False)
    )
    tools = SimpleNamespace(plans=plans, known=lambda _: None)
    if is_whole and same_s is not None:  # slices are for where whole ops have no plan
        compared, taken_s = False, same_s
    found, its = tighter.tighter(tools, shape, 3, ())
    assert found.predicted.time_s == taken_s
    assert (its == "others") == (taken_s == others_s)
    assert asked == ([float("inf") if same_s is None else same_s] if compared else [])
