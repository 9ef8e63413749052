"""Which batch size a fit finds: the fastest by steps that train, the largest by a real search."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from fake_backend import (
    SAMPLE_BYTES,
    FakeBackend,
    batch_of,
    event_kinds,
    note_solves,
    store_all_peak,
)
from sized_fits import (
    LOADER,
    FakeSteps,
    Fixed,
    assert_all_once,
    epoch,
    on_tuner,
    stand_ins,  # noqa: F401 - a fixture that all tests use
    trained_on,
)

from keras_remat.backends.batches import batch_bytes
from keras_remat.batch_size.size_chooser import SizeChooser
from keras_remat.errors import InfeasibleBudgetError
from keras_remat.training import driver, modes, sizes
from keras_remat.units import format_bytes

# ------------------------------------------------------------------ the fastest size


class Timed(FakeSteps):
    """Steps whose time follows from their size."""

    def __init__(self, clock, seconds):
        super().__init__()
        self.clock, self.seconds = clock, seconds

    def __call__(self, fit, mode, batch, constraints, timed):
        self.clock[0] += self.seconds(len(batch[0]))
        return super().__call__(fit, mode, batch, constraints, timed)


def fastest_of(monkeypatch, seconds, seconds_before=None, largest=80):
    """The sizes of the steps of a fit with ``"fastest"``; of those after the model was compiled
    anew, where it was before. The search finds that ``largest`` samples fit."""
    clock = [0.0]
    monkeypatch.setattr(driver.time, "perf_counter", lambda: clock[0])
    steps = Timed(clock, seconds)
    trainer = Fixed(steps, "fastest")
    search = SimpleNamespace(max_batch_size=largest, plan=None, orders=[], __str__=lambda self: "")
    monkeypatch.setattr(sizes, "_search", lambda *arguments: search)
    if seconds_before is not None:
        steps.seconds = seconds_before
        epoch(trainer, batches=200)
        trainer.fit.stand_in = steps = Timed(clock, seconds)
        driver.note(trainer.fit, modes.begun_anew)
    total = epoch(trainer, batches=200)
    assert_all_once(steps.trained, total)
    assert trainer.sizes.chooser is None, "the comparison has ended"
    return [len(numbers) for numbers in steps.trained]


@pytest.mark.parametrize(
    ("seconds", "fastest"),
    [
        (lambda size: 1.0, 80),
        (lambda size: size, LOADER),
        (lambda size: 1.0 if size <= 40 else size, 40),
        (lambda size: size * (1.0 + size / 100), LOADER),
    ],
)
def test_fastest_is_the_size_that_measures_most_samples_a_second(monkeypatch, seconds, fastest):
    sizes = fastest_of(monkeypatch, seconds)
    assert sizes[-2] == fastest
    assert max(sizes) <= 80


def test_what_fit_was_given_is_measured_again_before_a_larger_batch_stays(monkeypatch):
    """A device that was slow for the first steps, and only then."""
    calls = iter(range(10_000))
    sizes = fastest_of(monkeypatch, lambda size: size * (3.0 if next(calls) < 10 else 1.0))
    assert max(sizes) > LOADER
    assert sizes[-2] == LOADER


def test_samples_that_are_left_when_the_size_changes_do_not_end_the_comparison(monkeypatch):
    sizes = fastest_of(monkeypatch, lambda size: 1.0, largest=23)
    assert sizes[sizes.index(23) :].count(LOADER) >= 5, "compared with what fit was given again"
    assert any(size < LOADER for size in sizes[:-1]), "samples were left"
    assert sizes[-2] == 23


def test_a_model_that_is_compiled_anew_is_compared_anew(monkeypatch):
    sizes = fastest_of(monkeypatch, lambda size: size * (1.0 + size / 100), lambda size: 1.0)
    assert sizes[-2] == LOADER


# ------------------------------------------------------------------ with a tuner and a search


def test_max_finds_more_than_fits_plainly_and_trains_with_it():
    backend = FakeBackend()
    trainer, report = trained_on(backend, "max", store_all_peak(4 * LOADER), batches=60)
    found = trainer.sizes.search.max_batch_size
    assert report.max_batch_size == report.batch_size >= found > 4 * LOADER
    assert trainer.sizes.search.plain_batch_size == 4 * LOADER - 1  # a batch waits beside a step
    assert trainer.changes[0] == (LOADER, found)
    assert report.baseline_source == "measured"
    assert {"fits", "search", "batch", "risk"} <= set(event_kinds(report))


@pytest.mark.parametrize(
    "rule", [lambda size: size <= LOADER, lambda size: size > 40, lambda size: size % 4 == 0]
)
def test_framework_that_folds_an_op_at_some_sizes_is_no_error(rule):
    backend = FakeBackend(folds=rule)
    _, report = trained_on(backend, "max", store_all_peak(4 * LOADER), batches=60)
    assert report.batch_size > LOADER


def test_int_above_the_loaders_is_the_most_it_becomes():
    backend = FakeBackend()
    trainer, report = trained_on(backend, 24, 2**40, batches=30)
    assert trainer.changes == [(LOADER, 24)]
    assert report.max_batch_size == 24
    assert len(backend.ran[-2][1]) == 24


@pytest.mark.parametrize(("wanted", "largest"), [("max", 40), (1000, 400), (200, 200)])
def test_an_epoch_keeps_ten_updates_unless_a_number_was_asked_for(wanted, largest):
    backend = FakeBackend()
    trainer, report = on_tuner(backend, wanted, 2**40, steps_per_epoch=40)
    for _ in range(2):
        epoch(trainer, batches=40)
    assert len(backend.samples) == 800
    assert report.max_batch_size == largest
    assert max(sizes_of(backend)) == largest


def test_epoch_too_short_for_larger_batches_keeps_the_loaders():
    backend = FakeBackend()
    trainer, report = trained_on(backend, "max", 2**40, steps_per_epoch=8, batches=8)
    assert trainer.changes == []
    assert report.max_batch_size == LOADER


def test_measured_plain_peak_that_no_schedule_meets_trains_no_sample_twice():
    """Batches above the loader's take far more than predicted: found out only after the first steps
    of them were trained."""
    backend = FakeBackend(surplus_bytes=lambda what, size: 0 if size <= LOADER else 2**40)
    trainer, _ = trained_on(backend, 40, store_all_peak(64), batches=40)
    assert trainer.changes[0] == (LOADER, 40)
    assert trainer.changes[-1][1] < 40


def sizes_of(backend):
    """The batch sizes that were trained, each once, in the order of their first step."""
    return list(dict.fromkeys(len(numbers) for _, numbers in backend.ran))


def test_measured_peak_that_leaves_room_is_stepped_up_to():
    """Steps above the loader's batch take a quarter less than predicted: found out only while they
    are trained."""
    limit = store_all_peak(4 * LOADER)
    backend = FakeBackend(surplus_bytes=lambda what, size: 0 if size <= LOADER else -limit // 4)
    trainer, report = trained_on(backend, "max", limit, batches=400)
    found = trainer.sizes.search.max_batch_size
    assert trainer.changes[0] == (LOADER, found)
    assert report.batch_size == trainer.changes[-1][1] > 1.1 * found
    assert 1 <= event_kinds(report).count("step-up") == len(trainer.changes) - 1 <= 3
    assert [new for _, new in trainer.changes] == sorted(new for _, new in trainer.changes)
    assert f"a batch of {found} measured" in next(
        event.message for event in report.events if event.kind == "step-up"
    )


def test_a_search_whose_sizes_are_not_reached_after_all_leaves_the_loaders_batch(monkeypatch):
    monkeypatch.setattr(SizeChooser, "choose", lambda self, *_: (self, None))
    limit = store_all_peak(4 * LOADER)
    trainer, report = on_tuner(FakeBackend(), "max", limit)
    epoch(trainer, batches=40)
    assert trainer.changes == []
    assert report.max_batch_size == LOADER
    told = [event.message for event in report.events if event.kind == "search"]
    assert "No larger batch" in told[-1]
    assert format_bytes(limit - batch_bytes(batch_of(0, LOADER))) in told[-1]


class Switching(FakeBackend):
    """Kernels that take as much for themselves as an output has, from twice the loader's samples
    on. Shapes tell."""

    def __init__(self):
        super().__init__(surplus_bytes=lambda what, size: self.scratch(size))
        self.peaks = []

    @staticmethod
    def scratch(size):
        return SAMPLE_BYTES * size if size >= 2 * LOADER else size

    def _with_scratch(self, profile, graph):
        scratch = self.scratch(graph.values[0].nbytes // SAMPLE_BYTES)
        return replace(profile, op_workspace_bytes=(scratch,) * len(graph.ops))

    def estimated_profile(self, traced, resident_bytes=None):
        return self._with_scratch(super().estimated_profile(traced, resident_bytes), traced.graph)

    def _stop_recording(self, lowered, resident_bytes):
        profile = super()._stop_recording(lowered, resident_bytes)
        return self._with_scratch(profile, lowered.problem.graph)

    def measure(self, run, *, wait=True):
        result, usage = super().measure(run, wait=wait)
        self.peaks.append(usage.peak_bytes)
        return result, usage


def test_a_larger_size_whose_kernels_are_others_keeps_to_the_limit_from_its_first_step_on():
    """MobileNet's first 22 samples took 108 MiB on PyTorch, where the limit was 105."""
    backend, limit = Switching(), store_all_peak(4 * LOADER)
    trainer, report = on_tuner(backend, "max", limit)
    epoch(trainer, batches=400)
    assert report.batch_size >= 3 * LOADER
    assert max(backend.peaks) <= limit


def test_a_plan_that_recomputes_more_than_the_search_allowed_is_an_event(monkeypatch):
    """Measured op times change what an order costs; the steps are kept all the same."""
    for allowed in (True, False):
        monkeypatch.setattr(
            "keras_remat.training.sizes.overhead_bound",
            lambda *_, allowed=allowed: 9.0 if allowed else -1.0,
        )
        trainer, report = on_tuner(FakeBackend(), "max", store_all_peak(4 * LOADER))
        epoch(trainer, batches=200)
        told = [event.message for event in report.events if event.kind == "remark"]
        assert allowed == (not told)
        assert all("forward pass" in message for message in told)


def test_step_up_that_measures_over_the_limit_goes_back_to_the_size_before_and_stays():
    limit = store_all_peak(4 * LOADER)
    found = []

    def surplus(what, size):
        if size <= LOADER:
            return 0
        found.append(size)
        return -limit // 4 if size <= found[0] else limit

    backend = FakeBackend(surplus_bytes=surplus)
    trainer, report = trained_on(backend, "max", limit, batches=400)
    up, down = trainer.changes[1:]
    assert up[0] == down[1] == report.batch_size == trainer.sizes.search.max_batch_size
    assert up[1] == down[0] > up[0]
    assert event_kinds(report).count("step-up") == event_kinds(report).count("step-down") == 1


def test_after_a_step_down_there_is_a_way_up_again_below_the_size_that_failed():
    limit = store_all_peak(4 * LOADER)
    found = []

    def surplus(what, size):
        if size <= LOADER:
            return 0
        found.append(size)
        return limit // 4 if size >= found[0] else -limit // 4

    backend = FakeBackend(surplus_bytes=surplus)
    trainer, report = trained_on(backend, "max", limit, batches=400)
    kinds = [kind for kind in event_kinds(report) if kind.startswith("step-")]
    assert kinds[0] == "step-down"
    assert "step-up" in kinds
    assert trainer.changes[1][1] < report.batch_size < found[0] == trainer.changes[0][1]


def test_no_step_up_is_above_what_was_asked_for_or_the_epoch():
    limit = store_all_peak(4 * LOADER)
    for batch_size, steps in ((50, None), ("max", 50)):
        backend = FakeBackend(surplus_bytes=lambda what, size: 0 if size <= LOADER else -limit // 4)
        trained_on(backend, batch_size, limit, steps_per_epoch=steps, batches=100)
        assert max(sizes_of(backend)) == 50


def test_steps_up_begin_with_an_order_that_is_known(monkeypatch):
    """The found size trains by the search's order at once and stays with it: what is solved for is
    the plan that the given batch is recorded under."""
    backend, solved = FakeBackend(), []
    note_solves(monkeypatch, lambda *_, **__: solved.append(len(backend.ran)))
    trainer, _ = on_tuner(backend, "max", store_all_peak(4 * LOADER))
    epoch(trainer, batches=60)
    first = next(at for at, (_, numbers) in enumerate(backend.ran) if len(numbers) > LOADER)
    (recorded,) = set(solved)
    assert recorded < first - 3


def test_search_that_fails_keeps_the_loaders_batch(monkeypatch):
    def fail(*args, **options):
        raise InfeasibleBudgetError(1, 2)

    monkeypatch.setattr("keras_remat.training.sizes.search_batch_size", fail)
    backend = FakeBackend()
    trainer, report = trained_on(backend, "max", 2**40, batches=12)
    assert trainer.changes == []
    assert report.max_batch_size == LOADER
    assert "No larger batch" in report.events[-1].message
