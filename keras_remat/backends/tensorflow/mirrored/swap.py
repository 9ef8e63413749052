"""Takes the place of Keras's train function under a strategy, whose iterators yield divided
batches."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import tensorflow as tf

from keras_remat.backends.installed import Caller
from keras_remat.backends.tensorflow import private
from keras_remat.backends.tensorflow.graph.sharded import ShardedArray, divided
from keras_remat.backends.tensorflow.swap import InstalledTrainFunction

#: Keras's train functions that were used here for batches of one fixed size.
_COUNT_SAMPLES: WeakSet[Any] = WeakSet()


class MirroredTrainFunction(InstalledTrainFunction):
    """Acts as the train function of one ``fit`` under a strategy.

    Keras's own step trains the batches of ``train_on_batch``, which every replica gets whole.
    """

    def _caller(self, iterator: Any) -> Caller | None:
        if super()._caller(iterator) is not Caller.FIT:
            return None
        if self._data is None and hasattr(iterator, "element_spec"):
            self._learn(iterator)
        return Caller.FIT

    def _read(self, batch: Any) -> Any:
        parts = self._model.distribute_strategy.experimental_local_results

        def read(leaf: Any) -> Any:
            of_replicas = parts(leaf)
            if leaf is None or isinstance(of_replicas[0], tf.experimental.Optional):
                return None
            return ShardedArray(leaf, tuple(of_replicas))

        return tf.nest.map_structure(read, batch)

    def as_given(self, batch: Any) -> Any:
        """Divides a batch among the replicas. Each gets consecutive samples; where they do not
        divide evenly, the first replicas get one more."""
        strategy = self._model.distribute_strategy
        return tf.nest.map_structure(
            lambda leaf: (
                leaf if leaf is None or isinstance(leaf, ShardedArray) else divided(strategy, leaf)
            ),
            batch,
        )

    def run_plain(self, batch: Any) -> Any:
        divided_batch = self.as_given(batch)
        given = tf.nest.map_structure(
            lambda leaf: leaf.given if isinstance(leaf, ShardedArray) else leaf, divided_batch
        )
        function = self.original if self._is_for_original(divided_batch) else self._of_joined()
        return self._traced(function, iter([given]))

    def _is_for_original(self, batch: Any) -> bool:
        """Returns whether the original function may train a batch.

        It keeps one trace per size, also where Keras's own step is traced for any size. A trace
        made where all batches have one size counts samples; a trace for other data must not.
        """
        if self._data is None:
            return True
        if not self._has_fixed_size:
            return self.original not in _COUNT_SAMPLES and not private.knows_sizes(self.original)
        leaves = [leaf for leaf in tf.nest.flatten(batch) if isinstance(leaf, ShardedArray)]
        parts = [part for leaf in leaves for part in leaf.parts]
        is_promised = len(parts) == len(self._specs) and all(
            spec.is_compatible_with(part) for spec, part in zip(self._specs, parts, strict=True)
        )
        if is_promised:
            _COUNT_SAMPLES.add(self.original)
        return is_promised
