"""Take the place of Keras's train function under a strategy, whose iterators give divided
batches."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_remat.backends.installed import Caller
from keras_remat.backends.tensorflow.graph.sharded import ShardedArray, divided
from keras_remat.backends.tensorflow.swap import InstalledTrainFunction


class MirroredTrainFunction(InstalledTrainFunction):
    """Is the train function of one ``fit`` under a strategy.

    A batch of ``train_on_batch``, which every replica trains whole, is left to Keras's own step.
    """

    def __call__(self, iterator: Any) -> Any:
        caller = self._runner.caller(iterator)
        if caller is not Caller.FIT:
            if caller is Caller.NOBODY:
                self.give_back()
            return self.original(iterator)
        if self._data is None and hasattr(iterator, "element_spec"):
            self._learn(iterator)
        return self._trained(iterator, caller)

    def _read(self, batch: Any) -> Any:
        parts = self._model.distribute_strategy.experimental_local_results

        def read(leaf: Any) -> Any:
            of_replicas = parts(leaf)
            if leaf is None or isinstance(of_replicas[0], tf.experimental.Optional):
                return None
            return ShardedArray(leaf, tuple(of_replicas))

        return tf.nest.map_structure(read, batch)

    def as_given(self, batch: Any) -> Any:
        """Divides a batch among the replicas: each gets samples that follow each other, and the
        first ones get one more where they do not divide evenly."""
        strategy = self._model.distribute_strategy
        return tf.nest.map_structure(
            lambda leaf: (
                leaf if leaf is None or isinstance(leaf, ShardedArray) else divided(strategy, leaf)
            ),
            batch,
        )

    def run_plain(self, batch: Any) -> Any:
        return super().run_plain(
            tf.nest.map_structure(
                lambda leaf: leaf.given if isinstance(leaf, ShardedArray) else leaf,
                self.as_given(batch),
            )
        )
