"""Take the place of Keras's train function while ``fit`` runs, and give it back.

``fit`` looks ``model.train_function`` up at every step, so replacing the attribute takes effect
with the next one. The signature is Keras 3's: ``(iterator) -> logs``, up to ``steps_per_execution``
batches a call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_remat.backends.installed import Caller, Installed
from keras_remat.backends.tensorflow import private


class InstalledTrainFunction(Installed):
    """Is the train function of one ``fit``, and asks ``runner`` for every batch.

    Keras's function traces the step for what its iterator promises of batches, whatever their size
    is. It is given an iterator of the same kind for a single batch, too: so one trace, and what
    the model's attributes were at that time, holds for all plain steps, as in a plain ``fit``.
    """

    counts_no_empty_step = keeps_first_trace = True
    end_of_data = (StopIteration, tf.errors.OutOfRangeError)
    _promised: Any = None  # what the iterator of ``fit`` promises of its batches
    _data: Any = None  # the type of that iterator
    _specs: Sequence[tf.TensorSpec] = ()  # what it promises of every tensor, a replica's in turn
    _has_fixed_size = False  # whether its batches all have one size, as far as it tells
    _may_lack_parts = True  # whether a batch may have an empty ``Optional``
    _joined: Any = None  # a function of Keras's for joined batches, and the original it is beside

    @property
    def is_traced(self) -> bool:
        return private.is_traced(self.original)

    @property
    def any_size(self) -> bool:
        """Returns whether Keras's own step is traced for batches of any size: those of the data set
        have no fixed one, or it was traced before for others."""
        return self._promised is not None and not self.knows_batch_size

    @property
    def knows_batch_size(self) -> bool:
        """Returns whether Keras's own step is traced for the size that the data set promises."""
        return self._has_fixed_size and private.keeps_batch_size(self.original, self._data)

    def _learn(self, iterator: Any) -> None:
        """Learns what the iterator of ``fit`` promises of its batches' size."""
        self._specs = private.promised_specs(iterator)
        self._has_fixed_size = private.has_fixed_size(iterator)
        self._data = tf.type_spec_from_value(iterator)

    def _caller(self, iterator: Any) -> Caller | None:
        caller = super()._caller(iterator)
        if caller is Caller.FIT and isinstance(iterator, tf.data.Iterator):
            promised = iterator.element_spec
            if promised is not self._promised:  # another epoch's
                specs = tf.nest.flatten(promised)
                self._promised = promised
                self._learn(iterator)
                self._may_lack_parts = any(isinstance(spec, tf.OptionalSpec) for spec in specs)
        return caller

    def _read(self, batch: Any) -> Any:
        """Keras's iterators carry ``None`` (no sample weights, say) as an empty ``Optional``."""
        if not self._may_lack_parts:
            return batch
        return tf.nest.map_structure(
            lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, batch
        )

    def _runs_eagerly(self) -> bool:
        return bool(tf.config.functions_run_eagerly())

    def synchronize(self) -> None:
        updates = getattr(getattr(self._model, "optimizer", None), "iterations", None)
        if updates is not None:
            updates.numpy()  # a GPU has done what was asked of it before

    def run_plain(self, batch: Any) -> Any:
        iterator = _iterator_of(batch, self._promised)
        if iterator is None:
            return self._traced(self._of_joined(), iter([batch]))
        return self._traced(self.original, iterator)

    def _traced(self, function: Any, iterator: Iterator[Any]) -> Any:
        """Calls a function of Keras's, which may trace."""
        with private.losses_counted_as(self._model):
            return function(iterator)

    def _of_joined(self) -> Any:
        """Returns a function of Keras's for joined batches, which goes with this ``fit``.

        The original would run what was traced for them, which counts losses as this ``fit`` does,
        on other data, too.
        """
        if self._joined is None or self._joined[1] is not self.original:
            self._joined = private.train_function(self._model), self.original
        return self._joined[0]


def _iterator_of(batch: Any, promised: Any) -> Iterator[Any] | None:
    """Returns an iterator of one batch: where ``promised`` says what an iterator of ``tf.data``
    would give, an iterator of that kind; ``None`` where the batch is not such a one."""
    if promised is None:
        return iter([batch])
    optional = tf.nest.map_structure(
        lambda leaf: tf.experimental.Optional.empty(None) if leaf is None else leaf, batch
    )
    try:
        tf.nest.assert_same_structure(optional, promised)
    except (TypeError, ValueError):
        return None
    leaves, specs = tf.nest.flatten(optional), tf.nest.flatten(promised)
    if not all(spec.is_compatible_with(leaf) for leaf, spec in zip(leaves, specs, strict=True)):
        return None  # a joined batch, of data whose batches have a static size
    exact = tf.data.Dataset.from_tensors(optional)
    variant = tf.data.experimental.to_variant(exact)
    only: Iterator[Any] = iter(tf.data.experimental.from_variant(variant, promised))
    return only
