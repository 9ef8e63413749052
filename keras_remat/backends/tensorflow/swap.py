"""Take the place of Keras's train function while ``fit`` runs, and give it back.

``fit`` looks ``model.train_function`` up at every step, so replacing the attribute takes effect
with the next one. The signature is Keras 3's: ``(iterator) -> logs``, up to ``steps_per_execution``
batches a call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_remat.backends.base import Caller, Installed
from keras_remat.backends.tensorflow import private
from keras_remat.errors import without_inner_frames


class InstalledTrainFunction(Installed):
    """The train function of one ``fit``; asks ``runner`` for every batch."""

    @without_inner_frames
    def __call__(self, iterator: Any) -> Any:
        caller = self._runner.caller(iterator)
        if caller is Caller.NOBODY:
            self.give_back()
        if caller in (Caller.NOBODY, Caller.INNER):
            return self.original(iterator)
        if caller is Caller.FIT:
            return self._of_fit(iterator)
        return self._restored_after(
            lambda: self._runner.run_alone(self._read(next(iterator)), caller)
        )

    def _of_fit(self, iterator: Any) -> Any:
        """Trains a call's batches of ``fit``."""
        return self._restored_after(lambda: self._steps(iter(iterator)))

    def _restored_after(self, train: Callable[[], Any]) -> Any:
        """Trains, and gives the original train function back where that raises."""
        try:
            return train()
        except (StopIteration, tf.errors.OutOfRangeError):
            raise
        except BaseException:
            self.give_back()
            raise

    def _read(self, batch: Any) -> Any:
        """Keras's iterators carry ``None`` (no sample weights, say) as an empty ``Optional``."""
        return tf.nest.map_structure(
            lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, batch
        )

    def run_plain(self, batch: Any) -> Any:
        with private.losses_counted_as(self._model):  # it may trace
            return self.original(iter([batch]))
