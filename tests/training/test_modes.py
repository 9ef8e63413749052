"""Compiled or in order, whole or split: who trains which batch, and who stays; on backends
without a framework."""

import math
from dataclasses import replace

import pytest
from fake_backend import (
    RESIDENT_BYTES,
    SAMPLE_BYTES,
    FakeBackend,
    batch_of,
    chain_problem,
    event_kinds,
    note_solves,
    quick_plan,
)
from fake_fit import PLAIN, SIZE, TIGHT, driven, options, race_on, train

from keras_remat.core.simulate import simulate
from keras_remat.errors import InfeasibleBudgetError, PlanMismatchError, UnsupportedModelError


class Compiled(FakeBackend):
    """A backend that measures whole steps only."""

    compilation = "compiled"
    measures_op_times = False
    recorder = None  # nobody asks for one


class Refuses(Compiled):
    """A backend that cannot carry the step."""

    def trace(self, model, batch, micro_batches=1):
        raise UnsupportedModelError("an op without a kernel")


def race_of(*backends, limit=TIGHT, **more):
    return race_on(*backends, options=options(limit, **more))


def trained(*backends):
    return sorted(number for backend in backends for number in backend.samples)


@pytest.mark.parametrize(("slowness", "stays"), [(2e-3, "ordered"), (0.5e-3, "compiled")])
def test_both_are_measured_and_the_faster_stays(slowness, stays):
    compiled, ordered = Compiled(slowness=slowness), FakeBackend()
    race, report = race_of(compiled, ordered)
    train(race, 30)
    assert race.settled
    assert race.backend.compilation == stays
    assert trained(compiled, ordered) == list(range(30 * SIZE)), "every sample once"
    assert "plain" not in compiled.kinds + ordered.kinds
    assert event_kinds(report).count("compilation") == 2
    assert report.events[-1].message.endswith(f"Training goes on {stays}.")
    assert report.events[-1].step < 30
    counter = race.fit.take_counter()
    assert (counter.steps, counter.samples) == (30, 30 * SIZE)
    assert race.plan.measured.peak_bytes <= TIGHT


def test_the_first_mode_is_solved_for_in_full_and_one_on_trial_takes_little_time(monkeypatch):
    asked = {}

    def note(problem, budget, memory, *, solver, time_limit_s, **_):
        asked.setdefault(memory, []).append((solver, time_limit_s))

    note_solves(monkeypatch, note)
    compiled, ordered = Compiled(), FakeBackend()
    race, _ = race_of(compiled, ordered, solver_time_limit_s=20.0)
    train(race, 30)
    assert race.settled
    assert asked.pop(compiled.memory) == [("greedy", 20.0)]
    (on_trial,) = asked.values()
    assert max(seconds for _, seconds in on_trial) <= 8.0


def test_within_the_limit_comes_before_faster():
    compiled, ordered = Compiled(surplus_bytes=lambda what, size: PLAIN), FakeBackend(slowness=3e-3)
    race, _ = race_of(compiled, ordered)
    train(race, 40)
    assert race.backend is ordered
    assert race.settled_peak_bytes <= TIGHT
    assert trained(compiled, ordered) == list(range(40 * SIZE))
    assert compiled.calls < 20, "a step over the limit does not run once there is one within it"


def test_no_compiled_schedule_under_the_limit_gives_way():
    compiled, ordered = Compiled(allocator_bytes=lambda problem, schedule: PLAIN), FakeBackend()
    race, report = race_of(compiled, ordered)
    train(race, 20)
    assert compiled.ran == []
    assert race.backend is ordered
    assert event_kinds(report)[:2] == ["risk", "compilation"]
    assert "training goes on ordered" in report.events[1].message
    assert trained(ordered) == list(range(20 * SIZE))


def test_a_step_that_cannot_be_compiled_gives_way_with_the_reason():
    ordered = FakeBackend()
    race, report = race_of(Refuses(), ordered)
    train(race, 20)
    assert "an op without a kernel" in report.events[0].message
    assert trained(ordered) == list(range(20 * SIZE))


def test_what_is_tried_and_fails_changes_nothing():
    class Late(FakeBackend):
        def trace(self, model, batch, micro_batches=1):
            raise UnsupportedModelError("no order")

    compiled = Compiled()
    race, report = race_of(compiled, Late())
    train(race, 20)
    assert race.settled
    assert race.backend is compiled
    assert "no order" in report.events[-1].message
    assert trained(compiled) == list(range(20 * SIZE))


def test_the_last_backend_s_error_is_the_user_s():
    floor = chain_problem(SIZE).floor_bytes
    race, _ = race_of(Compiled(), FakeBackend(), limit=floor - 1)
    with pytest.raises(InfeasibleBudgetError):
        race.run(batch_of(0, SIZE))
    alone, _ = race_of(Refuses())
    with pytest.raises(UnsupportedModelError):
        alone.run(batch_of(0, SIZE))


def test_plain_that_fits_is_left_alone():
    compiled, ordered = Compiled(), FakeBackend()
    race, report = race_of(compiled, ordered, limit=PLAIN)
    train(race, 10)
    assert race.settled
    assert compiled.kinds == ["plain"] * 10
    assert ordered.traced == []
    assert event_kinds(report) == ["fits"]


def test_odd_batches_do_not_disturb_a_trial():
    compiled, ordered = Compiled(), FakeBackend(slowness=2e-3)
    race, _ = race_of(compiled, ordered)
    at = 0
    for _ in range(25):
        for size in (SIZE, SIZE - 1):
            race.run(batch_of(at, size))
            at += size
    assert race.backend is compiled
    assert set(ordered.traced) == {SIZE}
    assert trained(compiled, ordered) == list(range(at))


def test_a_grown_batch_that_does_not_fit_is_refused_and_not_handed_on():
    compiled, ordered = Compiled(), FakeBackend()
    race, _ = race_of(compiled, ordered, limit=PLAIN)
    train(race, 5)
    race.begin_shape(has_grown=True)
    with pytest.raises(InfeasibleBudgetError):
        race.run(batch_of(0, 10 * SIZE))
    assert ordered.traced == []


def test_a_given_plan_finds_its_backend_and_is_not_questioned():
    plan = quick_plan(chain_problem(SIZE), TIGHT)
    compiled, ordered = Compiled(layers=9), FakeBackend()
    race, _ = race_of(compiled, ordered, plan=plan)
    train(race, 10)
    assert race.backend is ordered
    assert race.plan.solution.schedule == plan.solution.schedule
    compiled, ordered = Compiled(), FakeBackend()
    race, _ = race_of(compiled, ordered, plan=plan)
    train(race, 10)
    assert race.backend is compiled
    assert ordered.traced == []
    race, _ = race_of(Compiled(layers=9), FakeBackend(layers=9), plan=plan)
    with pytest.raises(PlanMismatchError):
        train(race, 1)


# ------------------------------------------------------------------ in micro-batches


class Cut(FakeBackend):
    """A backend whose steps take longer, or less, the more micro-batches they have.

    Args:
        cost: what one more piece adds to a step's time, a share of it.
    """

    def __init__(self, cost, **more):
        super().__init__(**more)
        self.cost, self.pieces = cost, {}

    def trace(self, model, batch, micro_batches=1):
        traced = super().trace(model, batch, micro_batches)
        self.pieces[traced.graph.fingerprint] = micro_batches
        return replace(traced, differences=("Seen one piece at a time.",) * (micro_batches > 1))

    def measure(self, run, *, wait=True):
        result, usage = super().measure(run, wait=wait)
        more = self.pieces.get(self._ran_problem.graph.fingerprint, 1) - 1
        return result, replace(usage, time_s=usage.time_s * (1 + self.cost * more))


def auto_race(*backends, limit=TIGHT, model=None, **more):
    model = {} if model is None else {"model": model}
    return race_on(*backends, options=options(limit, **more), chooses_micro_batches=True, **model)


def step_s(backend, pieces, limit):
    """What a settled step takes where the number of pieces is given; infinite where none fits."""
    trainer, _ = driven(backend, options(limit, micro_batches=pieces))
    try:
        train(trainer, 12)
    except InfeasibleBudgetError:
        return math.inf
    assert trainer.settled
    return trainer.settled_usage.time_s


@pytest.mark.parametrize(
    ("cost", "share"), [(-0.05, 0.5), (0.0, 0.3), (0.0, 0.5), (0.02, 0.5), (0.08, 0.7), (0.3, 0.5)]
)
def test_pieces_and_recomputation_are_chosen_together_by_time(cost, share):
    limit = int(share * PLAIN)
    race, report = auto_race(backend := Cut(cost), limit=limit)
    train(race, 150)
    assert race.settled
    assert race.plan.measured.peak_bytes <= limit
    assert trained(backend) == list(range(150 * SIZE)), "every sample once"
    best = min(step_s(Cut(cost), pieces, limit) for pieces in (1, 2, 4, 8))
    assert race.settled_usage.time_s <= best / (1 - 0.03)
    assert set(backend.kinds) == {"remat"}
    assert "compilation" not in event_kinds(report)
    assert race.costs.micro_batches == race.pieces
    assert report.events[-1].step < 150


def test_pieces_by_number_do_not_end_where_the_recorded_step_of_one_fits_plainly():
    """What one piece takes says nothing of the whole batch."""
    trainer, _ = driven(backend := FakeBackend(), options(micro_batches=2))
    train(trainer, 12)
    assert trainer.settled
    assert set(backend.kinds) == {"remat"}
    assert trainer.settled_peak_bytes <= TIGHT


def test_a_whole_batch_that_fits_under_no_schedule_gives_way_to_pieces():
    limit = chain_problem(SIZE).floor_bytes - 1
    race, report = auto_race(backend := Cut(0.1), limit=limit)
    train(race, 80)
    assert race.settled
    assert race.pieces == 2
    told = report.events[1].message
    assert "No ordered step, training goes on ordered in 2 micro-batches" in told
    assert trained(backend) == list(range(80 * SIZE))


def test_no_number_of_pieces_helps_where_one_sample_does_not_fit():
    race, _ = auto_race(backend := Cut(0.1), limit=RESIDENT_BYTES + 1)
    with pytest.raises(InfeasibleBudgetError):
        race.run(batch_of(0, SIZE))
    assert backend.ran == []


def test_no_pieces_are_tried_where_what_stays_is_too_much():
    """Whatever the pieces, resident bytes stay; the second trace tells."""
    race, _ = auto_race(backend := Cut(0.1), limit=RESIDENT_BYTES // 2)
    with pytest.raises(InfeasibleBudgetError):
        race.run(batch_of(0, SIZE))
    assert backend.traced == [SIZE, (SIZE, 2), SIZE]  # whole again, to come close to the limit


def test_a_step_that_cannot_be_cut_stays_whole():
    backend = Cut(0.0)
    backend.can_be_cut = False
    race, report = auto_race(backend)
    train(race, 60)
    assert race.settled
    assert race.pieces == 1
    assert backend.traced == [SIZE]
    assert "a train_step of its own" in report.events[-1].message


def test_a_plain_step_that_fits_stays_whole():
    race, report = auto_race(backend := Cut(-0.1), limit=PLAIN)
    train(race, 30)
    assert backend.kinds == ["plain"] * 30
    assert event_kinds(report) == ["fits"]


def test_what_sees_pieces_is_said_once():
    race, report = auto_race(Cut(-0.05))
    with pytest.warns(UserWarning, match="one piece at a time") as caught:
        train(race, 150)
    assert race.pieces > 2
    told = [one for one in caught if "one piece" in str(one.message)]
    assert len(told) == 1
    assert sum("one piece" in event.message for event in report.events) == 1


def test_both_ways_of_running_come_before_pieces():
    compiled, ordered = Compiled(slowness=5e-3), Cut(-0.05)
    race, _ = auto_race(compiled, ordered)
    train(race, 150)
    assert race.backend is ordered
    assert race.pieces > 1
    assert set(compiled.traced) == {SIZE}
    assert trained(compiled, ordered) == list(range(150 * SIZE))


def test_odd_batches_are_cut_in_as_many_pieces():
    race, _ = auto_race(backend := Cut(-0.05))
    at = 0
    for _ in range(100):
        for size in (SIZE, SIZE // 2 + 1):
            race.run(batch_of(at, size))
            at += size
    assert race.settled
    assert (SIZE // 2 + 1, race.pieces) in backend.traced
    assert trained(backend) == list(range(at))


def test_the_plain_step_s_time_is_told_by_the_whole_batch():
    race, report = auto_race(Cut(0.0))
    train(race, 150)
    assert race.pieces > 1
    whole, told = driven(Cut(0.0), options())
    train(whole, 30)
    assert report.baseline.time_s == pytest.approx(told.baseline.time_s, rel=0.01)
    assert report.baseline.peak_bytes == told.baseline.peak_bytes


def test_a_plain_step_that_no_way_undercuts_stays():
    """The first way measures it, the others are tried against it."""

    def more(what, size):
        return 0 if what == "plain" else 2 * PLAIN

    compiled, ordered = Compiled(surplus_bytes=more), FakeBackend(surplus_bytes=more)
    race, report = race_of(compiled, ordered)
    with pytest.warns(UserWarning, match="The plain step of 100 samples"):
        train(race, 60)
    assert race.settled
    assert ordered.lowered, "the other way was tried"
    assert race.plan is None
    assert compiled.kinds[-1] == "plain"
    assert race.backend is compiled
    assert report.events[-1].message.endswith("Training goes on plain.")
    assert trained(compiled, ordered) == list(range(60 * SIZE))


# ------------------------------------------------------------------ a device that has less


class Small:
    """A device that has less bytes than was asked for."""

    def __init__(self, has, **more):
        super().__init__(**more)
        self.has_bytes = has


class SmallCompiled(Small, Compiled):
    pass


class SmallOrdered(Small, FakeBackend):
    pass


class SmallCut(Small, Cut):
    pass


@pytest.mark.parametrize("compiles", [True, False], ids=["compiles", "does not compile"])
def test_two_ways_run_out_of_memory_once(compiles):
    """What the first way learnt of the device holds for the second one, whether the first one can
    train under it or not."""
    more = {} if compiles else {"allocator_bytes": needs_more_than_there_is}
    compiled, ordered = SmallCompiled(TIGHT, **more), SmallOrdered(TIGHT)
    race, report = race_of(compiled, ordered, limit=int(0.9 * PLAIN), solver_time_limit_s=1.0)
    train(race, 40)
    assert race.settled
    assert event_kinds(report).count("out-of-memory") == 1
    assert report.limit_bytes == race.fit.limit.total_bytes <= TIGHT
    assert ordered.lowered, "the second way was tried"
    assert race.settled_usage.peak_bytes <= TIGHT
    assert trained(compiled, ordered) == list(range(40 * SIZE)), "every sample once"


def needs_more_than_there_is(problem, schedule):
    """As where a compiler finds nothing under a tight limit."""
    return int(0.75 * PLAIN) - simulate(problem, schedule).peak_bytes


@pytest.mark.parametrize("whole_fits", [True, False], ids=["whole fits", "whole does not fit"])
def test_whole_and_in_pieces_run_out_of_memory_once(whole_fits):
    def needs_more(problem, schedule):
        is_whole = problem.graph.values[0].nbytes >= SIZE * SAMPLE_BYTES
        return needs_more_than_there_is(problem, schedule) if is_whole else 0

    more = {} if whole_fits else {"allocator_bytes": needs_more}
    backend = SmallCut(TIGHT, cost=0.3, **more)
    race, report = auto_race(backend, limit=int(0.9 * PLAIN), solver_time_limit_s=1.0)
    train(race, 60)
    assert race.settled
    assert event_kinds(report).count("out-of-memory") == 1
    assert report.limit_bytes == race.fit.limit.total_bytes <= TIGHT
    assert (SIZE, 2) in backend.traced, "pieces were tried"
    assert race.settled_usage.peak_bytes <= TIGHT
    assert trained(backend) == list(range(60 * SIZE))
