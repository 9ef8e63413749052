"""Keras's training loop around a backend without a framework: the callback's whole life cycle in
milliseconds, with a clock that counts simulated seconds.

What the loop does is what ``keras.Model.fit`` does: it makes the train function before the
callbacks begin, looks it up at every step, counts the batches it has handed out, and tells the
callbacks.
"""

import re
import time
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

from fake_backend import MODEL, batch_of, store_all_peak

import keras_remat
from keras_remat.backends.installed import Caller, Installed
from keras_remat.core.events import EventKind
from keras_remat.reporting.fit_report import AutotuneReport
from keras_remat.training import batches, driver, modes, size_costs, sizes, steps
from keras_remat.training.arguments import FitOptions
from keras_remat.training.fit_state import FitState
from keras_remat.training.shape_state import USUAL_CONSTRAINTS, PriorPlans
from keras_remat.training.tools import running_tools

#: Samples of a batch.
SIZE = 100
PLAIN = store_all_peak(SIZE)
#: Below the plain step's peak, with room for schedules below itself.
TIGHT = int(PLAIN * 0.7)


def options(limit=TIGHT, **more):
    """Options of a fit with a quick solver and no margin."""
    return FitOptions(
        **{"memory_limit": limit, "solver": "greedy", "margin": 0.0, "profile_steps": 2, **more}
    )


def train(trainer, count, size=SIZE):
    """Trains steps, whose samples are numbered."""
    for step in range(count):
        trainer.run(batch_of(step * size, size))


class FakeInstalled(Installed):
    """The train function of a fake fit."""

    def __init__(self, model, runner, backend):
        super().__init__(model, runner)
        self._backend = backend

    def __call__(self, iterator):
        caller = self._runner.caller(iterator)
        if caller is Caller.NOBODY:
            self.give_back()
        if caller in (Caller.NOBODY, Caller.INNER):
            return self.original(iterator)
        return self._steps(iter(iterator))

    def _read(self, batch):
        return batch

    def _runs_eagerly(self):
        return False

    def synchronize(self):
        """Nothing is queued."""

    def run_plain(self, batch):
        return self._backend.run_plain(batch)


class Held(SimpleNamespace):
    """Keras's iterator, as far as it is asked."""


class Clock:
    """Counts a millisecond for every look at it, and what the steps of fake backends take: a search
    that ends when its time is over does so after a number of looks."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        self.now_s += 1e-3
        return self.now_s

    def follow(self, backend):
        """Goes on with what a backend's steps take."""
        measure = backend.measure

        def measured(run, **options):
            result, usage = measure(run, **options)
            self.now_s += usage.time_s
            return result, usage

        backend.measure = measured


class FakeModel:
    """What of a Keras model a fit with the callback asks for."""

    name, built, jit_compile, run_eagerly = "fake", True, False, False
    steps_per_execution = 1
    non_trainable_variables = trainable_variables = metrics = ()
    layers = ()

    def __init__(self, backend):
        self.backend, self.train_function, self.stop_training = backend, None, False
        self.optimizer = SimpleNamespace(built=True, learning_rate=0.1, variables=())

    def make_train_function(self, force=False):
        """Makes the plain train function, as Keras does before a fit."""
        if self.train_function is None or force:
            self.train_function = lambda iterator: self.backend.run_plain(next(iterator))

    def get_metrics_result(self):
        """Returns the logs of the epoch so far."""
        return {"loss": float(len(self.backend.ran))}

    def fit(self, sizes, epochs, callback):
        """Trains epochs of batches of ``sizes`` samples, numbered from 0 on."""
        callbacks = SimpleNamespace(callbacks=[callback])
        callback.set_model(self)
        callback.set_params({"verbose": 0, "epochs": epochs, "steps": len(sizes)})
        self.make_train_function()
        callback.on_train_begin()
        epoch_iterator = Held(_num_batches=len(sizes), _steps_seen=0)
        for epoch in range(epochs):
            epoch_iterator._steps_seen = 0
            callback.on_epoch_begin(epoch)
            firsts = [sum(sizes[:at]) for at in range(len(sizes))]
            batches = (batch_of(*numbers) for numbers in zip(firsts, sizes, strict=True))
            for step in range(len(sizes)):
                epoch_iterator._steps_seen = step + 1
                callback.on_train_batch_begin(step)
                callback.on_train_batch_end(step, self.train_function(batches))
            callback.on_epoch_end(epoch, {})
        callback.on_train_end()
        del callbacks


@contextmanager
def fitted(*backends, **options):
    """Gives ``(model, callback)`` of a fit that trains by fake backends, on a clock of its own.

    Args:
        backends: in the order in which they are tried.
        options: of ``RematAutotune``.
    """
    clock = Clock()
    model = FakeModel(backends[0])
    for backend in backends:
        clock.follow(backend)
        backend.install = lambda model, runner: FakeInstalled(model, runner, backends[0])
    with (
        mock.patch.object(time, "perf_counter", clock),
        mock.patch("keras_remat.callback.load_backends", return_value=list(backends)),
    ):
        yield model, keras_remat.RematAutotune(**{"solver": "greedy", "verbose": 0, **options})


class Driven:
    """Drives a fit on backends without a framework, batch by batch and without Keras's loop.

    Args:
        backends: in the order in which they are tried.
        options: of the callback.
        most_steps, steps_per_epoch: as far as the fit knows.

    Attributes:
        fit: what its steps share, and the record.
        report: of it.
    """

    def __init__(self, *backends, options, model=MODEL, most_steps=None, steps_per_epoch=None):
        self.report = AutotuneReport()
        self.fit = FitState(
            model,
            self.report,
            options,
            backends,
            nullcontext,
            backends[0].installed,
            most_steps=most_steps,
            steps_per_epoch=steps_per_epoch,
        )

    def run(self, batch, constraints=USUAL_CONSTRAINTS, *, timed=False):
        """Trains one batch at once."""
        return driver.train_batch(self.fit, batch, constraints, timed)

    def train(self, batch):
        """Trains a loader batch, in batches of the size in force."""
        return driver.train(self.fit, batch)

    def finish(self):
        """Trains what is held back."""
        return driver.finish(self.fit)

    def epoch_begins(self):
        """Does what the callback does when an epoch begins."""
        driver.note(self.fit, batches.in_new_epoch)

    def epoch_ends(self):
        """Does what the callback does when an epoch ends."""
        driver.note(self.fit, sizes.after_epoch)

    def close(self):
        """Stops what runs beside the steps."""
        driver.note(self.fit, modes.stopped)

    def begin_shape(self, costs=None, **contest):
        """Makes the next batch's shape the one that training is about."""
        record = self.fit.record
        known = PriorPlans(costs=() if costs is None else (costs,))
        record = record.with_steps(record.mode, record.running.expecting(known))
        self.fit.record = replace(record, contest=replace(record.contest, **contest))

    def reference_costs(self, batch):
        """What a search for larger batches asks for."""
        self.fit.record = size_costs.with_reference_traced(self.fit, self.fit.record, batch)
        costs, profiles = size_costs.reference_costs(self.fit, self.fit.record)
        return costs.problem, profiles

    @property
    def tools(self):
        """Those of the mode in force."""
        return running_tools(self.fit)

    @property
    def backend(self):
        """The one in force."""
        return self.tools.backend

    @property
    def record(self):
        """How the mode in force trains."""
        return self.fit.record.running

    @property
    def sizes(self):
        """What is known of batch sizes."""
        return self.fit.record.sizes

    @property
    def pieces(self):
        """In how many micro-batches the mode in force is asked to train."""
        return self.fit.record.mode.micro_batches

    @property
    def settled(self):
        """Whether nothing is to be found out."""
        return self.fit.record.is_settled

    @property
    def settled_peak_bytes(self):
        """The measured peak of a final step."""
        return steps.settled_peak_bytes(self.tools)

    @property
    def changes(self):
        """The batch sizes that followed each other, before and after, by what was told."""
        told = (e.message for e in self.report.events if e.kind is EventKind.BATCH)
        found = (re.match(r"The batch size is (\d+) .*\((\d+) before\)", text) for text in told)
        return [(int(one[2]), int(one[1])) for one in found]

    def __getattr__(self, name):
        """Asks the record of the mode in force."""
        return getattr(self.fit.record.running, name)


def driven(backend, options, **more):
    """A fit on one backend, and its report."""
    fit = Driven(backend, options=options, **more)
    return fit, fit.report


def race_on(*backends, options, model=MODEL, **more):
    """A fit in which modes compete, and its report."""
    fit = Driven(*backends, options=replace(options, **more), model=model)
    return fit, fit.report
