"""Scales the learning rate with the batch, without ever changing the user's own.

Larger batches are often trained with a learning rate that grows with them, in proportion ("linear")
or by its root ("sqrt"). The factor is put on the optimizers' variables right before a step and
taken off right after it. So callbacks set and show the user's own learning rate, a scheduler is
respected, and nothing is left behind by an interrupt or in another optimizer.

Known limit: a ``LearningRateSchedule`` is no variable, and is left alone with a warning.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import keras


class LearningRateScaling:
    """Scales the learning rates of a model's optimizers while a step runs.

    Args:
        model: compiled; its optimizer, and others that it has as attributes, are looked up at every
            step.
        rule: ``"linear"``, ``"sqrt"``, or ``None`` for no scaling.
        variables: function that makes a context, in which the model's variables have their values
            and assignments to them count for the next step.
    """

    def __init__(
        self,
        model: Any,
        rule: str | None,
        variables: Callable[[], AbstractContextManager[None]],
    ):
        self._model, self._rule, self._variables = model, rule, variables

    def factor(self, size: int, loader_size: int) -> float:
        """Returns the factor of the learning rate for a batch of ``size`` samples."""
        if self._rule is None:
            return 1.0
        ratio = size / loader_size
        return ratio if self._rule == "linear" else math.sqrt(ratio)

    def leave_schedule_alone(self) -> None:
        """Gives the scaling up, with a warning, where a learning rate is no variable."""
        if self._rule is None:
            return
        with self._variables():  # a schedule reads how many updates there were
            rates = self._rates()
        if not _are_variables(rates):
            self._rule = None
            warnings.warn(
                "keras_remat: the learning rate follows a schedule and is not scaled with the "
                "batch.",
                stacklevel=2,
            )

    @contextmanager
    def during(self, factor: float) -> Iterator[None]:
        """Makes a context in which the learning rates are ``factor`` times the user's."""
        if factor == 1.0:
            yield
            return
        with self._variables():
            rates = self._rates()
            if _are_variables(rates):
                users = [float(keras.ops.convert_to_numpy(rate)) for rate in rates]
                _assign(rates, [factor * own for own in users])
        if not _are_variables(rates):
            self.leave_schedule_alone()
            yield
            return
        try:
            yield
        finally:
            with self._variables():
                _assign(rates, users)

    def _rates(self) -> list[Any]:
        """Returns the learning rate of every optimizer that the model has."""
        held = [self._model.optimizer, *vars(self._model).values()]
        optimizers = {id(one): one for one in held if isinstance(one, keras.optimizers.Optimizer)}
        return [one.learning_rate for one in optimizers.values()]


def _are_variables(rates: list[Any]) -> bool:
    return all(isinstance(rate, keras.Variable) for rate in rates)


def _assign(rates: list[Any], values: list[float]) -> None:
    for rate, value in zip(rates, values, strict=True):
        rate.assign(value)
