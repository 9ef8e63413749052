"""Which batch size a fit trains with: every sample once, whatever fits and whatever fails."""

import gc
import itertools
import warnings
import weakref
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from fake_backend import (
    FakeBackend,
    batch_of,
    event_kinds,
    note_solves,
    store_all_peak,
)
from fake_fit import Driven, driven

from keras_remat.backends.batches import batch_bytes
from keras_remat.batch_size.size_chooser import SizeChooser
from keras_remat.core.limit import Limit
from keras_remat.core.schedule import Usage
from keras_remat.errors import InfeasibleBudgetError, ScheduleNotFoundError, UnsupportedModelError
from keras_remat.training import driver, modes, size_costs, sizes
from keras_remat.training.arguments import FitOptions
from keras_remat.training.decide import Phase
from keras_remat.training.shape_state import ShapeState
from keras_remat.units import format_bytes

LOADER = 10


class FakeSteps:
    """Stands in for the steps of a fit; those of more than ``fits`` samples are refused.

    Args:
        fits: the largest batch that a schedule is found for.
        settle_after: steps of one shape until its step is final.
        peak_bytes: batch size → measured peak of a settled step.
    """

    def __init__(self, fits=10**9, settle_after=2, peak_bytes=lambda size: 0):
        self.fits, self.settle_after, self.peak_bytes = fits, settle_after, peak_bytes
        self.backend, self.most_steps = FakeBackend(device_name="GPU:0"), None
        self.trained, self.forgotten = [], -1
        self._of_shape = 0

    def __call__(self, fit, mode, batch, constraints, timed):
        size, known = len(batch[0]), fit.record.of(mode)
        if size > self.fits:
            raise ScheduleNotFoundError(fit.limit.total_bytes, 1)
        self.trained.append([int(number) for number in batch[0]])
        if known.reference is None:
            self.forgotten, self._of_shape = self.forgotten + 1, 0
        self._of_shape += 1
        shape = ShapeState(
            signature=fit.signatures.of(batch),
            batch_size=size,
            run=fit.installed.run_plain,
            phase=Phase.FINAL if self._of_shape >= self.settle_after else Phase.PLAIN,
            called=True,
            steps=(Usage(0.5, self.peak_bytes(size)),),
        )
        wanted = fit.record.sizes.size
        known = known.with_shape(shape).after_batch(shape.signature, wanted, allow_over_limit=True)
        fit.record = fit.record.with_steps(mode, known)
        return len(self.trained)


OPTIONS = sizes.OPTIONS
#: Seconds of work that a search of sizes takes: fake steps are long, and worth a minute of it.
SEARCH_S = 0.5


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    """Has the steps and the search of a fit stood in for, where it has such; searches are short,
    and nothing is measured that was not predicted."""
    monkeypatch.setattr(
        sizes, "OPTIONS", replace(OPTIONS, most_search_s=SEARCH_S, first_margin=0.0)
    )
    real_step, real_search = driver._step, sizes._searched

    def step(fit, *args, **options):
        return getattr(fit, "stand_in", real_step)(fit, *args, **options)

    def searched(fit, record, batch):
        found = getattr(fit, "found", None)
        return real_search(fit, record, batch) if not found else sizes._changed(fit, record, found)

    monkeypatch.setattr(driver, "_step", step)
    monkeypatch.setattr(sizes, "_searched", searched)


class OfSeveral(FakeBackend):
    """Divides its batches among several devices."""

    def __init__(self, count):
        super().__init__(device_name="GPU:0")
        self.batch_multiple = count


def on_devices(count):
    steps = FakeSteps()
    steps.backend = OfSeveral(count)
    return steps


class Rate:
    """Notes what the learning rate of every step is multiplied by."""

    def __init__(self):
        self.factors = []

    def factor(self, size, loader_size):
        return size / loader_size

    def leave_schedule_alone(self):
        pass

    def during(self, factor):
        self.factors.append(factor)
        return nullcontext()


class Fixed(Driven):
    """A fit whose steps are stood in for, and whose search finds ``found``."""

    def __init__(self, steps, batch_size, found=None, steps_per_epoch=None):
        super().__init__(
            steps.backend,
            options=FitOptions(batch_size=batch_size),
            most_steps=steps.most_steps,
            steps_per_epoch=steps_per_epoch,
        )
        self.fit.stand_in, self.fit.found, self.fit.learning_rate = steps, found, Rate()
        self.fit.record = replace(self.fit.record, lowered_limit=Limit(1000, 0.1))


class FakeChooser:
    """Chooses 10 samples fewer after every failure; what trained is the answer."""

    def __init__(self, trained=LOADER, failed=(0, 0)):
        self.trained, self.failed = trained, failed

    def after_trial(self, size, plan, peak_bytes, *, fits):
        return (
            FakeChooser(size, self.failed)
            if fits
            else FakeChooser(self.trained, (size, peak_bytes))
        )

    def choose(self, scaling, limit):
        smaller = self.failed[0] - 10
        return self, (smaller, None) if self.failed[0] and smaller > self.trained else None


def trainer_at(steps, found, batch_size="max"):
    """A trainer at the size ``found``, that chooses by the fake rule."""
    trainer = Fixed(steps, batch_size, found=found)
    whole = SimpleNamespace(at=lambda size: None)
    scaling = SimpleNamespace(at=whole.at, whole=whole, slicing=None)
    known = replace(trainer.sizes, chooser=FakeChooser(), scaling=scaling)
    trainer.fit.record = replace(trainer.fit.record, sizes=known)
    return trainer


def epoch(trainer, batches=12, size=LOADER, last=None):
    """Trains one epoch of numbered samples and returns how many there were."""
    first = 0
    for at in range(batches):
        count = last if last is not None and at == batches - 1 else size
        trainer.train(batch_of(first, count))
        first += count
    trainer.finish()
    return first


def assert_all_once(trained, total, epochs=1):
    assert [number for numbers in trained for number in numbers] == list(range(total)) * epochs


def test_keep_trains_the_batches_as_they_come():
    steps = FakeSteps()
    trainer = Fixed(steps, "keep")
    total = epoch(trainer, last=3)
    assert_all_once(steps.trained, total)
    assert [len(numbers) for numbers in steps.trained] == [10] * 11 + [3]
    assert trainer.changes == []
    assert trainer.finish() is None


def test_joined_batches_train_every_sample_once_and_the_rest_at_the_epochs_end():
    steps = FakeSteps()
    trainer = Fixed(steps, "max", found=35)
    total = epoch(trainer)
    assert [len(numbers) for numbers in steps.trained] == [10, 10, 35, 35, 30]
    assert_all_once(steps.trained, total)
    assert epoch(trainer) == total
    assert [len(numbers) for numbers in steps.trained[5:]] == [35, 35, 35, 15]
    assert_all_once(steps.trained, total, epochs=2)
    assert trainer.changes == [(10, 35)]
    assert (trainer.report.batch_size, steps.forgotten) == (35, 1)
    assert trainer.finish() is None


def test_logs_are_the_newest_step_s():
    trainer = Fixed(FakeSteps(), "max", found=30)
    assert [trainer.train(batch_of(0, LOADER)) for _ in range(6)] == [1, 2, 2, 2, 3, 3]
    assert trainer.finish() == 4


def test_size_below_the_loaders_cuts_its_batches():
    steps = FakeSteps()
    trainer = Fixed(steps, 4)
    total = epoch(trainer, batches=5, last=7)
    assert [len(numbers) for numbers in steps.trained] == [10, 10, *[4] * 6, 3]
    assert_all_once(steps.trained, total)
    assert trainer.changes == [(10, 4)]


def test_size_below_the_loaders_is_left_where_batches_cannot_be_cut():
    class Divided(FakeBackend):
        def resized_spec(self, batch, size):
            raise UnsupportedModelError("the batch stays as it is")

    steps = FakeSteps()
    steps.backend = Divided()
    trainer = Fixed(steps, 4)
    total = epoch(trainer, batches=5, last=7)
    assert_all_once(steps.trained, total)
    assert trainer.changes == []
    assert event_kinds(trainer.report) == ["search"]


@pytest.mark.parametrize(("wanted", "trained"), [(7, 6), (4, 3), (2, 3)])
def test_a_smaller_size_is_one_that_the_devices_divide(wanted, trained):
    steps = on_devices(3)
    total = epoch(Fixed(steps, wanted), batches=5, last=7)
    sizes = [len(numbers) for numbers in steps.trained]
    assert set(sizes[2:-1]) == {trained}
    assert_all_once(steps.trained, total)


@pytest.mark.parametrize(("last", "rest"), [(7, [10, 7]), (6, [16])])
def test_a_rest_that_the_devices_do_not_divide_is_trained_in_the_loaders_batches(last, rest):
    """Such a batch is trained by the plain step: a joined one might need more than there is."""
    steps = on_devices(2)
    total = epoch(Fixed(steps, "max", found=40), batches=8, last=last)
    assert [len(numbers) for numbers in steps.trained] == [10, 10, 40, *rest]
    assert_all_once(steps.trained, total)


@pytest.mark.parametrize(
    ("found", "batches", "last", "sizes"), [(40, 8, 1, [40, 8, 3]), (12, 6, 7, [12, 12, 10, 3])]
)
def test_no_step_of_joined_batches_leaves_a_device_without_samples(found, batches, last, sizes):
    """Batch normalization over no samples is not a number."""
    steps = on_devices(2)
    total = epoch(Fixed(steps, "max", found=found), batches=batches, last=last)
    assert [len(numbers) for numbers in steps.trained] == [10, 10, *sizes]
    assert_all_once(steps.trained, total)


@pytest.mark.parametrize(("left", "seconds"), [(None, 60), (10_000, 60), (300, 30), (0, 3)])
def test_a_search_takes_no_longer_than_the_steps_that_are_left_are_worth(
    monkeypatch, left, seconds
):
    """Steps are estimated to take half a second here, whatever the clock says."""
    monkeypatch.setattr(sizes, "OPTIONS", OPTIONS)
    limits, ticks = [], itertools.count(0.0, 7.5)

    def search(*arguments, time_limit_s, late_time_limit_s, **options):
        limits.append(time_limit_s + late_time_limit_s)
        raise ScheduleNotFoundError(1, 1)

    monkeypatch.setattr(sizes, "search_batch_size", search)
    monkeypatch.setattr(size_costs, "scaling_of", lambda *arguments: None)
    monkeypatch.setattr(driver, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    monkeypatch.setattr(size_costs, "estimated_step_s", lambda *arguments: 0.5)
    steps = FakeSteps()
    steps.most_steps = left
    epoch(Fixed(steps, "max"))
    assert limits == [pytest.approx(0.7 * seconds)]  # the rest is for sizes that run


def test_an_epoch_keeps_its_updates_by_a_size_that_the_devices_divide():
    steps = on_devices(4)
    trainer = Fixed(steps, "max", found=80)
    trainer.epoch_begins()
    epoch(trainer, batches=23)
    trainer.epoch_ends()
    assert trainer.changes == [(10, 80), (80, 20)]  # of 230 samples, 23 would be a tenth


def test_size_of_the_loader_changes_nothing():
    steps = FakeSteps()
    trainer = Fixed(steps, LOADER)
    total = epoch(trainer, last=4)
    assert_all_once(steps.trained, total)
    assert trainer.changes == []
    assert steps.forgotten == 0


def test_infeasible_group_is_stepped_down_before_anything_of_it_was_trained():
    steps = FakeSteps(fits=25)
    trainer = trainer_at(steps, 40)
    total = epoch(trainer)
    assert_all_once(steps.trained, total)
    assert max(map(len, steps.trained)) <= 25
    assert trainer.changes == [(10, 40), (40, 30), (30, 20)]
    assert event_kinds(trainer.report).count("step-down") == 2


def test_a_batch_that_is_given_up_is_not_held_by_its_error():
    """Errors hold frames, and solvers keep errors: such cycles would hold it for long."""
    given_up = []

    class Kept(FakeSteps):
        def __call__(self, fit, mode, batch, *others):
            try:
                return super().__call__(fit, mode, batch, *others)
            except ScheduleNotFoundError as error:
                given_up.append(weakref.ref(batch[0]))
                error.itself = error
                raise

    trainer = trainer_at(Kept(fits=25), 40)
    gc.disable()
    try:
        epoch(trainer)
        assert [one() for one in given_up] == [None, None]
    finally:
        gc.enable()


def test_what_a_search_leaves_in_cycles_is_freed():
    fit = Fixed(FakeSteps(), "max").fit
    gc.disable()
    try:
        with fit.long_task("search"):
            array = np.zeros(3)
            cycle = [weakref.ref(array), array]
            cycle.append(cycle)
            watch = cycle[0]
            del array, cycle
            assert watch() is not None
        assert watch() is None
    finally:
        gc.enable()


def test_what_cannot_be_stepped_down_is_an_error_and_nothing_of_it_was_trained():
    steps = FakeSteps(fits=0, settle_after=0)
    trainer = Fixed(steps, "keep")
    with pytest.raises(ScheduleNotFoundError):
        epoch(trainer)
    assert steps.trained == []


def test_rest_that_fits_under_no_schedule_is_trained_in_the_loaders_batches():
    steps = FakeSteps(fits=10**9)
    trainer = Fixed(steps, "max", found=40)
    for first in range(0, 90, LOADER):
        trainer.train(batch_of(first, LOADER))
        steps.fits = LOADER if first == 80 else steps.fits
    trainer.finish()
    assert_all_once(steps.trained, 90)
    assert [len(numbers) for numbers in steps.trained] == [10, 10, 40, 10, 10, 10]


def test_a_rest_runs_in_order_where_the_plain_step_would_fit():
    """It would move variables, and what larger batches need depends on where those are."""
    backend, limit = FakeBackend(), store_all_peak(4 * LOADER)
    backend.memory.order_matters = True
    trainer, _ = on_tuner(backend, "max", limit)
    total = epoch(trainer, batches=60)
    assert backend.samples == list(range(total))
    assert 0 < len(backend.ran[-1][1]) < trainer.sizes.search.max_batch_size
    assert backend.kinds[-1] == "remat"


def test_a_rest_for_which_nothing_can_be_planned_is_trained_as_it_would_be_without():
    class Stubborn(FakeBackend):
        def trace(self, model, batch, micro_batches=1):
            if np.size(batch[0]) < LOADER:
                raise UnsupportedModelError("too small")
            return super().trace(model, batch, micro_batches)

    backend, limit = Stubborn(), store_all_peak(4 * LOADER)
    backend.memory.order_matters = True
    trainer, _ = on_tuner(backend, "max", limit)
    epoch(trainer, batches=61)
    size = trainer.sizes.search.max_batch_size
    rest = 3 if (size + 3) % LOADER else 4
    batches, last = divmod(size + rest, LOADER)
    epoch(trainer, batches=batches + 1, last=last)
    assert len(backend.ran[-1][1]) == rest
    assert backend.kinds[-1] == "plain"


def test_measured_peak_over_the_limit_steps_down():
    steps = FakeSteps(settle_after=1, peak_bytes=lambda size: 40 * size)
    trainer = trainer_at(steps, 40)
    total = epoch(trainer)
    assert_all_once(steps.trained, total)
    assert trainer.changes == [(10, 40), (40, 30), (30, 20)]


def test_no_size_but_the_loaders_trains_goes_back_to_it():
    steps = FakeSteps(settle_after=1, peak_bytes=lambda size: 2000 if size > LOADER else 0)
    trainer = trainer_at(steps, 30)
    total = epoch(trainer, batches=14)
    assert_all_once(steps.trained, total)
    assert trainer.changes == [(10, 30), (30, 20), (20, 10)]
    assert [len(numbers) for numbers in steps.trained[-5:]] == [LOADER] * 5


def test_batches_that_cannot_be_joined_train_as_they_come():
    steps = FakeSteps()
    trainer = Fixed(steps, "max", found=35)
    for first in (0, 10, 20, 30):
        trainer.train(batch_of(first, LOADER))
    trainer.train((batch_of(40, LOADER)[0], np.zeros((LOADER, 3))))
    trainer.train(batch_of(50, LOADER))
    trainer.finish()
    assert_all_once(steps.trained, 60)
    assert [len(numbers) for numbers in steps.trained] == [LOADER] * 6
    assert trainer.changes == [(10, 35), (35, 10)]


def test_learning_rate_follows_the_samples_of_every_step_down_to_the_loaders():
    trainer = Fixed(FakeSteps(), "max", found=35)
    epoch(trainer, last=1)
    assert trainer.fit.learning_rate.factors == [1.0, 1.0, 3.5, 3.5, 2.1]
    trainer = Fixed(FakeSteps(), "max", found=35)
    epoch(trainer, batches=6, last=1)
    assert trainer.fit.learning_rate.factors == [1.0, 1.0, 3.1]
    trainer = Fixed(FakeSteps(), 4)
    epoch(trainer, batches=4, last=1)
    assert trainer.fit.learning_rate.factors == [1.0, 1.0, 0.4, 0.4, 0.4]


def test_length_that_becomes_known_keeps_ten_updates():
    steps = FakeSteps()
    trainer = Fixed(steps, "max", found=80)
    for _ in range(3):
        trainer.epoch_begins()
        epoch(trainer, batches=40)
        trainer.epoch_ends()
    assert trainer.changes == [(10, 80), (80, 40)]
    assert [len(numbers) for numbers in steps.trained[-10:]] == [40] * 10


def test_larger_batches_are_told_of_once_with_what_they_mean():
    with pytest.warns(UserWarning, match="keras_remat") as caught:
        epoch(Fixed(FakeSteps(), "max", found=30, steps_per_epoch=60), batches=30)
    assert len(caught) == 1
    message = str(caught[0].message)
    for told in ("batches of 10", "batches of 30", "20 updates", "60", "multiplied by 3"):
        assert told in message
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        epoch(Fixed(FakeSteps(), 30, found=30), batches=30)


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


def on_tuner(backend, batch_size, limit, *, steps_per_epoch=None):
    options = FitOptions(
        limit,
        batch_size=batch_size,
        solver="greedy",
        solver_time_limit_s=5.0,
        profile_steps=2,
        margin=0.0,
    )
    return driven(backend, options, steps_per_epoch=steps_per_epoch)


def test_max_finds_more_than_fits_plainly_and_trains_with_it():
    backend = FakeBackend()
    trainer, report = on_tuner(backend, "max", store_all_peak(4 * LOADER))
    total = epoch(trainer, batches=60)
    assert backend.samples == list(range(total))
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
    trainer, report = on_tuner(backend, "max", store_all_peak(4 * LOADER))
    total = epoch(trainer, batches=60)
    assert backend.samples == list(range(total))
    assert report.batch_size > LOADER


def test_int_above_the_loaders_is_the_most_it_becomes():
    backend = FakeBackend()
    trainer, report = on_tuner(backend, 24, 2**40)
    total = epoch(trainer, batches=30)
    assert backend.samples == list(range(total))
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
    trainer, report = on_tuner(backend, "max", 2**40, steps_per_epoch=8)
    total = epoch(trainer, batches=8)
    assert backend.samples == list(range(total))
    assert trainer.changes == []
    assert report.max_batch_size == LOADER


def test_measured_plain_peak_that_no_schedule_meets_trains_no_sample_twice():
    """Batches above the loader's take far more than predicted: found out only after the first steps
    of them were trained."""
    backend = FakeBackend(surplus_bytes=lambda what, size: 0 if size <= LOADER else 2**40)
    trainer, _ = on_tuner(backend, 40, store_all_peak(64))
    total = epoch(trainer, batches=40)
    assert backend.samples == list(range(total))
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
    trainer, report = on_tuner(backend, "max", limit)
    total = epoch(trainer, batches=400)
    assert backend.samples == list(range(total))
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
    assert format_bytes(limit - 2 * batch_bytes(batch_of(0, LOADER))) in told[-1]


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
    trainer, report = on_tuner(backend, "max", limit)
    total = epoch(trainer, batches=400)
    assert backend.samples == list(range(total))
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
    trainer, report = on_tuner(backend, "max", limit)
    total = epoch(trainer, batches=400)
    assert backend.samples == list(range(total))
    kinds = [kind for kind in event_kinds(report) if kind.startswith("step-")]
    assert kinds[0] == "step-down"
    assert "step-up" in kinds
    assert trainer.changes[1][1] < report.batch_size < found[0] == trainer.changes[0][1]


def test_no_step_up_is_above_what_was_asked_for_or_the_epoch():
    limit = store_all_peak(4 * LOADER)
    for batch_size, steps in ((50, None), ("max", 50)):
        backend = FakeBackend(surplus_bytes=lambda what, size: 0 if size <= LOADER else -limit // 4)
        trainer, _ = on_tuner(backend, batch_size, limit, steps_per_epoch=steps)
        total = epoch(trainer, batches=100)
        assert backend.samples == list(range(total))
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
    trainer, report = on_tuner(backend, "max", 2**40)
    total = epoch(trainer)
    assert backend.samples == list(range(total))
    assert trainer.changes == []
    assert report.max_batch_size == LOADER
    assert "No larger batch" in report.events[-1].message
