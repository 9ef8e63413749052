"""What the driver does otherwise on a GPU, in several processes, and where nothing counts
memory."""

import time

import pytest
from fake_backend import (
    RESIDENT_BYTES,
    FakeBackend,
    batch_of,
    event_kinds,
    plan_in_fake_processes,
)
from fake_fit import PLAIN, SIZE, TIGHT, Clock, driven, options, train

from keras_remat.backends.processes import Processes
from keras_remat.planning import request as door
from keras_remat.training.shape_state import StepConstraints
from keras_remat.training.watch import Pace

# ------------------------------------------------------------------ what a GPU does

GIB = 2**30


@pytest.mark.parametrize("limit", [PLAIN, TIGHT], ids=["plain", "plan"])
def test_first_calls_that_take_more_decide_nothing(limit):
    """Kernels are tuned in them, with scratch of gigabytes; later calls do not need that."""
    quiet, tuning = FakeBackend(), FakeBackend(first_call_bytes=4 * GIB)
    reports = []
    for backend in (quiet, tuning):
        trainer, report = driven(backend, options(limit=limit))
        train(trainer, 12)
        trainer.run(batch_of(0, SIZE // 2))
        assert trainer.settled
        reports.append(report)
    assert tuning.ran == quiet.ran
    assert event_kinds(reports[1]) == event_kinds(reports[0])
    assert reports[1].baseline.peak_bytes == reports[0].baseline.peak_bytes == PLAIN
    assert reports[1].baseline.time_s == pytest.approx(reports[0].baseline.time_s)
    if limit == TIGHT:
        assert trainer.plan.measured.peak_bytes <= TIGHT


@pytest.mark.parametrize("device", ["GPU:0", "CPU:0"])
def test_on_a_gpu_only_the_first_call_of_a_step_is_guarded(device, monkeypatch):
    monkeypatch.setattr("keras_remat.training.undo.CHEAP_SHARE", -1.0)
    plan_in_fake_processes(monkeypatch)
    backend = FakeBackend(device_name=device)
    trainer, _ = driven(backend, options())
    train(trainer, 12)
    assert trainer.settled
    if device.startswith("GPU"):
        assert backend.snapshots == len(backend.lowered)
    else:
        assert backend.snapshots > len(backend.lowered)


def test_on_a_gpu_a_settled_step_is_waited_for_at_every_20th_call_at_most(monkeypatch):
    plan_in_fake_processes(monkeypatch)
    backend, clock = FakeBackend(device_name="GPU:0"), Clock()
    clock.follow(backend)
    monkeypatch.setattr(time, "perf_counter", clock)
    trainer, _ = driven(backend, options(profile_steps=2))
    while not trainer.settled:
        train(trainer, 1)
    assert backend.waits == len(backend.ran)
    train(trainer, 10)  # the first looks come at once
    backend.waits = 0
    train(trainer, 100)
    assert 0 < backend.waits <= 2 * 5, "what is queued is waited for before a step is timed"


def gpu_trainer(most_steps=None, **more):
    """A backend on a GPU, its trainer and the report."""
    backend = FakeBackend(device_name="GPU:0", **more)
    trainer, report = driven(backend, options(), most_steps=most_steps)
    return backend, trainer, report


def test_on_a_gpu_training_goes_on_while_a_process_solves(monkeypatch):
    processes = plan_in_fake_processes(monkeypatch, steps=30)
    backend, trainer, report = gpu_trainer()
    train(trainer, 10)
    (process,) = processes
    assert process.request.problem.profile.source == "measured"
    assert process.request.known == trainer.plan.solution.schedule
    assert trainer.plan.profile_source == "estimated"
    assert not trainer.settled
    waits = backend.waits
    train(trainer, 20)
    assert backend.waits - waits <= 2 * 2, "the solver takes long: steps are not waited for"
    train(trainer, 20)
    assert trainer.settled
    assert trainer.plan.profile_source == "measured"
    assert trainer.plan.measured.peak_bytes <= TIGHT
    assert backend.samples == [*range(10 * SIZE), *range(20 * SIZE), *range(20 * SIZE)]
    assert event_kinds(report).count("beside") == 1
    (first, *_), last = backend.ran[0], backend.ran[-1][0]
    assert [what for what, _ in backend.ran[:30]] == [first] * 30
    assert last == trainer.plan.solution.schedule


def test_a_plan_that_is_over_the_limit_meanwhile_waits_for_the_process(monkeypatch):
    processes = plan_in_fake_processes(monkeypatch, steps=10**6)
    late = {"bytes": 0}
    backend, trainer, _ = gpu_trainer(surplus_bytes=lambda what, size: late["bytes"])
    train(trainer, 8)
    assert len(processes) == 1
    assert len(backend.lowered) == 1
    late["bytes"] = 4 * TIGHT
    train(trainer, 1)
    late["bytes"] = 0
    train(trainer, 4)
    assert trainer.settled
    assert trainer.plan.profile_source == "measured"


def test_a_process_that_fails_is_told_and_planning_begins_anew(monkeypatch):
    plan_in_fake_processes(monkeypatch, fails_with="no memory")
    _, trainer, report = gpu_trainer()
    with pytest.warns(UserWarning, match="no memory"):
        train(trainer, 12)
    assert trainer.settled
    assert trainer.plan.profile_source == "measured"
    assert event_kinds(report).count("beside") == 2


def test_a_process_that_cannot_be_started_is_told(monkeypatch):
    def none(request):
        raise BlockingIOError("no more processes")

    monkeypatch.setattr("keras_remat.training.effects.PlanProcess", none)
    _, trainer, _ = gpu_trainer()
    with pytest.warns(UserWarning, match="no more processes"):
        train(trainer, 12)
    assert trainer.settled
    assert trainer.plan.profile_source == "measured"


def test_a_process_that_finds_nothing_leaves_the_running_plan(monkeypatch):
    plan_in_fake_processes(monkeypatch, finds=False)
    backend, trainer, report = gpu_trainer()
    train(trainer, 12)
    assert trainer.settled
    assert len(backend.lowered) == 1
    assert "kept" in event_kinds(report)


def test_what_a_process_found_is_held_against_what_was_measured_meanwhile(monkeypatch):
    """Steps of another shape have shown that the allocator needs more."""
    processes = plan_in_fake_processes(monkeypatch, steps=6)
    more = {"bytes": 0}
    backend, trainer, _ = gpu_trainer(allocator_bytes=lambda problem, schedule: more["bytes"])
    train(trainer, 5)
    found = door.plan_for(processes[0].request)
    monkeypatch.setattr(processes[0], "answer", lambda: found, raising=False)
    more["bytes"] = TIGHT - found.predicted.peak_bytes + 1
    backend.surplus_bytes = lambda what, size: -more["bytes"]  # the running step is what it was
    train(trainer, 12)
    assert trainer.settled
    assert trainer.plan.predicted.peak_bytes <= TIGHT
    assert found.solution.schedule not in backend.lowered[1:]


def test_out_of_memory_ends_the_process(monkeypatch):
    processes = plan_in_fake_processes(monkeypatch, steps=10**6)
    backend, trainer, report = gpu_trainer()
    train(trainer, 8)
    backend.fails_at = {backend.calls + 1}
    train(trainer, 4)
    assert [process.ended for process in processes] == [True]
    assert "out-of-memory" in event_kinds(report)
    assert backend.samples == [*range(8 * SIZE), *range(4 * SIZE)]
    assert trainer.settled


@pytest.mark.parametrize("end", ["close", "another shape"])
def test_a_process_is_ended_with_training(end, monkeypatch):
    processes = plan_in_fake_processes(monkeypatch, steps=10**6)
    _, trainer, _ = gpu_trainer()
    train(trainer, 8)
    if end == "another shape":
        train(trainer, 1, size=SIZE // 2)
        assert not processes[0].ended, "its steps go on"
    trainer.close()
    trainer.close()
    assert all(process.ended for process in processes)
    train(trainer, 6)
    assert trainer.settled, "what was not solved for beside training is solved for"


@pytest.mark.parametrize("repays", [True, False])
def test_no_process_is_started_for_what_the_steps_that_are_left_cannot_repay(repays, monkeypatch):
    processes = plan_in_fake_processes(monkeypatch)
    _, trainer, report = gpu_trainer(most_steps=10**6 if repays else 3)
    train(trainer, 9)
    assert len(processes) == repays
    assert ("enough" in event_kinds(report)) == (not repays)


# ------------------------------------------------------------------ several processes


@pytest.mark.parametrize("limit", [PLAIN, TIGHT], ids=["plain", "plan"])
@pytest.mark.parametrize("device", ["CPU:0", "GPU:0"])
def test_several_processes_wait_for_the_same_final_steps(device, limit, monkeypatch):
    """Each tells the others what it measured then. A clock would say something else in each."""
    monkeypatch.setattr(Pace, "is_due", lambda pace: pytest.fail("a clock was asked"))
    monkeypatch.setattr(Processes, "count", 2)
    processes = plan_in_fake_processes(monkeypatch)
    backend = FakeBackend(device_name=device)
    trainer, _ = driven(backend, options(limit=limit))
    while not trainer.settled:
        train(trainer, 1)
    assert backend.waits == len(backend.ran) < 20
    waited = []
    for step in range(len(backend.ran), 50):
        before = backend.waits
        train(trainer, 1)
        waited += [step] * (backend.waits > before)
    assert waited == [20, 40]
    assert processes == [], "nothing is solved for beside training"
    assert backend.snapshots == 0, "one alone cannot train a batch again"


# ------------------------------------------------------------------ no statistics


@pytest.mark.parametrize("limit", [PLAIN, TIGHT], ids=["plain", "plan"])
def test_without_statistics_plans_are_made_by_predicted_peaks(limit):
    backend = FakeBackend(has_statistics=False)
    trainer, report = driven(backend, options(limit=limit))
    with pytest.warns(UserWarning, match="enable_cpu_memory_stats") as warned:
        train(trainer, 12)
    assert len(warned) == 1
    assert event_kinds(report).count("predicted") == 1
    assert trainer.settled
    assert backend.kinds == ["plain" if limit == PLAIN else "remat"] * 12
    assert report.baseline.peak_bytes == PLAIN
    assert report.baseline.time_s == pytest.approx(0.016)
    assert trainer.settled_peak_bytes is None
    if limit == TIGHT:
        assert trainer.plan.measured is None
        assert trainer.problem.profile.source == "measured"
        assert trainer.problem.profile.resident_bytes == RESIDENT_BYTES
        assert trainer.plan.predicted.peak_bytes <= TIGHT
        assert "measured peak" not in report.events[-1].message.lower()


def test_without_statistics_a_larger_batch_is_planned_by_what_was_recorded():
    """No measured peak shows that its order, which was made before, takes more."""
    trainer, report = driven(FakeBackend(has_statistics=False), options(limit=TIGHT))
    larger = StepConstraints(allow_over_limit=False)
    with pytest.warns(UserWarning, match="enable_cpu_memory_stats"):
        trainer.run(batch_of(0, SIZE), larger)
    for step in range(1, 6):
        trainer.run(batch_of(step * SIZE, SIZE), larger)
    assert event_kinds(report)[-2:] == ["swap", "measured"]
