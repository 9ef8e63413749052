"""Which ops are put into slices, what that costs, and what is said where it does not help."""

from dataclasses import replace
from itertools import pairwise
from math import inf
from types import SimpleNamespace

import pytest

from keras_remat.backends.base import TracedStep, Whole
from keras_remat.backends.memory import SimulatedMemory
from keras_remat.core.graph import Graph, Op, Value
from keras_remat.core.limit import Limit
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule
from keras_remat.core.slices import SliceRule, Slicing, sliced_graph
from keras_remat.core.target import CPU_RATES
from keras_remat.errors import (
    InfeasibleBudgetError,
    InvalidProblemError,
    PlanMismatchError,
    ScheduleNotFoundError,
    UnsupportedModelError,
)
from keras_remat.planning.plan import load_plan, plan_from_dict
from keras_remat.planning.request import PlanRequest
from keras_remat.planning.slice_candidates import able_ops, candidates, grown
from keras_remat.planning.slice_costs import costs_of, ends_bytes, sliced_costs, undivided_scratch
from keras_remat.planning.slicing import (
    SlicingOptions,
    in_micro_batches,
    in_slices_of,
    plan_in_slices,
    plan_with_slices,
    told_whole,
)
from keras_remat.solvers.search import greedy
from tests.solvers.brute_force import fastest


class CoreSlicer:
    """Rewrites the graph alone, by given rules."""

    granule_bytes = 1

    def __init__(self, step, rules):
        self.step, self.rules = replace(step, slicer=self), rules

    def sliced(self, slicing):
        rewrite = sliced_graph(self.step.graph, self.rules, slicing)
        return TracedStep(rewrite.graph, {}, whole=Whole(self.step, rewrite))


def estimate(traced):
    n = len(traced.graph.ops)
    return Profile((1.0,) * n, (0,) * n, 100, "estimated")


def head(large=64, weights=8):
    """A product to a large vocabulary, its loss, and both gradients: ``h → logits → (loss, d) →
    (of_h, of_w)``; the gradient of the weights is a sum over the samples."""
    sizes = {"h": 4, "logits": large, "loss": 1, "d": large, "of_h": 4, "of_w": weights, "end": 1}
    ids = {name: at for at, name in enumerate(sizes)}
    ops = [
        Op(0, "h", "h", (), (ids["h"],)),
        Op(1, "logits", "MatMul", (ids["h"],), (ids["logits"],)),
        Op(2, "loss", "Loss", (ids["logits"],), (ids["loss"], ids["d"])),
        Op(3, "of_h", "MatMul", (ids["d"],), (ids["of_h"],), "backward"),
        Op(4, "of_w", "MatMul", (ids["h"], ids["d"]), (ids["of_w"],), "backward"),
        Op(5, "end", "End", (ids["of_h"], ids["of_w"], ids["loss"]), (ids["end"],), "update"),
    ]
    made = {v: op.id for op in ops for v in op.outputs}
    values = [Value(ids[n], n, size, producer=made[ids[n]]) for n, size in sizes.items()]
    graph = Graph(tuple(ops), tuple(values), (ids["end"],))
    one = frozenset
    rules = {
        1: SliceRule(one({0}), divides=64),
        2: SliceRule(one({1}), sums=one({ids["loss"]}), divides=64),
        3: SliceRule(one({ids["d"]}), divides=64),
        4: SliceRule(one({0, ids["d"]}), sums=one({ids["of_w"]}), divides=64),
    }
    step = TracedStep(graph, {})
    step = replace(step, slicer=CoreSlicer(step, rules))
    return step, Problem(graph, estimate(step)), rules


def request_for(problem, budget):
    return PlanRequest(
        problem=problem,
        batch_size=64,
        limit=Limit(budget, 0.0),
        memory=SimulatedMemory(),
        auto_solver="auto",
        seconds=4.0,
    )


def test_parts_cost_their_share_and_glue_what_it_moves():
    step, problem, rules = head()
    profile = Profile((1.0, 2.0, 3.0, 4.0, 5.0, 6.0), (0, 8, 16, 0, 3, 0), 7)
    problem = replace(problem, profile=profile)
    sliced = sliced_graph(step.graph, rules, Slicing((1, 2, 3, 4), 4))
    costs = sliced_costs(problem, sliced, [0] * len(sliced.graph.ops))
    by_name = dict(zip((op.name for op in costs.graph.ops), costs.profile.op_time_s, strict=True))
    scratch = dict(
        zip((op.name for op in costs.graph.ops), costs.profile.op_workspace_bytes, strict=True)
    )
    assert by_name["logits/slice_1"] == 0.5
    assert by_name["end"] == 6.0
    assert scratch["loss/slice_3"] == 4
    assert scratch["of_w/slice_0"] == 1
    assert 0 < by_name["h/cut_0"] < by_name["of_w/sum_1"] < 1e-4
    assert by_name["of_h/join_1"] == by_name["h/cut_0"]  # a byte is read and written
    assert by_name["of_h/joined"] == CPU_RATES.seconds_per_kernel
    assert costs.profile.resident_bytes == 7
    whole = Whole(step, sliced).problem(costs)
    assert whole.graph is step.graph
    assert whole.profile.op_time_s == pytest.approx(profile.op_time_s)
    assert all(
        a >= b
        for a, b in zip(whole.profile.op_workspace_bytes, profile.op_workspace_bytes, strict=True)
    )


def test_a_kernel_that_asks_for_as_much_for_a_part_is_expected_to():
    """Of the losses 16 bytes are expected however many samples there are, and 40 are seen."""
    step, problem, _ = head()

    def expect(traced):
        scratch = tuple(16 * (op.kind == "Loss") for op in traced.graph.ops)
        return replace(estimate(traced), op_workspace_bytes=scratch)

    def of_loss(costs):
        scratch = costs.profile.op_workspace_bytes
        return {scratch[op.id] for op in costs.graph.ops if op.kind == "Loss"}

    whole = replace(problem, profile=replace(expect(step), source="measured"))
    sliced = step.slicer.sliced(Slicing((1, 2, 3, 4), 4))
    sliced, costs = costs_of(sliced, whole, expect)
    assert of_loss(costs) == {16}
    assert of_loss(sliced.whole.problem(costs)) == {16}  # and not four times as much
    assert of_loss(costs_of(sliced, whole, estimate)[1]) == {4}  # nothing is expected

    assert undivided_scratch(step, whole, expect) == {}
    asked = tuple(
        (40 - origin.part) * (op.kind == "Loss")
        for op, origin in zip(costs.graph.ops, sliced.whole.sliced.origins, strict=True)
    )
    seen = replace(costs, profile=replace(costs.profile, op_workspace_bytes=asked))
    undivided = undivided_scratch(sliced, seen, expect)
    assert undivided == {2: 24}
    more = step.slicer.sliced(Slicing((1, 2, 3, 4), 16))
    again = sliced.whole.problem(seen)
    assert of_loss(costs_of(more, again, expect, undivided)[1]) == {40}
    asks = replace(again.profile, op_workspace_bytes=(1600,) * len(again.graph.ops))
    larger = replace(again, profile=asks)  # a part's share is more than what was not divided
    assert of_loss(costs_of(more, larger, expect, undivided)[1]) == {100}


def test_what_slices_did_not_divide_is_not_planned_for_in_more_of_them():
    """What 4 slices of the loss were seen to ask for is too much in any number of them."""
    step, problem, _ = head()
    failure = InfeasibleBudgetError(164, problem.floor_bytes, "loss")
    sliced, costs = costs_of(step.slicer.sliced(Slicing((1, 2, 3, 4), 4)), problem, estimate)
    asked = tuple(70 * (op.kind == "Loss") for op in costs.graph.ops)
    profile = replace(costs.profile, op_workspace_bytes=asked, source="measured")
    seen = sliced, replace(costs, profile=profile)
    whole = sliced.whole.problem(seen[1])
    with pytest.raises(InfeasibleBudgetError) as caught:
        plan_in_slices(step, request_for(whole, 164), estimate, failure, seen=seen)
    assert caught.value.floor_bytes > 100 + 70


def test_a_step_below_its_floor_is_planned_in_the_fewest_slices_that_do():
    step, problem, _ = head()
    assert problem.floor_bytes == 100 + 64 + 64 + 1
    traced, costs, plan = plan_with_slices(step, request_for(problem, 100 + 64), estimate)
    assert traced.slicing == Slicing((1, 2, 3, 4), 4)
    plan = told_whole(plan, traced, costs, SimulatedMemory())
    assert plan.slicing == traced.slicing
    assert plan.predicted.peak_bytes <= 164 < plan.store_all.peak_bytes
    plan.check(costs)
    assert "4 ops run in 4 slices" in str(plan)
    assert "4 ops run in 4 slices" in plan.summary()


def test_where_a_plan_for_the_whole_step_fits_no_slices_are_asked_for():
    step, problem, _ = head()
    step = replace(step, slicer=None)
    traced, costs, plan = plan_with_slices(step, request_for(problem, 1000), estimate)
    assert (traced, costs) == (step, problem)
    assert told_whole(plan, traced, costs, SimulatedMemory()).slicing is None


def update(read=8, written=8):
    """One op between whole values, as an update of a weight is, in place: ``h → d → end``."""
    ops = tuple(
        Op(i, "hde"[i], "", (i - 1,) if i else (), (i,), may_reuse=(0,) * (i == 1))
        for i in range(3)
    )
    sizes = (read, written, 1)
    values = tuple(Value(i, "hde"[i], sizes[i], producer=i) for i in range(3))
    step = TracedStep(Graph(ops, values, (2,)), {})
    step = replace(step, slicer=CoreSlicer(step, {1: SliceRule(frozenset({0}), divides=64)}))
    return step, Problem(step.graph, estimate(step))


@pytest.mark.parametrize(("read", "written"), [(8, 8), (8, 4), (4, 8)])
def test_an_op_between_whole_values_needs_both_however_it_is_sliced(read, written):
    """Brute force agrees; of the ops alone, none does."""
    step, problem = update(read, written)
    rules, slicing = step.slicer.rules, Slicing((1,), 2)
    needed = 100 + ends_bytes(problem.graph, rules, slicing)
    _, costs = costs_of(step.slicer.sliced(slicing), problem, estimate)
    assert needed == 100 + written + min(read, written)
    assert fastest(costs.with_budget(needed - 1), any_order=True) is None
    found = list(candidates(problem, rules, 100 + written))
    assert found
    assert all(ends_bytes(problem.graph, rules, one) == needed - 100 for one in found)


def test_slices_of_updates_alone_are_not_solved_for():
    step, problem = update(640, 640)
    asked = []

    def door(request):
        asked.append(request)
        raise ScheduleNotFoundError(request.limit.usable_bytes, request.problem.floor_bytes)

    failure = ScheduleNotFoundError(1000, problem.floor_bytes)
    with pytest.raises(ScheduleNotFoundError):
        plan_in_slices(step, request_for(problem, 1000), estimate, failure, door)
    assert asked == []


def test_once_the_time_is_over_slices_are_looked_for_by_the_quick_solver_alone():
    step, problem, _ = head(large=6400)
    asked = []

    def refuse(request):
        asked.append(request.solver)
        raise ScheduleNotFoundError(request.limit.usable_bytes, request.problem.floor_bytes)

    failure = ScheduleNotFoundError(3400, problem.floor_bytes)
    for clock_s in (0.0, 1e6):
        request = replace(request_for(problem, 100 + 5000), clock_s=clock_s)
        with pytest.raises(ScheduleNotFoundError):
            plan_in_slices(step, request, estimate, failure, refuse)
    assert asked == ["greedy_first"] * 4 + ["auto"] * 4


@pytest.mark.parametrize(("look_s", "left"), [(1.0, 7), (float("inf"), 0)])
def test_room_is_left_free_only_where_a_look_at_all_of_it_found_something(
    look_s, left, monkeypatch
):
    step, problem, _ = head(large=6400)
    asked = []

    def refuse(request):
        asked.append(request.headroom_bytes)
        raise ScheduleNotFoundError(request.limit.usable_bytes, request.problem.floor_bytes)

    monkeypatch.setattr("keras_remat.planning.slicing._look", lambda *_: look_s)
    failure = ScheduleNotFoundError(3400, problem.floor_bytes)
    request = replace(request_for(problem, 100 + 5000), headroom_bytes=7)
    with pytest.raises(ScheduleNotFoundError):
        plan_in_slices(step, request, estimate, failure, refuse)
    assert asked == [left] * 4


def test_where_all_time_is_spent_no_way_is_tried_after_the_first_one(monkeypatch):
    options = "keras_remat.planning.slicing.OPTIONS"
    monkeypatch.setattr(options, SlicingOptions(most_s=0.0))
    step, problem, _ = head(large=6400)
    asked = []

    def refuse(request):
        asked.append(request)
        raise ScheduleNotFoundError(request.limit.usable_bytes, request.problem.floor_bytes)

    request = replace(request_for(problem, 100 + 5000), seconds=1e-6)
    failure = ScheduleNotFoundError(3400, problem.floor_bytes)
    with pytest.raises(ScheduleNotFoundError):
        plan_in_slices(step, request, estimate, failure, refuse)
    assert len(asked) == 1


def test_a_refusal_names_the_op_that_needs_most_in_slices():
    step, problem, _ = head(weights=50)
    with pytest.raises(InfeasibleBudgetError) as caught:
        plan_with_slices(step, request_for(problem, 190), estimate)
    assert caught.value.op_name.startswith("of_w/sum")
    assert caught.value.floor_bytes == 100 + 2 * 50


def test_a_refusal_tells_the_floor_in_slices_where_it_leaves_no_room_for_a_schedule():
    step, problem, _ = head(weights=50)
    with pytest.raises(ScheduleNotFoundError) as caught:
        plan_with_slices(step, request_for(problem, 205), estimate)
    assert caught.value.floor_bytes == 100 + 2 * 50 < 205 < problem.floor_bytes


def test_a_refusal_tells_the_least_that_was_found_and_hands_on_no_schedule_in_slices():
    """One that was found tells more than a lower floor; and its ops are not the whole step's."""
    step, problem, _ = head(large=6400)
    best = iter([None, 5400, 5200, None])

    def refuse(request):
        peak, usable = next(best), request.limit.usable_bytes
        floor = request.problem.floor_bytes
        raise ScheduleNotFoundError(usable, floor, peak, least_over_limit=peak and object())

    failure = ScheduleNotFoundError(100 + 5000, problem.floor_bytes)
    with pytest.raises(ScheduleNotFoundError) as caught:
        plan_in_slices(step, request_for(problem, 100 + 5000), estimate, failure, refuse)
    assert caught.value.best_peak_bytes == 5200
    assert caught.value.least_over_limit is None


@pytest.mark.parametrize("is_proved", [False, True])
def test_a_refusal_tells_of_whole_ops_where_they_have_room_and_slices_have_nothing(is_proved):
    """A limit is advised for what is told. In slices, which are slower to ask, a BiLSTM's was over
    the plain step's peak, where whole ops did with a third of it."""
    step, problem, _ = head(large=6400)

    def refuse(request):
        raise ScheduleNotFoundError(request.limit.usable_bytes, request.problem.floor_bytes)

    failure = ScheduleNotFoundError(100 + 5000, problem.floor_bytes)
    if is_proved:
        failure = InfeasibleBudgetError(100 + 5000, problem.floor_bytes, "loss")
    with pytest.raises(ScheduleNotFoundError) as caught:
        plan_in_slices(step, request_for(problem, 100 + 5000), estimate, failure, refuse)
    assert (caught.value is failure) == (not is_proved)
    assert (caught.value.floor_bytes < problem.floor_bytes) == is_proved


def test_a_log_of_all_that_failed_asks_for_no_advice(caplog):
    """Advice takes a few plans, and that many times as long."""
    step, problem, _ = head(large=6400)
    asked = []

    def refuse(request):
        usable, floor = request.limit.usable_bytes, request.problem.floor_bytes
        raise ScheduleNotFoundError(usable, floor, advice=lambda: asked.append(floor) or "")

    failure = ScheduleNotFoundError(100 + 5000, problem.floor_bytes)
    with caplog.at_level("DEBUG", "keras_remat"), pytest.raises(ScheduleNotFoundError):
        plan_in_slices(step, request_for(problem, 100 + 5000), estimate, failure, refuse)
    assert "no schedule found" in caplog.text
    assert asked == []


def test_what_has_no_slices_is_refused_as_before():
    step, problem, _ = head()
    failure = InfeasibleBudgetError(164, problem.floor_bytes, "loss")
    step = replace(step, slicer=None)
    with pytest.raises(InfeasibleBudgetError) as caught:
        plan_in_slices(step, request_for(problem, 164), estimate, failure)
    assert caught.value is failure


class RefusingSlicer(CoreSlicer):
    """Finds only when it writes them that some parts cannot be."""

    def sliced(self, slicing):
        if slicing.parts == 4:
            raise InvalidProblemError("a part lies in another way", field="slices.ops")
        return super().sliced(slicing)


def test_slices_that_cannot_be_written_are_passed_over():
    step, problem, rules = head()
    step = replace(step, slicer=RefusingSlicer(step, rules))
    traced, _, plan = plan_with_slices(step, request_for(problem, 164), estimate)
    assert traced.slicing.parts > 4
    assert plan.predicted.peak_bytes <= 164
    with pytest.raises(UnsupportedModelError, match=r"in 4 slices: .*another way"):
        in_micro_batches(step, problem, 64, 4, estimate)


def test_candidates_are_few_with_more_and_more_parts():
    _, problem, rules = head()
    found = list(candidates(problem, rules, 164))
    assert [one.parts for one in found] == sorted(one.parts for one in found)
    assert len(found) <= 12
    assert list(candidates(problem, rules, 100)) == []  # nothing is left beside what is resident
    fewer = {op_id: replace(rule, divides=6) for op_id, rule in rules.items()}
    assert {one.parts for one in candidates(problem, fewer, 164)} == {2}


def test_after_a_failure_what_needs_much_less_is_tried_first():
    """Each next one needs about half of what failed; where none does, the others come."""
    step, problem, _ = head(large=6400)
    floors = []

    def refuse(request):
        floors.append(request.problem.floor_bytes - 100)
        raise ScheduleNotFoundError(request.limit.usable_bytes, request.problem.floor_bytes)

    failure = ScheduleNotFoundError(3400, problem.floor_bytes)
    with pytest.raises(ScheduleNotFoundError):
        plan_in_slices(step, request_for(problem, 100 + 5000), estimate, failure, refuse)
    assert len(floors) == 4
    assert all(after <= 0.6 * before for before, after in pairwise(floors))
    floors.clear()
    step, problem, _ = head(large=6400, weights=900)  # of which two are added up
    with pytest.raises(ScheduleNotFoundError):
        plan_in_slices(step, request_for(problem, 100 + 5000), estimate, failure, refuse)
    assert floors[0] > floors[1] == floors[2] == floors[3] == 2 * 900


@pytest.mark.parametrize(
    ("clock_s", "in_four_s", "looked"),
    [(60.0, 70.0, [2, 4, 8, 16]), (0.0, 70.0, [2, 4, 8, 16]), (60.0, 6.5, [2, 4])],
    ids=["all are dear", "all are, and it is late", "one is cheap"],
)
def test_of_dear_ways_to_slice_a_step_the_cheapest_is_taken(
    clock_s, in_four_s, looked, monkeypatch
):
    """A cheap one is taken at once. The whole step takes 6 seconds."""
    step, problem, _ = head(large=6400)
    seconds, looks, tries, bounds = {2: 90.0, 4: in_four_s, 8: inf, 16: 80.0}, [], [], []

    def look(costs, request, below_s):
        looks.append(parts_of(costs.graph))
        bounds.append(below_s)
        return seconds[looks[-1]]

    def refuse(request):
        tries.append((list(looks), parts_of(request.problem.graph)))
        raise ScheduleNotFoundError(request.limit.usable_bytes, request.problem.floor_bytes)

    monkeypatch.setattr("keras_remat.planning.slicing._look", look)
    request = replace(request_for(problem, 100 + 8000), clock_s=clock_s)
    failure = ScheduleNotFoundError(8100, problem.floor_bytes)
    with pytest.raises(ScheduleNotFoundError):
        plan_in_slices(step, request, estimate, failure, refuse)
    assert tries[0][0] == looked
    assert [parts for _, parts in tries] == [4, 16, 2, 8]
    assert bounds == [inf, 90.0, in_four_s, in_four_s]


def test_where_a_plan_is_known_only_faster_ways_to_slice_a_step_are_tried(monkeypatch):
    step, problem, _ = head(large=6400)
    seconds, tries = {2: inf, 4: 70.0, 8: inf, 16: 80.0}, []

    def look(costs, request, below_s):
        return seconds[parts_of(costs.graph)]

    def refuse(request):
        tries.append(parts_of(request.problem.graph))
        raise ScheduleNotFoundError(request.limit.usable_bytes, request.problem.floor_bytes)

    monkeypatch.setattr("keras_remat.planning.slicing._look", look)
    request = request_for(problem, 100 + 8000)
    failure = ScheduleNotFoundError(8100, problem.floor_bytes)
    with pytest.raises(ScheduleNotFoundError):
        plan_in_slices(step, request, estimate, failure, refuse, below_s=90.0)
    assert tries == [4, 16]


def test_what_a_look_finds_is_not_searched_again(monkeypatch):
    step, problem, _ = head()
    request = request_for(problem, 164)
    looks = []

    def look(problem, below_s):
        looks.append(greedy.look(problem, below_s))
        return looks[-1]

    def refuse(*_):
        raise AssertionError("it was found in a look")

    monkeypatch.setattr("keras_remat.planning.slicing.greedy", SimpleNamespace(look=look))
    monkeypatch.setattr(greedy, "candidates", refuse)
    *_, plan = plan_with_slices(step, replace(request, solver="greedy_first"), estimate)
    assert plan.solution.schedule.order in looks


def parts_of(graph):
    """How many parts the losses of a head are in."""
    return sum(op.kind == "Loss" for op in graph.ops)


def grown_from(seeds, **changes):
    """The ops that run in slices with some of ``a → b → m → c → d → e``. What a, c and d make is
    large, and d adds it up; c reads what f makes of a step input, and l makes what nobody reads."""
    reads = {
        "a": (0,),
        "b": (1,),
        "m": (2,),
        "f": (0,),
        "c": (3, 4),
        "d": (5,),
        "e": (6,),
        "l": (0,),
    }
    names = "".join(reads)
    ops = tuple(Op(i, name, name, reads[name], (i + 1,)) for i, name in enumerate(names))
    sizes = (64 if name in "acd" else 1 for name in names)
    made = (Value(i + 1, names[i], size, producer=i) for i, size in enumerate(sizes))
    graph = Graph(ops, (Value(0, "x", 4), *made), (7,))
    rules = {op.id: SliceRule(frozenset(op.inputs)) for op in ops}
    rules[5] = replace(rules[5], sums=frozenset({6}))
    for name, change in changes.items():
        rules[names.index(name)] = replace(rules[names.index(name)], **change)
    found = grown(graph, rules, {names.index(name) for name in seeds}, frozenset(rules), 10)
    return "".join(names[i] for i in sorted(found))


def test_slices_grow_along_large_values_and_take_what_is_between():
    assert grown_from("a") == "ab"
    assert grown_from("ac") == "abmfcd"
    assert grown_from("e") == "e", "a sum over the batch is whole, however large"
    assert grown_from("a", b={"partners": frozenset({7})}) == "abl"


def test_ops_whose_partners_cannot_run_in_slices_cannot_either():
    partners = {0: {1}, 1: {2}, 2: set(), 3: set()}
    rules = {
        op_id: SliceRule(frozenset(), divides=6 if op_id == 2 else 64, partners=frozenset(of))
        for op_id, of in partners.items()
    }
    assert able_ops(rules, 2) == {0, 1, 2, 3}
    assert able_ops(rules, 4) == {3}


def planned():
    step, problem, _ = head()
    traced, costs, plan = plan_with_slices(step, request_for(problem, 164), estimate)
    return step, problem, told_whole(plan, traced, costs, SimulatedMemory())


def test_a_saved_plan_brings_its_slices_back(tmp_path):
    step, problem, plan = planned()
    plan.save(tmp_path / "plan.json")
    again = load_plan(tmp_path / "plan.json")
    assert again == plan
    traced, costs = in_slices_of(again, step, problem, estimate)
    again.check(costs)
    assert traced.slicing == plan.slicing


def test_files_of_plans_without_slices_are_read():
    _, _, plan = planned()
    document = plan.to_dict()
    del document["slices"]
    assert plan_from_dict(document).slicing is None


def test_slices_of_another_step_are_a_mismatch():
    step, problem, plan = planned()
    for wrong in (
        replace(plan, slicing=Slicing((0,), 2)),
        replace(plan, slicing=Slicing((1, 99), 2)),
    ):
        with pytest.raises(PlanMismatchError, match="cannot run in slices"):
            in_slices_of(wrong, step, problem, estimate)
    with pytest.raises(PlanMismatchError, match="do not run in slices"):
        in_slices_of(plan, replace(step, slicer=None), problem, estimate)
    whole = replace(plan, slicing=None)
    assert in_slices_of(whole, step, problem, estimate) == (step, problem)


def test_the_default_order_is_near_the_least_that_is_possible():
    """Slice by slice: what the whole batch holds is the head's inputs, gradients and sums."""
    step, problem, rules = head()
    sliced = sliced_graph(step.graph, rules, Slicing((1, 2, 3, 4), 16))
    costs = replace(problem, graph=sliced.graph, profile=estimate(TracedStep(sliced.graph, {})))
    peak = SimulatedMemory().peak_bytes(costs, Schedule.store_all(costs.graph))
    assert peak <= 100 + 4 + 4 + 2 * 8 + 2 * 4 + 4


@pytest.mark.parametrize(
    ("samples", "count", "parts"), [(64, 4, 4), (64, 3, 4), (6, 4, 6), (25, 8, 5), (2, 8, 2)]
)
def test_micro_batches_are_the_number_of_slices_that_divides_the_batch(samples, count, parts):
    step, problem, rules = head()
    rules = {
        op_id: replace(rule, divides=rule.divides and samples) for op_id, rule in rules.items()
    }
    step = replace(step, slicer=CoreSlicer(step, rules))
    problem = replace(problem, profile=replace(problem.profile, resident_bytes=107))
    traced, costs = in_micro_batches(step, problem, samples, count, estimate)
    assert traced.slicing == Slicing((1, 2, 3, 4), parts)
    assert costs.graph is traced.graph
    assert costs.profile.resident_bytes == 107


@pytest.mark.parametrize(
    ("samples", "rules", "reason"),
    [
        (7, None, "No number from 2 to 6 divides a batch of 7 samples"),
        (1, None, "divides a batch of 1 sample"),
        (64, {}, "Nothing large runs in slices"),
        (6, None, "Nothing large runs in slices"),
    ],
)
def test_a_batch_that_cannot_be_sliced_says_why(samples, rules, reason):
    """The rules are of 64 samples."""
    step, problem, known = head()
    step = replace(step, slicer=CoreSlicer(step, known if rules is None else rules))
    with pytest.raises(UnsupportedModelError, match=reason):
        in_micro_batches(step, problem, samples, 3, estimate)


def test_a_plan_is_found_in_the_slices_that_it_was_made_for():
    step, problem, plan = planned()
    traced, costs = in_micro_batches(step, problem, 64, 2, estimate)
    again, of_plan = in_slices_of(plan, traced, costs, estimate)
    plan.check(of_plan)
    assert again.slicing == plan.slicing
    assert in_slices_of(replace(plan, slicing=traced.slicing), traced, costs, estimate) == (
        traced,
        costs,
    )
