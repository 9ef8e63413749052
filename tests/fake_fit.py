"""Keras's training loop around a backend without a framework: the callback's whole life cycle in
milliseconds, with a clock that counts simulated seconds.

What the loop does is what ``keras.Model.fit`` does: it makes the train function before the
callbacks begin, looks it up at every step, counts the batches it has handed out, and tells the
callbacks.
"""

import time
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

from fake_backend import batch_of

import keras_remat
from keras_remat.backends.base import Caller, Installed


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
        for epoch in range(epochs):
            callback.on_epoch_begin(epoch)
            firsts = [sum(sizes[:at]) for at in range(len(sizes))]
            batches = (batch_of(*numbers) for numbers in zip(firsts, sizes, strict=True))
            epoch_iterator = SimpleNamespace(_num_batches=len(sizes), _steps_seen=0)
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
