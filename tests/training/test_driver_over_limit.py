"""What follows where a step takes more than the limit, or more than the device has."""

import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
from fake_backend import (
    RESIDENT_BYTES,
    FakeBackend,
    FakeOutOfMemoryError,
    batch_of,
    chain_problem,
    event_kinds,
    note_solves,
    plan_in_fake_processes,
)
from fake_fit import PLAIN, SIZE, TIGHT, driven, options, train

from keras_remat.core import deadline
from keras_remat.errors import InfeasibleBudgetError, ScheduleNotFoundError, UnsupportedModelError
from keras_remat.planning.calibrated_solve import least_over_budget
from keras_remat.training import fit_state, tighter
from keras_remat.training.requests import PlanRequests
from keras_remat.training.shape_state import StepConstraints
from keras_remat.training.watch import Pace

# ------------------------------------------------------------------ the measured peak decides


def test_first_plan_gets_more_time_where_less_finds_none(monkeypatch):
    asked = []

    def note(problem, budget, backend, *, solver, time_limit_s, **options):
        asked.append((solver, time_limit_s))
        if len(asked) < 4:
            raise ScheduleNotFoundError(budget, problem.floor_bytes)

    note_solves(monkeypatch, note)
    trainer, _ = driven(FakeBackend(), options(solver="anneal", solver_time_limit_s=8.0))
    train(trainer, 1)
    quick = ("greedy_first", 4.0)  # with room first
    assert asked == [quick, quick, ("anneal", 4.0), ("anneal", 8.0)]


@pytest.mark.parametrize("failures", [0, 1])
def test_what_failed_on_the_way_to_a_first_plan_holds_no_batch(failures, monkeypatch):
    """The next step would measure it, too."""
    asked = []

    def note(problem, budget, *given, **options):
        asked.append(budget)
        if len(asked) <= failures:
            raise ScheduleNotFoundError(budget, problem.floor_bytes)

    note_solves(monkeypatch, note)
    trainer, _ = driven(FakeBackend(), options())
    batches = [batch_of(0, SIZE)]
    watch = weakref.ref(batches[0][0])
    gc.disable()
    try:
        trainer.run(batches.pop())
        assert watch() is None
    finally:
        gc.enable()
    assert len(asked) == failures + 1


@pytest.mark.parametrize("first_s", [10.0, 400.0])
def test_set_up_improves_the_first_plan_for_a_bounded_time_that_is_told(monkeypatch, first_s):
    """Later plans are made from measured costs, and set-up is over."""
    left, clock = [], {"s": 0.0}
    most_s = 20 * chain_problem(SIZE).store_all_time_s  # more than 20 s

    def note(*given, clock_s, **options):
        clock["s"] += 0.0 if left else first_s
        left.append(clock_s)

    note_solves(monkeypatch, note)
    for module in (fit_state, deadline):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock["s"]))
    trainer, report = driven(FakeBackend(), options())
    assert trainer.fit.setup_left_s(0.1) == 20.0
    train(trainer, 1)
    assert (report.setup_s, report.setup_limit_s) == (first_s, most_s)
    assert ("enough" in event_kinds(report)) == (first_s > most_s)
    train(trainer, 20)
    assert left[0] == most_s
    assert left[-1] == float("inf")
    assert report.setup_s == first_s


@pytest.mark.parametrize("helps", [True, False], ids=["they help", "nothing helps"])
def test_more_slices_are_tried_before_a_plan_that_misses_the_limit(helps, monkeypatch):
    """Of a step in slices, which measures over the limit, and no tighter plan is found."""
    backend = FakeBackend()
    trainer, _ = driven(backend, options())
    train(trainer, 25)
    running, asked = trainer.plan, []

    def plan_for(request):
        asked.append("limit" if request.below_bytes is None else "least")
        if asked[-1] == "limit":
            raise ScheduleNotFoundError(TIGHT, 0)
        return running

    def in_slices(self, shape, costs, error):
        asked.append("slices")
        if not helps:
            raise error
        return running, costs

    monkeypatch.setattr("keras_remat.training.tighter.plan_for", plan_for)
    monkeypatch.setattr("keras_remat.training.requests.PlanRequests.in_slices", in_slices)
    monkeypatch.setattr("keras_remat.training.shape_state.Costs.is_whole", False)
    backend.surplus_bytes = lambda what, size: TIGHT
    train(trainer, 10)
    assert asked == ["limit", "slices", *([] if helps else ["least"])]


@pytest.mark.parametrize(("rewrites", "times"), [(False, 1), (True, 3)])
def test_a_final_step_that_cannot_be_tightened_is_tried_once(rewrites, times, monkeypatch):
    """The solver has nothing that needs less: asking it again would change nothing, unless an order
    that is written anew may take less."""
    backend = FakeBackend()
    backend.memory.rewrites = rewrites
    trainer, _ = driven(backend, options())
    train(trainer, 25)
    assert trainer.settled
    running, asked = trainer.plan, []
    monkeypatch.setattr(
        "keras_remat.training.tighter.plan_for", lambda request: asked.append(request) or running
    )
    backend.surplus_bytes = lambda what, size: TIGHT
    train(trainer, 10)
    assert len(asked) == times
    assert trainer.settled
    assert backend.ran[-1][0] == running.solution.schedule


def test_where_measured_costs_have_no_plan_the_solver_is_not_asked_again(monkeypatch):
    """The recorded steps show that the device needs more than any schedule leaves; what measures
    over the limit after that is tightened by what is found quickly."""
    solvers, backend = [], FakeBackend()
    note_solves(monkeypatch, lambda *given, solver, **more: solvers.append(solver))
    backend.surplus_bytes = lambda what, size: TIGHT if backend.calls > 1 else 0
    trainer, report = driven(backend, options())
    with pytest.warns(UserWarning, match="over the limit"):
        train(trainer, 20)
    assert trainer.settled
    assert "tighten" in event_kinds(report)
    assert solvers == ["greedy_first", "greedy"]  # the first plan, and the one from what it shows


def taking_more_for_recomputation():
    """A device that takes the more above the limit the more is recomputed."""
    backend = FakeBackend()

    def surplus(what, size):
        if backend.calls <= 3:
            return 0
        return TIGHT + len(what.recomputed) - backend.predicted(chain_problem(size), what)

    backend.surplus_bytes = surplus
    return backend


def test_tightening_ends_and_the_plan_that_measured_least_stays():
    backend = taking_more_for_recomputation()
    trainer, report = driven(backend, options())
    batches = [batch_of(step * SIZE, SIZE) for step in range(30)]
    watches = [weakref.ref(batch[0]) for batch in batches]

    def train_each_once():
        while batches:
            trainer.run(batches.pop(0))

    gc.disable()
    try:
        with pytest.warns(UserWarning, match="over the limit"):
            train_each_once()
        assert [watch() for watch in watches] == [None] * 30, "held by errors"
    finally:
        gc.enable()
    assert 1 <= event_kinds(report).count("tighten") <= 3
    assert trainer.settled
    ran = {len(what.recomputed) for what, _ in backend.ran[3:]}
    assert len(ran) > 1
    assert trainer.plan.measured.peak_bytes == TIGHT + min(ran)
    assert len(backend.ran[-1][0].recomputed) == min(ran)
    assert "STILL OVER" in report.events[-1].message


def test_of_the_steps_that_were_tried_only_the_one_that_runs_is_held():
    """Their large constants would stay in use."""
    backend, watches, held = taking_more_for_recomputation(), [], []

    def lower(*asked):
        gc.collect()
        held.append(sum(watch() is not None for watch in watches))
        run = FakeBackend.lower(backend, *asked)
        watches.append(weakref.ref(run))
        return run

    backend.lower = lower
    trainer, _ = driven(backend, options())
    with pytest.warns(UserWarning, match="over the limit"):
        train(trainer, 30)
    assert len(held) > 2
    assert max(held) == 1


@pytest.mark.parametrize(
    ("need", "nbytes"),
    [
        ("plain_surplus_bytes", 3_000),
        ("plain_least_bytes", PLAIN + 3_000),
        ("plain_unordered_bytes", PLAIN + 1_000),  # a tenth more is predicted
    ],
)
def test_what_keras_own_step_needs_more_is_counted(need, nbytes):
    """The order that holds everything fits, Keras's own step does not: it does not run, and nothing
    is computed twice."""
    backend = FakeBackend()
    setattr(backend, need, nbytes)
    trainer, report = driven(backend, options(limit=PLAIN + 2_000))
    train(trainer, 12)
    assert backend.kinds == ["remat"] * 12
    assert event_kinds(report)[0] == "risk"
    assert trainer.settled
    assert not trainer.plan.solution.schedule.recomputed


# ------------------------------------------------------------------ out of memory


@pytest.mark.parametrize("call", [1, 2, 3, 4, 7, 10], ids="call {}".format)
def test_step_that_runs_out_of_memory_is_undone_and_trained_again(call, monkeypatch):
    monkeypatch.setattr(Pace, "is_due", lambda self: True)  # a final step is looked at, and guarded
    backend = FakeBackend()
    backend.fails_at = {call}
    trainer, report = driven(backend, options())
    for step in range(12):
        assert trainer.run(batch_of(step * SIZE, SIZE)) == {"loss": step + 1.0}
    assert backend.samples == list(range(12 * SIZE)), "every sample once, in order"
    assert event_kinds(report).count("out-of-memory") == 1
    assert trainer.settled
    assert not backend.recording


def test_first_step_of_a_smaller_batch_is_guarded_too(monkeypatch):
    monkeypatch.setattr(
        "keras_remat.training.undo.CHEAP_SHARE", -1.0
    )  # no step is guarded that need not be
    backend = FakeBackend()
    backend.fails_at = {9}
    trainer, report = driven(backend, options())
    train(trainer, 8)
    trainer.run(batch_of(8 * SIZE, SIZE // 4))
    assert [what for what, _ in backend.ran[8:]] != ["plain"], (
        "it ran out of memory as a plain step"
    )
    assert backend.samples == list(range(8 * SIZE + SIZE // 4))
    assert "out-of-memory" in event_kinds(report)


@pytest.mark.parametrize("device", ["CPU:0", "GPU:0"])
@pytest.mark.parametrize("steps", [1, 3, 5, 7, 12], ids="after {} steps".format)
def test_a_plan_from_before_the_device_had_less_does_not_run_unguarded(device, steps, monkeypatch):
    """Another shape ran out of memory, which lowered the limit below what this one takes."""
    monkeypatch.setattr("keras_remat.training.undo.CHEAP_SHARE", -1.0)
    monkeypatch.setattr(Pace, "is_due", lambda self: False)
    plan_in_fake_processes(monkeypatch, steps=2)
    backend = FakeBackend(device_name=device)
    trainer, report = driven(backend, options())
    train(trainer, steps)
    backend.has_bytes = int(0.9 * trainer.plan.predicted.peak_bytes)
    trainer.run(batch_of(steps * SIZE, SIZE - 5))
    for step in range(12):
        trainer.run(batch_of((steps + 1 + step) * SIZE - 5, SIZE))
    assert backend.samples == list(range((steps + 13) * SIZE - 5)), "every sample once, in order"
    assert trainer.plan.measured.peak_bytes <= backend.has_bytes
    assert event_kinds(report).count("out-of-memory") <= 2


def test_a_failure_in_less_than_any_schedule_takes_lowers_the_limit_to_what_failed():
    """Others had taken the device's memory: what was in use then tells little of the next time."""
    backend = FakeBackend()
    backend.fails_at, backend.device.peak_bytes = {2}, lambda: RESIDENT_BYTES + 1
    trainer, report = driven(backend, options())
    train(trainer, 1)
    failed = trainer.plan.predicted.peak_bytes
    train(trainer, 11)
    assert report.limit_bytes == failed - 1
    assert trainer.plan.measured.peak_bytes < failed
    assert len(backend.samples) == 12 * SIZE


def test_batch_for_which_the_device_has_too_little_raises_from_the_frameworks_error():
    backend = FakeBackend()
    backend.has_bytes = RESIDENT_BYTES
    trainer, report = driven(backend, options())
    with pytest.raises((ScheduleNotFoundError, InfeasibleBudgetError)) as caught:
        trainer.run(batch_of(0, SIZE))
    assert isinstance(caught.value.__cause__, FakeOutOfMemoryError)
    assert backend.ran == []
    assert 1 <= event_kinds(report).count("out-of-memory") <= 5


@pytest.mark.parametrize("finds", ["auto", "slices"])
def test_where_the_chosen_solver_finds_nothing_for_what_is_left_a_fit_goes_on(finds, monkeypatch):
    """``auto`` is asked after it, and then for ops in slices."""
    backend, asked = FakeBackend(), []
    trainer, report = driven(backend, options(solver_time_limit_s=1.0))
    train(trainer, 5)
    schedule, asks = trainer.plan.solution.schedule, tighter.plan_for

    def refused(request):
        asked.append(request.solver)
        if request.solver == "greedy" or finds == "slices":
            raise ScheduleNotFoundError(request.limit.usable_bytes, request.problem.floor_bytes)
        return asks(request)

    def in_slices(plans, shape, costs, error, limit):
        asked.append("slices")
        return asks(plans.request(costs.problem, shape.batch_size, limit=limit)), costs

    monkeypatch.setattr(tighter, "plan_for", refused)
    monkeypatch.setattr(PlanRequests, "in_slices", in_slices)
    monkeypatch.setattr(Pace, "is_due", lambda self: True)
    backend.fails_at = {backend.calls + 1}
    for step in range(5, 15):
        trainer.run(batch_of(step * SIZE, SIZE))
    assert asked[:3] == ["greedy", "auto", *(["slices"] if finds == "slices" else [])]
    assert trainer.plan.solution.schedule != schedule
    assert event_kinds(report).count("out-of-memory") == 1
    assert backend.samples == list(range(15 * SIZE)), "every sample once, in order"


def test_other_errors_pass_through():
    backend = FakeBackend()
    trainer, report = driven(backend, options())
    backend.lower = lambda *args: lambda batch: 1 / 0
    with pytest.raises(ZeroDivisionError):
        trainer.run(batch_of(0, SIZE))
    assert "out-of-memory" not in event_kinds(report)


# ------------------------------------------------------------------ plans that need more than plain


def over_whatever_runs(plain_surplus, plan_surplus):
    """A backend whose steps take more than predicted, by how they run."""
    return FakeBackend(
        surplus_bytes=lambda what, size: plain_surplus if what == "plain" else plan_surplus
    )


def test_a_plan_that_is_smaller_than_the_plain_step_stays(monkeypatch):
    monkeypatch.setattr("keras_remat.training.facts._PLAIN_OFF", 10.0)
    backend = over_whatever_runs(PLAIN, PLAIN // 2)
    trainer, _ = driven(backend, options())
    with pytest.warns(UserWarning, match="The step of 100 samples takes"):
        train(trainer, 40)
    assert "plain" in backend.kinds, "it was measured"
    assert backend.kinds[-20:] == ["remat"] * 20
    assert trainer.settled
    assert trainer.settled_usage.peak_bytes < 2 * PLAIN
    assert backend.samples == list(range(40 * SIZE))


def test_a_plain_step_that_is_tried_and_runs_out_of_memory_is_undone():
    backend = over_whatever_runs(0, PLAIN)
    plain = backend.run_plain
    backend.run_plain = lambda batch: (backend.fails_at.add(backend.calls + 1), plain(batch))[1]
    trainer, report = driven(backend, options())
    with pytest.warns(UserWarning, match="The step of 100 samples takes"):
        train(trainer, 40)
    assert set(backend.kinds) == {"remat"}
    assert report.limit_bytes == TIGHT, "plans have trained in more"
    assert trainer.settled
    assert backend.samples == list(range(40 * SIZE))


# ------------------------------------------------------------------ micro-batches


def test_batch_that_fits_under_no_schedule_is_cut_where_that_is_allowed():
    backend = FakeBackend()
    limit = chain_problem(SIZE // 4).floor_bytes + 2 * SIZE * 1024 // 4
    trainer, report = driven(backend, options(limit=limit))
    with pytest.raises(InfeasibleBudgetError):
        trainer.run(batch_of(0, SIZE))
    assert backend.ran == []
    with pytest.warns(UserWarning, match="4 micro-batches"):
        trainer.run(batch_of(0, SIZE), StepConstraints(may_split=True))
    for step in range(1, 12):
        trainer.run(batch_of(step * SIZE, SIZE), StepConstraints(may_split=True))
    assert backend.samples == list(range(12 * SIZE))
    assert trainer.costs.micro_batches == 4
    assert "micro-batches" in event_kinds(report)
    assert trainer.settled_peak_bytes <= limit
    with pytest.warns(UserWarning, match="2 micro-batches"):
        trainer.run(batch_of(0, SIZE // 2), StepConstraints(may_split=True))
    assert backend.ran[-1][0] != "plain", (
        "what a smaller batch takes does not follow from the pieces"
    )


def test_step_that_cannot_be_cut_is_refused_as_before():
    backend = FakeBackend()
    backend.can_be_cut = False
    trainer, _ = driven(backend, options(limit=chain_problem(SIZE).floor_bytes - 1))
    with pytest.raises(InfeasibleBudgetError) as caught:
        trainer.run(batch_of(0, SIZE), StepConstraints(may_split=True))
    assert isinstance(caught.value.__cause__, UnsupportedModelError)


def test_sample_that_does_not_fit_alone_is_refused():
    backend = FakeBackend()
    trainer, _ = driven(backend, options(limit=RESIDENT_BYTES + 1))
    with pytest.raises(InfeasibleBudgetError):
        trainer.run(batch_of(0, 1), StepConstraints(may_split=True))
    assert backend.traced == [1]


# ------------------------------------------------------------------ over the limit all the same


def test_a_larger_batch_that_has_become_the_one_that_trains_is_not_said_to_give_way(recwarn):
    """Its step comes to take more than the limit long after it was final."""
    backend = FakeBackend()
    trainer, report = driven(backend, options())
    for step in range(8):
        trainer.run(batch_of(step * SIZE, SIZE), StepConstraints(allow_over_limit=False))
    assert trainer.settled
    backend.surplus_bytes = lambda what, size: 2 * PLAIN
    for step in range(8, 30):
        trainer.run(batch_of(step * SIZE, SIZE))
    assert "Training goes on with it" in str(recwarn[-1].message)
    assert not any("takes over" in event.message for event in report.events)
    assert backend.samples == list(range(30 * SIZE))


# ------------------------------------------------------------------ a limit that is just missed


def test_limit_that_is_missed_by_a_little_is_trained_with_a_warning(monkeypatch):
    least = 0.8 * PLAIN

    def note(problem, budget, backend, **options):
        if budget < least:
            raise ScheduleNotFoundError(budget, problem.floor_bytes, int(least))

    def missing(problem, *args, **options):
        found = least_over_budget(problem, *args, **options)
        return replace(found, peak_bytes=int(least))

    note_solves(monkeypatch, note)
    monkeypatch.setattr("keras_remat.planning.request.least_over_budget", missing)
    backend = FakeBackend()
    trainer, report = driven(backend, options(limit=int(0.79 * PLAIN)))
    with pytest.warns(UserWarning, match="the limit is"):
        train(trainer, 12)
    assert "over-limit" in event_kinds(report)
    assert backend.samples == list(range(12 * SIZE))
    trainer, _ = driven(FakeBackend(), options(limit=int(0.7 * PLAIN)))
    with pytest.raises(ScheduleNotFoundError):
        train(trainer, 1)
