"""Takes the place of Keras's train function while ``fit`` runs, and gives it back.

``fit`` looks up ``model.train_function`` at every step, so replacing the attribute takes effect at
the next step. The signature is Keras 3's: ``(iterator) -> logs``, up to ``steps_per_execution``
batches a call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_remat.backends.installed import Caller, Installed
from keras_remat.backends.tensorflow import private


class InstalledTrainFunction(Installed):
    """Acts as the train function of one ``fit``, and asks ``runner`` for every batch.

    Keras's function traces the step for the specs that its iterator promises, whatever the size of
    a batch is. For a single batch it gets an iterator of the same kind, too. So one trace serves
    all plain steps, with the model's attributes at that time, as in a plain ``fit``.
    """

    counts_no_empty_step = keeps_first_trace = True
    end_of_data = (StopIteration, tf.errors.OutOfRangeError)
    _promised: Any = None  # the specs that the iterator of ``fit`` promises for its batches
    _data: Any = None  # the type of that iterator
    _specs: Sequence[tf.TensorSpec] = ()  # the promised spec of every tensor, replica by replica
    _has_fixed_size = False  # whether the iterator promises batches of one size
    _may_lack_parts = True  # whether a batch may have an empty ``Optional``
    _joined: Any = None  # Keras's function for joined batches, and the original it was made for

    @property
    def is_traced(self) -> bool:
        return private.is_traced(self.original)

    @property
    def any_size(self) -> bool:
        """Returns whether Keras's own step is traced for batches of any size: the data set has no
        fixed batch size, or the step was traced before for other batches."""
        return self._promised is not None and not self.knows_batch_size

    @property
    def knows_batch_size(self) -> bool:
        """Returns whether Keras's own step is traced for the size that the data set promises."""
        return self._has_fixed_size and private.keeps_batch_size(self.original, self._data)

    def _learn(self, iterator: Any) -> None:
        """Reads the specs and the batch size that the iterator of ``fit`` promises."""
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
        """Returns a batch with ``None`` for each empty ``Optional``, by which Keras's iterators
        represent ``None`` (such as no sample weights)."""
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
            updates.numpy()  # waits until a GPU has done all earlier work

    def run_plain(self, batch: Any) -> Any:
        iterator = _iterator_of(batch, self._promised)
        if iterator is None:
            return self._traced(self._of_joined(), iter([batch]))
        return self._traced(self.original, iterator)

    def _traced(self, function: Any, iterator: Iterator[Any]) -> Any:
        """Calls one of Keras's functions, which may trace."""
        with private.losses_counted_as(self._model):
            return function(iterator)

    def _of_joined(self) -> Any:
        """Returns a train function of Keras's for joined batches, dropped with this ``fit``.

        The original would keep the trace for joined batches, which counts losses as this ``fit``
        does, and run it on other data later.
        """
        if self._joined is None or self._joined[1] is not self.original:
            self._joined = private.train_function(self._model), self.original
        return self._joined[0]


def _iterator_of(batch: Any, promised: Any) -> Iterator[Any] | None:
    """Returns an iterator over one batch: a ``tf.data`` iterator with the specs ``promised``, if
    given; ``None`` where the batch does not match them."""
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
