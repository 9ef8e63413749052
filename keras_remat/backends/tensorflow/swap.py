"""Take the place of Keras's train function while ``fit`` runs, and give it back.

``fit`` looks ``model.train_function`` up at every step, so replacing the attribute takes effect with the next one. The signature is Keras
3's: ``(iterator) -> logs``, up to ``steps_per_execution`` batches a call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

logger = logging.getLogger(__name__)


class InstalledTrainFunction:
    """The train function of one ``fit``; calls ``run`` for every batch.

    Args:
        model: whose ``train_function`` Keras has made.
        run: batch → logs.
        is_current: ``False`` when the ``fit`` this was made for has ended without notice (an exception, Ctrl-C); the original train
            function then comes back and takes the call.
    """

    def __init__(self, model: Any, run: Callable[[Any], Any], is_current: Callable[[], bool]):
        self._model, self._run, self._is_current = model, run, is_current
        current: Any = model.train_function
        while isinstance(current, InstalledTrainFunction):  # left behind by a fit that ended without notice
            current = current.original
        self.original: Any = current
        model.train_function = self

    def __call__(self, iterator: Any) -> Any:
        if not self._is_current():
            self.restore()
            return self.original(iterator)
        try:
            return self._steps(iter(iterator))
        except (StopIteration, tf.errors.OutOfRangeError):
            raise
        except BaseException:
            self.restore()
            raise

    def _steps(self, iterator: Iterator[Any]) -> Any:
        logs = None
        for at in range(self._model.steps_per_execution):
            try:
                batch = next(iterator)
            except StopIteration:
                if at == 0:
                    raise
                break
            logs = self._run(_without_optionals(batch))
        return logs

    def run_plain(self, batch: Any) -> Any:
        """Runs Keras's own step on one batch."""
        return self.original(iter([batch]))

    def restore(self) -> None:
        """Puts the original train function back, unless somebody else has replaced this one meanwhile."""
        if self._model.train_function is self:
            self._model.train_function = self.original


def _without_optionals(batch: Any) -> Any:
    """Keras's iterators carry ``None`` (no sample weights, say) as an empty ``Optional``."""
    return tf.nest.map_structure(lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, batch)
