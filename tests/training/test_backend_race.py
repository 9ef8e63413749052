"""Compiled or in order: who trains which batch, and who stays; on backends without a framework."""

import pytest
from fake_backend import FakeBackend, batch_of, chain_problem, event_kinds, race_on, store_all_peak

from keras_remat.errors import InfeasibleBudgetError, PlanMismatchError, UnsupportedModelError
from keras_remat.planning.fit_plans import TunerOptions
from keras_remat.planning.make_plan import plan_problem

SIZE = 100
PLAIN = store_all_peak(SIZE)
TIGHT = int(PLAIN * 0.7)


class Compiled(FakeBackend):
    """A backend that measures whole steps only."""

    compilation = "compiled"
    measures_op_times = False


class Refuses(Compiled):
    """A backend that cannot carry the step."""

    def trace(self, model, batch, micro_batches=1):
        raise UnsupportedModelError("an op without a kernel")


def race_of(*backends, limit=TIGHT, **more):
    options = TunerOptions(
        **{"memory_limit": limit, "solver": "greedy", "margin": 0.0, "profile_steps": 2, **more}
    )
    return race_on(*backends, options=options)


def train(race, steps, size=SIZE, first=0):
    for step in range(steps):
        race.run(batch_of(first + step * size, size))


def trained(*backends):
    return sorted(number for backend in backends for number in backend.samples)


@pytest.mark.parametrize(("slowness", "stays"), [(2e-3, "ordered"), (0.5e-3, "compiled")])
def test_both_are_measured_and_the_faster_stays(slowness, stays):
    compiled, ordered = Compiled(slowness=slowness), FakeBackend()
    race, report = race_of(compiled, ordered)
    train(race, 30)
    assert race.settled
    assert race.trainer.backend.compilation == stays
    assert trained(compiled, ordered) == list(range(30 * SIZE)), "every sample once"
    assert "plain" not in compiled.kinds + ordered.kinds
    assert event_kinds(report).count("compilation") == 2
    assert report.events[-1].message.endswith(f"Training goes on {stays}.")
    assert report.events[-1].step < 30
    counter = race.fit.take_counter()
    assert (counter.steps, counter.samples) == (30, 30 * SIZE)
    assert race.trainer.plan.measured.peak_bytes <= TIGHT


def test_within_the_limit_comes_before_faster():
    compiled, ordered = Compiled(surplus_bytes=lambda what, size: PLAIN), FakeBackend(slowness=3e-3)
    race, _ = race_of(compiled, ordered)
    train(race, 40)
    assert race.trainer.backend is ordered
    assert race.trainer.settled_peak_bytes <= TIGHT
    assert trained(compiled, ordered) == list(range(40 * SIZE))


def test_no_compiled_schedule_under_the_limit_gives_way():
    compiled, ordered = Compiled(allocator_bytes=lambda problem, schedule: PLAIN), FakeBackend()
    race, report = race_of(compiled, ordered)
    train(race, 20)
    assert compiled.ran == []
    assert race.trainer.backend is ordered
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
    assert race.trainer.backend is compiled
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
    for _ in range(15):
        for size in (SIZE, SIZE - 1):
            race.run(batch_of(at, size))
            at += size
    assert race.trainer.backend is compiled
    assert set(ordered.traced) == {SIZE}
    assert trained(compiled, ordered) == list(range(at))


def test_a_grown_batch_that_does_not_fit_is_refused_and_not_handed_on():
    compiled, ordered = Compiled(), FakeBackend()
    race, _ = race_of(compiled, ordered, limit=PLAIN)
    train(race, 5)
    race.begin_shape()
    with pytest.raises(InfeasibleBudgetError):
        race.run(batch_of(0, 10 * SIZE))
    assert ordered.traced == []


def test_a_given_plan_finds_its_backend_and_is_not_questioned():
    plan = plan_problem(chain_problem(SIZE), TIGHT, FakeBackend(), solver="greedy")
    compiled, ordered = Compiled(layers=9), FakeBackend()
    race, _ = race_of(compiled, ordered, plan=plan)
    train(race, 10)
    assert race.trainer.backend is ordered
    assert race.trainer.plan.solution.schedule == plan.solution.schedule
    compiled, ordered = Compiled(), FakeBackend()
    race, _ = race_of(compiled, ordered, plan=plan)
    train(race, 10)
    assert race.trainer.backend is compiled
    assert ordered.traced == []
    race, _ = race_of(Compiled(layers=9), FakeBackend(layers=9), plan=plan)
    with pytest.raises(PlanMismatchError):
        train(race, 1)
