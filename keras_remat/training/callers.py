"""Finds out who calls the train function that was put in place of Keras's own.

Keras's ``fit`` announces every call to its callbacks, but it is not the only one that calls: any
callback may train a batch of its own by ``train_on_batch``, in any of its hooks, and a loop of the
user's own may do nothing else. And a ``fit`` that was interrupted says nothing at all. Three facts
tell them apart: whether the call was announced, whether it was made by ``train_on_batch``, and
whether a ``fit`` with this callback is running, which the Python stack knows.

Known limit: ``fit`` and ``train_on_batch`` are known by their names, and the callbacks of a ``fit``
by the name of its variable, as in Keras 3.15.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple
from weakref import ref

from keras_remat.backends.installed import Caller
from keras_remat.backends.keras_private import batches_may_grow, records_steps


@dataclass(frozen=True)
class RunningFit:
    """Holds the callbacks and the data iterator of a ``fit`` that is running.

    The iterator is not kept alive: where a ``fit`` ends without notice, its data can be freed.

    Args:
        callbacks: all of them.
        iterator_ref: returns Keras's iterator over the epoch's data; ``None`` where there is none.
        list_ref: returns Keras's list of the callbacks, as long as anything of the ``fit`` is left.
    """

    callbacks: tuple[Any, ...]
    iterator_ref: Callable[[], Any]
    list_ref: Callable[[], Any] = lambda: None

    @property
    def epoch_iterator(self) -> Any:
        """Returns Keras's iterator over the epoch's data, as long as the ``fit`` runs."""
        return self.iterator_ref()

    @property
    def has_no_more_data(self) -> bool:
        """Returns whether the step that has begun is the last one of the data, where Keras can
        tell."""
        known: int | None = getattr(self.epoch_iterator, "_num_batches", None)
        begun: int = getattr(self.epoch_iterator, "_steps_seen", 0)
        return known is not None and 0 < known <= begun

    @property
    def is_endless(self) -> bool:
        """Returns whether nobody knows how many batches an epoch has."""
        iterator = self.epoch_iterator
        return iterator is not None and getattr(iterator, "num_batches", 0) is None

    @property
    def may_grow(self) -> bool:
        """Returns whether batches may come that are larger than the first one, as far as is
        known."""
        return batches_may_grow(self.epoch_iterator)


def is_profiled(fit: RunningFit | None) -> bool:
    """Returns whether a callback records steps, or is going to: there is one profiler."""
    return fit is not None and any(map(records_steps, fit.callbacks))


def running_fit(model: Any, callback: Any) -> RunningFit | None:
    """Returns the ``fit`` of ``model`` on the stack that has ``callback``, or ``None``."""
    return next((fit for fit in _fits(model) if _has(fit, callback)), None)


def in_another_fit(model: Any, callback: Any) -> bool:
    """Returns whether the innermost ``fit`` of ``model`` on the stack lacks ``callback``."""
    innermost = next(_fits(model), None)
    return innermost is not None and not _has(innermost, callback)


def innermost(*names: str) -> FrameType | None:
    """Returns the frame of the innermost call of a function with one of these names.

    It does not look into a frame's variables, which takes long and keeps their state alive.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name not in names:
        frame = frame.f_back
    return frame


def data_of_fit(model: Any) -> tuple[Any, ...]:
    """Returns inputs, targets and weights as the innermost ``fit`` was given them; nothing where
    that ``fit`` trains another model. Nothing else may keep them."""
    return _variables_of_fit(model, "x", "y", "sample_weight")


def validation_of_fit(model: Any) -> tuple[Any, ...]:
    """Returns the inputs, targets and weights that the innermost ``fit`` validates with; nothing
    where that ``fit`` trains another model."""
    return _variables_of_fit(model, "val_x", "val_y", "val_sample_weight")


def validation_batches_are_told(model: Any) -> bool:
    """Returns whether the user gave the size or number of validation batches to the innermost
    ``fit``, where that trains ``model``."""
    return any(_variables_of_fit(model, "validation_batch_size", "validation_steps"))


def _variables_of_fit(model: Any, *names: str) -> tuple[Any, ...]:
    """Returns variables of the innermost ``fit``; none where it trains another model."""
    frame = innermost("fit")
    variables = {} if frame is None else _variables(frame)
    return tuple(map(variables.get, names)) if variables.get("self") is model else ()


def trains_alone(iterator: Any) -> bool:
    """Returns whether a train function was called by ``train_on_batch``.

    That makes an iterator of its own. On PyTorch it passes a list, as ``fit`` does, and the stack
    tells the two apart.
    """
    if not isinstance(iterator, list):
        return "train_on_batch." in getattr(iterator, "__qualname__", "")
    frame = innermost("fit", "train_on_batch")
    return frame is not None and frame.f_code.co_name == "train_on_batch"


def _variables(frame: FrameType) -> dict[str, Any]:
    """Returns the variables of a function that runs.

    Before Python 3.13 a frame keeps the variables that it returned until it is asked again. Among
    them are an epoch's iterator, whose threads the next asker waits for, and the model's state. So
    the frame's copy is cleared, unless the function got hold of it by ``locals()``.
    """
    is_alone = _times_held(frame) == _TIMES_HELD_ALONE
    told = frame.f_locals
    variables = dict(told)
    if is_alone and type(told) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        told.clear()
    return variables


def _times_held(frame: FrameType) -> int:
    return sys.getrefcount(frame.f_locals)


def _times_held_alone() -> int:
    """Returns the :func:`_times_held` of a frame whose variables nobody else has."""
    return _times_held(sys._getframe())


_TIMES_HELD_ALONE = _times_held_alone()


def _has(fit: RunningFit, callback: Any) -> bool:
    return any(one is callback for one in fit.callbacks)


def _fits(model: Any) -> Iterator[RunningFit]:
    """Yields every ``fit`` of ``model`` on the stack whose callbacks are known, the innermost
    first."""
    frame = sys._getframe(1)
    while frame is not None:
        names = _variables(frame) if frame.f_code.co_name == "fit" else {}
        listed = getattr(names.get("callbacks"), "callbacks", None)
        if listed is not None and names.get("self") is model:
            refs = (_weak(names.get(name)) for name in ("epoch_iterator", "callbacks"))
            yield RunningFit(tuple(listed), *refs)
        frame = frame.f_back  # type: ignore[assignment]


def _weak(held: Any) -> Callable[[], Any]:
    """Returns a function that returns an object of Keras's as long as somebody else keeps it."""
    try:
        return ref(held)
    except TypeError:  # there is none, or a loop of the user's own has another one
        return lambda: None


def caller_of(iterator: Any, fit: RunningFit | None, *, announced: bool) -> Caller:
    """Returns who calls.

    Args:
        announced: whether Keras, or a loop of the user's own, has announced a batch since the last
            call.
    """
    alone = trains_alone(iterator)
    if fit is None:
        return Caller.NOBODY if not announced else Caller.LOOP if alone else Caller.FIT
    return Caller.GUEST if alone else Caller.FIT


class Announced(NamedTuple):
    """Describes the batch that was announced last, and the caller that announced it.

    The frame's number is kept and not the frame, whose data would stay where another callback
    raises before the call. Python may reuse a number, so it identifies the ``fit`` only as long as
    its list of callbacks is there.

    Args:
        is_awaited: whether no call has come since.
        frame: the number of the frame that announced it, since the epoch began; 0 before its first
            batch.
        fit: the ``fit`` of that frame that has the callback.
        is_last: whether it is the epoch's last, where that is known.
        is_endless: whether nobody knew the length of an epoch so far.
    """

    is_awaited: bool = False
    frame: int = 0
    fit: RunningFit | None = None
    is_last: bool = False
    is_endless: bool = False


class Callers:
    """Finds out who calls the train function of one model, by the announcements to a callback.

    Attributes:
        announced: the last announcement; nothing else of this object changes.
    """

    def __init__(self, model: Any, callback: Any):
        self._model, self._callback = model, callback
        self.announced = Announced()

    @property
    def running_fit(self) -> RunningFit | None:
        """Returns the ``fit`` with the callback that is running; ``None`` without one."""
        return running_fit(self._model, self._callback)

    def epoch_begins(self) -> None:
        """Looks for the ``fit`` anew at the next batch: its iterator is another one."""
        self.announced = self.announced._replace(frame=0)

    def announce(self, batch: int, steps_per_epoch: int | None) -> RunningFit | None:
        """Notes that a batch is announced, and returns the ``fit`` that does so.

        Args:
            steps_per_epoch: as far as Keras knows.
        """
        before, frame = self.announced, innermost("fit")
        fit, is_endless = before.fit, before.is_endless
        if id(frame) != before.frame:  # an epoch's first batch
            fit = self.running_fit
            is_endless |= fit is not None and fit.is_endless
        ends = steps_per_epoch is not None and (
            batch + self._model.steps_per_execution >= steps_per_epoch
        )
        is_last = ends or (fit is not None and fit.has_no_more_data)
        self.announced = Announced(True, id(frame), fit, is_last, is_endless)
        return fit

    def caller(self, iterator: Any) -> Caller:
        """Returns who calls with ``iterator``; the announced call is then no longer awaited."""
        before = self.announced
        is_awaited, fit = before.is_awaited, before.fit
        self.announced = before._replace(is_awaited=False)
        is_there = is_awaited and fit is not None and fit.list_ref() is not None
        if is_there and before.frame == id(innermost("fit")) and not trains_alone(iterator):
            return Caller.FIT
        fit = self.running_fit
        if in_another_fit(self._model, self._callback):
            if fit is not None:
                return Caller.INNER
            is_awaited = False  # the fit before failed in the announced batch
        return caller_of(iterator, fit, announced=is_awaited)

    def expect_no_call(self) -> None:
        """Notes that the announced batch is trained by Keras's own train function."""
        self.announced = self.announced._replace(is_awaited=False)

    def forget(self) -> None:
        """Holds no ``fit`` any longer."""
        self.announced = self.announced._replace(fit=None)
