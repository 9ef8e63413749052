"""Installs a train function in the place of Keras's own while a ``fit`` runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from keras_remat.backends import keras_private
from keras_remat.errors import UnsupportedModelError, without_inner_frames

#: Keras's train function → trainable flags of the layers when it was first seen to train.
_FIRST_TRAINED: WeakKeyDictionary[Any, dict[str, bool]] = WeakKeyDictionary()


class Caller(Enum):
    """Says who calls an installed train function."""

    FIT = "fit"
    """The ``fit`` it was installed for: the batch may be held back."""
    LOOP = "loop"
    """A loop of the user's own, by ``train_on_batch``: the batch is trained at once."""
    GUEST = "guest"
    """Another callback, by ``train_on_batch`` in the middle of ``fit``: likewise."""
    INNER = "inner"
    """Another ``fit`` of the model, in the middle of this one: Keras's own step trains it."""
    NOBODY = "nobody"
    """Somebody else: the ``fit`` it was installed for has ended without notice."""


class StepRunner(Protocol):
    """Defines the calls that an installed train function makes in Keras's loop."""

    def run(self, batch: Any) -> Any:
        """Trains a batch and returns logs. Its errors pass through, after the original train
        function is back."""

    def run_settled(self, batch: Any) -> Any:
        """Trains a batch and returns logs if its step is settled, at little more than the cost of
        the step. Otherwise does nothing and returns ``None``."""

    def run_alone(self, batch: Any, caller: Caller) -> Any:
        """Trains a batch of ``train_on_batch`` at once, and returns its logs."""

    def finish(self) -> Any:
        """Trains held-back batches at the end of the epoch's data. Returns logs, or ``None`` where
        there were none."""

    def caller(self, iterator: Any) -> Caller:
        """Returns who calls; asked once before every call. For ``NOBODY`` the original function is
        called."""

    def begin_anew(self) -> None:
        """Notes that the model's step has changed: all knowledge of it is void."""

    def stop(self) -> None:
        """Ends the work beside the steps; a second call does nothing."""

    def is_last_call(self) -> bool:
        """Returns whether Keras makes no further call in this epoch."""


class Installed(ABC):
    """Replaces Keras's own train function; see
    :meth:`keras_remat.backends.base.Backend.install`.

    Args:
        model: the model, inside ``fit``, whose ``train_function`` Keras has made.
        runner: trains every batch, and says who calls. ``Caller.NOBODY`` means that the ``fit``
            this was made for has ended without notice (an exception, Ctrl-C): then the original
            train function is put back and takes the call.

    Attributes:
        original: the train function that Keras has made.
    """

    returns_state = False
    """Says whether a call that trained only held-back batches must return a result, too, because
    the state is in it."""

    counts_no_empty_step = False
    """Says whether the original counts an update when no batch is left, while this one does not."""

    def __init__(self, model: Any, runner: StepRunner):
        self._model, self._runner = model, runner
        self.original: Any = original_of(model.train_function)
        model.train_function = self

    @without_inner_frames
    def __call__(self, iterator: Any) -> Any:
        caller = self._caller(iterator)
        return self.original(iterator) if caller is None else self._trained(iterator, caller)

    #: Errors that mean the end of the data: the original is not put back for them.
    end_of_data: tuple[type[Exception], ...] = (StopIteration,)

    def _trained(self, iterator: Any, caller: Caller) -> Any:
        """Trains a call's batches; puts the original back where that raises."""
        try:
            if caller is not Caller.FIT:
                batch = self._prepared(self._read(next(iter(iterator))))
                return self._runner.run_alone(batch, caller)
            return self._steps(iter(iterator))
        except self.end_of_data:
            raise
        except BaseException:
            self.give_back()
            raise

    def _caller(self, iterator: Any) -> Caller | None:
        """Returns who calls; ``None`` where the original takes the call."""
        caller = self._runner.caller(iterator)
        if caller is Caller.NOBODY:
            self.give_back()
        return None if caller in (Caller.NOBODY, Caller.INNER) else caller

    def _read(self, batch: Any) -> Any:
        """Returns a batch of Keras's iterator in the form for the runner."""
        return batch

    def _prepared(self, batch: Any) -> Any:
        """Converts a batch to the framework's arrays, if :meth:`_read` has not: a settled step may
        not need them."""
        return batch

    def _steps(self, iterator: Iterator[Any]) -> Any:
        """Trains a call's batches of ``fit``, up to ``steps_per_execution``, and returns logs."""
        logs = None
        for at in range(self._model.steps_per_execution):
            try:
                batch = next(iterator)
            except StopIteration:
                rest = self._runner.finish()
                # the iterator ends once more at Keras's next call
                if at == 0 and not (self.returns_state and rest is not None):
                    raise
                return logs if rest is None else rest
            batch = self._read(batch)
            logs = self._runner.run_settled(batch)
            if logs is None:
                logs = self._runner.run(self._prepared(batch))
        if self._runner.is_last_call():
            rest = self._runner.finish()
            return logs if rest is None else rest
        return logs

    def as_given(self, batch: Any) -> Any:
        """Returns a batch held on the host in the form that Keras's iterator would yield: divided
        among the devices, where there are several."""
        return batch

    @abstractmethod
    def run_plain(self, batch: Any) -> Any:
        """Runs Keras's own step on a batch."""

    def variables(self) -> AbstractContextManager[None]:
        """Returns a context in which the model's variables have their values, and assignments to
        them hold for the next step."""
        return nullcontext()

    @property
    def is_aside(self) -> bool:
        """Returns whether the original is in place and is called directly."""
        return self._model.train_function is self.original

    @property
    def is_disturbed(self) -> bool:
        """Returns whether another train function has replaced this one, or the framework was asked
        to run functions eagerly."""
        return self._model.train_function is not self or self._runs_eagerly()

    def stand_aside(self) -> None:
        """Puts the original in place until :meth:`take_place` is called."""
        if self._model.train_function is self:
            self._model.train_function = self.original

    keeps_first_trace = False
    """Says whether the original keeps its first trace, and so trains the model as it was then."""

    @property
    def is_traced(self) -> bool:
        """Returns whether the original has an earlier trace. It may train a model that can no
        longer be traced."""
        return False

    def changed_layers(self) -> list[str]:
        """Returns the layers whose ``trainable`` has changed since a ``fit`` with the callback
        first saw the original; empty unless the original keeps its first trace."""
        if not self.keeps_first_trace:
            return []
        now = keras_private.trainable_flags(self._model)
        before = _FIRST_TRAINED.setdefault(self.original, now)
        return sorted(path for path in now if now[path] != before.get(path, now[path]))

    def check_runs_as_graph(self) -> None:
        """Raises :class:`UnsupportedModelError` where the framework was asked in mid-fit to run
        functions eagerly."""
        if self._runs_eagerly():
            raise UnsupportedModelError(
                "Functions run eagerly from here on: there is no graph to schedule."
            )

    def _runs_eagerly(self) -> bool:
        """Returns whether the framework was asked to run functions eagerly. False on PyTorch, where
        all steps run eagerly and are recorded."""
        return False

    @abstractmethod
    def synchronize(self) -> None:
        """Waits for the end of the steps that the original was called for."""

    def take_place(self) -> bool:
        """Replaces the train function that was put back or newly made meanwhile.

        Returns:
            Whether it was newly made: then the model may have changed.
        """
        if self._model.train_function is None:  # the model was compiled again and not trained since
            self._model.make_train_function()
        current = self._model.train_function
        if current is self:
            return False
        anew = current is not self.original and not isinstance(current, Installed)
        if anew:
            self.original = current
        self._model.train_function = self
        return anew

    def give_back(self) -> None:
        """Ends the work beside the steps and puts the original back."""
        try:
            self._runner.stop()
        finally:
            self.restore()

    def restore(self) -> None:
        """Puts the original back, unless other code has replaced this one meanwhile; a second call
        does nothing."""
        if self._model.train_function is self:
            self._model.train_function = self.original


def original_of(function: Any) -> Any:
    """Returns the train function that an installed one replaces; any other function itself. An
    installed one may be left over from a ``fit`` that ended without notice."""
    while isinstance(function, Installed):
        function = function.original
    return function


def check_train_function(model: Any, function: Any) -> None:
    """Raises :class:`UnsupportedModelError` where a model is not trained by Keras's own train
    function: another one may do anything with its batches."""
    name = keras_private.replaced_machinery(model, function)
    if name is not None:
        raise UnsupportedModelError(
            f"The model is trained by {name}, which stands in the place of Keras's own: only "
            "Keras's train function calls train_step once for every batch, as is planned for. "
            "Override train_step instead."
        )
