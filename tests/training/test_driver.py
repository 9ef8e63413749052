"""Which step runs for which batch: every transition of the state machine, on a backend without a
framework."""

import ast
from pathlib import Path

import pytest
from fake_backend import (
    RESIDENT_BYTES,
    FakeBackend,
    FakeStep,
    batch_of,
    chain_problem,
    event_kinds,
    note_solves,
)
from fake_fit import PLAIN, SIZE, TIGHT, driven, options, train

from keras_remat.batch_size.size_chooser import SizeChooser
from keras_remat.errors import InfeasibleBudgetError, ScheduleNotFoundError, UnsupportedModelError
from keras_remat.training import driver
from keras_remat.training.baseline import Baseline
from keras_remat.training.contest import Contest
from keras_remat.training.grouping import HeldBatches
from keras_remat.training.record import DeviceFacts, FitRecord, Mode, SizesRecord, StepsRecord
from keras_remat.training.shape_state import ShapeState, StepConstraints
from keras_remat.training.watch import Pace


@pytest.mark.parametrize("profile_steps", [1, 2])
@pytest.mark.parametrize("runs", [True, False], ids=["runs", "will run"])
def test_where_another_profiler_runs_no_recording_is_ended(profile_steps, runs):
    backend = FakeBackend(profiler="busy" if runs else "free")
    trainer, report = driven(backend, options(profile_steps=profile_steps))
    trainer.fit.is_profiled = lambda: not runs
    for step in range(6):
        trainer.run(batch_of(step * SIZE, SIZE))
    assert event_kinds(report) == ["risk", "profile", "measured"]
    assert "Another profiler session is running" in report.events[1].message


@pytest.mark.parametrize("profiler", ["free", "blind", "busy"])
def test_a_plain_step_that_fits_is_recorded_where_a_larger_batch_is_searched(profiler):
    """Once, in order, and Keras's own step comes back whatever the profiler saw."""
    backend = FakeBackend(profiler=profiler)
    trainer, report = driven(backend, options(limit=PLAIN))
    for step in range(20):
        trainer.run(batch_of(step * SIZE, SIZE), StepConstraints(wants_profile=True))
    assert backend.kinds[:3] == ["plain"] * 3
    recorded = backend.kinds.count("remat")
    assert 2 <= recorded <= 4
    assert backend.kinds[3:] == ["remat"] * recorded + ["plain"] * (17 - recorded)
    assert event_kinds(report) == ["profile", "plain", "fits"]
    assert trainer.plan is None
    assert trainer.settled
    source = "measured" if profiler == "free" else "estimated"
    assert trainer.reference_costs(batch_of(0, SIZE))[0].profile.source == source
    assert backend.samples == list(range(20 * SIZE))


def gathering():
    """A backend whose allocator's peaks depend on the order, and the steps, numbered from 0, before
    which variables were brought together."""
    backend, gathered = FakeBackend(), []
    backend.memory.order_matters = backend.memory.restores_after_plain = True
    backend.snapshot = lambda model: lambda: gathered.append(len(backend.ran))
    return backend, gathered


@pytest.mark.parametrize(("order_matters", "first"), [(True, "remat"), (False, "plain")])
def test_a_plain_step_whose_peak_differs_from_step_to_step_needs_room(order_matters, first):
    backend, _ = gathering()
    backend.memory.order_matters = order_matters
    trainer, report = driven(backend, options(limit=PLAIN))
    train(trainer, 10)
    assert backend.kinds == [first] * 10
    assert ("risk" in event_kinds(report)) == order_matters


def test_variables_are_brought_together_before_steps_in_order_that_follow_plain_ones():
    backend, gathered = gathering()
    trainer, _ = driven(backend, options(limit=2 * PLAIN))
    for step in range(20):
        trainer.run(batch_of(step * SIZE, SIZE), StepConstraints(wants_profile=True))
    first = backend.kinds.index("remat")
    assert gathered == [first]


@pytest.mark.parametrize(("restores", "times"), [(True, [0]), (False, [])])
def test_where_the_memory_model_does_not_ask_for_it_variables_stay_where_they_are(restores, times):
    backend, gathered = gathering()
    backend.memory.restores_after_plain = restores
    trainer, _ = driven(backend, options())
    train(trainer, 2)
    assert set(backend.kinds) == {"remat"}
    assert gathered == times


def test_a_first_plan_is_for_variables_where_its_first_step_finds_them():
    """Brought together, they lie in other chunks of the pool."""
    backend, gathered = gathering()
    backend.device.in_use_bytes = lambda: (2 if gathered else 1) * RESIDENT_BYTES
    trainer, _ = driven(backend, options())
    train(trainer, 1)
    problem, _ = trainer.reference_costs(batch_of(0, SIZE))
    assert problem.profile.resident_bytes == 2 * RESIDENT_BYTES


def test_a_plan_after_a_plain_step_over_the_limit_is_for_variables_that_were_put_back():
    backend, gathered = gathering()
    backend.memory.order_matters = False  # so that Keras's own step begins
    backend.device.in_use_bytes = lambda: (2 if gathered else 1) * RESIDENT_BYTES
    backend.surplus_bytes = lambda what, size: what == "plain"
    trainer, _ = driven(backend, options(limit=PLAIN))
    train(trainer, 4)
    first = backend.kinds.index("remat")
    assert gathered == [first]
    problem, _ = trainer.reference_costs(batch_of(0, SIZE))
    assert problem.profile.resident_bytes == 2 * RESIDENT_BYTES


def test_the_pool_is_looked_at_before_a_first_plan():
    """It is seen as the first planned step finds it, up to the limit."""
    backend, gathered = gathering()
    looks = []
    backend.memory.look = lambda *asked: looks.append((asked, len(backend.ran), len(gathered)))
    trainer, _ = driven(backend, options())
    train(trainer, 4)
    problem, _ = trainer.reference_costs(batch_of(0, SIZE))
    ((asked, steps, put_back),) = looks
    assert asked[0].graph == problem.graph
    assert asked[1:] == ((), TIGHT)
    assert (steps, put_back) == (0, 1)


def test_what_a_step_will_hold_is_counted_before_it_does(monkeypatch):
    monkeypatch.setattr(FakeStep, "held_bytes", (30, 12))
    backend, _ = gathering()
    backend.device.in_use_bytes = lambda: RESIDENT_BYTES
    trainer, _ = driven(backend, options())
    train(trainer, 1)
    problem, _ = trainer.reference_costs(batch_of(0, SIZE))
    assert problem.profile.resident_bytes == RESIDENT_BYTES + 42


@pytest.mark.parametrize("order_matters", [True, False])
def test_a_batch_that_is_to_run_in_order_does_so_where_the_plain_step_fits(order_matters):
    backend, _ = gathering()
    backend.memory.order_matters = order_matters
    trainer, report = driven(backend, options())
    train(trainer, 10)
    small = SIZE // 10
    for step in range(6):
        trainer.run(batch_of(step * small, small), StepConstraints(require_planned=True))
    assert set(backend.kinds[10:]) == {"remat" if order_matters else "plain"}
    assert event_kinds(report).count("risk") == 1, "what fits is no risk"


def test_what_plain_steps_held_between_them_is_not_what_steps_in_order_hold():
    """Keras's own step leaves variables in chunks of up to twice their size."""
    backend, seen = FakeBackend(), []
    scattered = {"plain": 2 * RESIDENT_BYTES, "remat": RESIDENT_BYTES}
    backend.device.in_use_bytes = lambda: scattered[(backend.kinds or ["remat"])[-1]]
    stop = backend._stop_recording
    backend._stop_recording = lambda run, nbytes: (seen.append(nbytes), stop(run, nbytes))[1]
    trainer, _ = driven(backend, options(limit=PLAIN))
    for step in range(12):
        trainer.run(batch_of(step * SIZE, SIZE), StepConstraints(wants_profile=True))
    assert seen == [RESIDENT_BYTES]


def test_a_plain_step_stays_where_no_plan_is_found_to_record(monkeypatch):
    def nothing(*_, **__):
        raise ScheduleNotFoundError(1, 1)

    note_solves(monkeypatch, nothing)
    trainer, report = driven(FakeBackend(), options(limit=PLAIN))
    for step in range(6):
        trainer.run(batch_of(step * SIZE, SIZE), StepConstraints(wants_profile=True))
    assert event_kinds(report) == ["fits"]


def test_without_a_limit_the_devices_memory_is_it():
    trainer, report = driven(FakeBackend(memory_bytes=PLAIN * 2), options(limit=None, margin=0.25))
    assert report.limit_bytes is None
    train(trainer, 1)
    assert report.limit_bytes == PLAIN * 2
    assert trainer.tools.plain_fits(int(PLAIN * 1.5))
    assert not trainer.tools.plain_fits(int(PLAIN * 1.5) + 1)


def test_risky_step_is_planned_recorded_planned_again_verified_and_settled():
    backend = FakeBackend()
    trainer, report = driven(backend, options())
    trainer.run(batch_of(0, SIZE))
    assert trainer.plan.profile_source == "estimated"
    train(trainer, 2)
    assert trainer.plan.profile_source == "measured"
    assert trainer.plan.measured is None
    assert not trainer.settled
    train(trainer, 7)
    assert backend.kinds == ["remat"] * 10, "the plain step must never run"
    assert not backend.recording
    assert trainer.settled
    assert trainer.plan.measured.peak_bytes == trainer.settled_peak_bytes <= TIGHT
    assert event_kinds(report)[0] == "risk"
    assert event_kinds(report)[-1] == "measured"
    assert report.baseline_source == "predicted"
    assert report.baseline.peak_bytes == PLAIN
    assert report.baseline.time_s == pytest.approx(0.016)
    assert trainer.problem.profile.source == "measured"


@pytest.mark.parametrize("left", [None, 0, 2, "kept for other fits"])
def test_solving_takes_no_longer_than_the_steps_that_are_left_can_save(left, monkeypatch, tmp_path):
    """An op takes a second in the fake profile; the third step is the last that is recorded."""
    limits_s = []
    note_solves(monkeypatch, lambda *_, time_limit_s, **__: limits_s.append(time_limit_s))
    kept = tmp_path if left == "kept for other fits" else None
    most_steps = {None: None, 2: 5}.get(left, 3)
    chosen = options(solver_time_limit_s=25.0, cache_dir=kept)
    trainer, report = driven(FakeBackend(), chosen, most_steps=most_steps)
    train(trainer, 1)
    first = trainer.plan
    overhead_s = first.predicted.time_s - first.store_all.time_s
    assert overhead_s >= 1
    train(trainer, 2)
    _, *later = limits_s
    assert later == {0: [], 2: [min(25.0, 2 * overhead_s)]}.get(left, [25.0])
    assert ("enough" in event_kinds(report)) == (left == 0)
    assert trainer.plan.profile_source == "measured"
    train(trainer, 7)
    assert trainer.settled


@pytest.mark.parametrize("limit", [TIGHT, PLAIN * 2], ids=["planned", "plain"])
def test_a_settled_step_asks_for_no_prediction(limit, monkeypatch):
    """A replay takes as long as a step of a small model."""
    backend = FakeBackend()
    trainer, _ = driven(backend, options(limit=limit))
    train(trainer, 10)
    assert trainer.settled
    asked = []
    monkeypatch.setattr(backend.memory, "peak_bytes", lambda *of: asked.append(of))
    train(trainer, 5)
    assert not asked


def test_a_settled_step_is_neither_copied_nor_waited_for_until_a_look_is_due(monkeypatch):
    backend = FakeBackend()
    trainer, _ = driven(backend, options())
    train(trainer, 10)
    assert trainer.settled
    assert trainer.plan is not None
    before = backend.snapshots, backend.waits
    monkeypatch.setattr(Pace, "is_due", lambda self: False)
    asked = []
    monkeypatch.setattr(backend.device, "in_use_bytes", lambda: asked.append(1) or 0)
    train(trainer, 5)
    assert (backend.snapshots, backend.waits) == before
    assert not asked
    monkeypatch.setattr(Pace, "is_due", lambda self: True)
    train(trainer, 1)
    assert backend.waits == before[1] + 2  # for what was queued, and for the step
    assert backend.kinds[-6:] == ["remat"] * 6


def test_counter_has_every_sample_and_starts_again():
    backend = FakeBackend()
    trainer, _ = driven(backend, options())
    train(trainer, 3)
    counter = trainer.fit.take_counter()
    assert (counter.steps, counter.samples) == (3, 3 * SIZE)
    assert counter.step_time_s >= 3 * 0.016
    assert RESIDENT_BYTES < counter.peak_bytes <= TIGHT
    assert trainer.fit.take_counter().samples == 0


def test_limit_no_schedule_meets_is_refused_before_anything_is_trained():
    backend = FakeBackend()
    floor = chain_problem(SIZE).floor_bytes
    trainer, _ = driven(backend, options(limit=floor - 1))
    with pytest.raises(InfeasibleBudgetError, match="batch of") as caught:
        trainer.run(batch_of(0, SIZE))
    assert caught.value.floor_bytes == floor
    assert backend.ran == []


# ------------------------------------------------------------------ the profiler


@pytest.mark.parametrize(("surplus", "goes_on"), [(0, True), (10 * PLAIN, False)])
def test_a_recording_ends_with_its_first_step_over_the_limit(surplus, goes_on):
    backend = FakeBackend(surplus_bytes=lambda what, size: surplus)
    trainer, _ = driven(backend, options(profile_steps=5))
    train(trainer, 2)  # one that is recorded
    assert backend.recording is goes_on


def test_why_op_times_are_estimates_is_an_event():
    trainer, report = driven(FakeBackend(profiler_remark="No kernels were seen."), options())
    train(trainer, 8)
    assert [e.message for e in report.events if e.kind == "profile"] == ["No kernels were seen."]


@pytest.mark.parametrize("first", [2, 3])
def test_a_recording_has_no_steps_of_other_shapes_and_what_it_saw_counts(first):
    larger = int(1.2 * SIZE)
    backend = FakeBackend()
    trainer, report = driven(backend, options(profile_steps=3))
    train(trainer, first)  # in the midst of its recording
    assert backend.recording
    for _ in range(8):
        for size in (larger, SIZE):
            recording, ran = backend.recording, len(backend.ran)
            train(trainer, 1, size)
            assert len(backend.ran) == ran + 1
            assert not (recording and backend.recording), "two shapes in one recording"
    assert trainer.settled
    assert "profile" not in event_kinds(report)
    assert trainer.plan.profile_source == "measured"
    assert trainer.reference_costs(batch_of(0, SIZE))[1].keys() == {larger}
    assert backend.samples == [*range(first * SIZE), *(list(range(larger)) + list(range(SIZE))) * 8]


def test_close_ends_a_recording():
    backend = FakeBackend()
    trainer, _ = driven(backend, options())
    train(trainer, 2)
    assert backend.recording
    trainer.close()
    assert not backend.recording
    trainer.close()


# ------------------------------------------------------------------ what cannot be swapped


def test_a_step_with_random_state_in_its_kernels_is_not_swapped():
    """A kernel that is built anew draws its first numbers again."""
    backend = FakeBackend(kind="RandomStandardNormal")
    trainer, _ = driven(backend, options())
    with pytest.raises(UnsupportedModelError, match=r"keras\.random"):
        train(trainer, 1)
    assert backend.ran == []


# ------------------------------------------------------------------ what is told


def test_errors_name_the_solver_that_was_asked_for(monkeypatch):
    backend = FakeBackend()
    backend.auto_solver = "greedy"
    floor = chain_problem(SIZE).floor_bytes
    trainer, _ = driven(backend, options(limit=floor + 1, solver="auto", solver_time_limit_s=1.0))
    backend.allocator_bytes = lambda problem, schedule: PLAIN
    with pytest.raises(ScheduleNotFoundError) as caught:
        train(trainer, 1)
    assert "greedy" not in str(caught.value)


def test_events_tell_the_step_that_they_come_after():
    backend = FakeBackend()
    backend.surplus_bytes = lambda what, size: 2 * SIZE * 1024 if backend.calls > 30 else 0
    trainer, report = driven(backend, options())
    train(trainer, 50)
    steps = {event.kind: event.step for event in report.events}
    assert steps["risk"] == 0
    assert steps["swap"] > 30
    assert [event.step for event in report.events] == sorted(e.step for e in report.events)


def test_nobody_but_the_driver_assigns_the_record():
    folder = Path(driver.__file__).parent
    for path in folder.glob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text()))
        stored = [
            node
            for node in nodes
            if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and node.attr == "record"
        ]
        assert bool(stored) == (path.name == "driver.py"), path.name


def test_what_the_record_holds_is_frozen():
    for kind in (FitRecord, StepsRecord, SizesRecord, ShapeState, Contest, SizeChooser, DeviceFacts,
                 Baseline, HeldBatches, Mode):  # fmt: skip
        assert kind.__dataclass_params__.frozen, kind
