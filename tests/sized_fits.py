"""Fits whose steps and search of a batch size are stood in for."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
from fake_backend import (
    FakeBackend,
    batch_of,
)
from fake_fit import Driven, driven

from keras_remat.core.limit import Limit
from keras_remat.core.schedule import Usage
from keras_remat.errors import ScheduleNotFoundError
from keras_remat.training import driver, sizes
from keras_remat.training.arguments import FitOptions
from keras_remat.training.decide import Phase
from keras_remat.training.shape_state import ShapeState

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
        sizes,
        "OPTIONS",
        replace(
            OPTIONS, most_search_s=SEARCH_S, first_margin=0.0, pool_margin=0.0, next_margin=0.0
        ),
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


def trained_on(backend, batch_size, limit, *, batches, steps_per_epoch=None):
    """Trains one epoch of numbered samples, every one once and in order; returns the fit and its
    report."""
    trainer, report = on_tuner(backend, batch_size, limit, steps_per_epoch=steps_per_epoch)
    total = epoch(trainer, batches=batches)
    assert backend.samples == list(range(total))
    return trainer, report
