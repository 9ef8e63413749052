"""Loader batches joined into larger ones, and split to size: every sample once, in order.

Batches are held, joined and sliced in the host's memory, so that a GPU gets one batch at a time.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from keras_remat.backends.batches import batch_size_of, sliced
from keras_remat.errors import UnsupportedModelError


class BatchGrouper:
    """Holds loader batches back until enough samples are there.

    Samples stay in order, and none is dropped or repeated: what goes in by :meth:`add` comes out by
    :meth:`take`.
    """

    def __init__(self) -> None:
        self._held: list[Any] = []
        self.samples = 0

    def add(self, batch: Any) -> None:
        """Holds one loader batch.

        Raises:
            UnsupportedModelError: its arrays do not all have the samples in their first dimension,
                or do not have the shapes of those that are held.
        """
        size = batch_size_of(batch)
        for leaf in keras.tree.flatten(batch):
            if leaf is not None and (len(leaf.shape) == 0 or leaf.shape[0] != size):
                raise UnsupportedModelError(
                    f"Batches cannot be joined: an array of shape {tuple(leaf.shape)} does not "
                    f"have the {size} samples of its batch."
                )
        if self._held and _sample_shapes(self._held[-1]) != _sample_shapes(batch):
            raise UnsupportedModelError(
                f"Batches cannot be joined: samples have the shapes {_sample_shapes(batch)} in one "
                f"and {_sample_shapes(self._held[-1])} in the other."
            )
        self._held.append(keras.tree.map_structure(_on_host, batch))
        self.samples += size

    def take_oldest(self) -> Any:
        """Returns the oldest batch that is held, or what is left of it.

        Raises:
            IndexError: none is held.
        """
        batch = self._held.pop(0)
        self.samples -= batch_size_of(batch)
        return batch

    def put_back(self, batch: Any) -> None:
        """Undoes a :meth:`take`: the samples are the oldest again."""
        self._held.insert(0, batch)
        self.samples += batch_size_of(batch)

    def take(self, size: int) -> Any:
        """Returns the oldest ``size`` samples as one batch.

        Raises:
            ValueError: fewer are held.
        """
        if not 0 < size <= self.samples:
            raise ValueError(f"{size} samples asked for, {self.samples} held")
        taken: list[Any] = []
        missing = size
        with keras.device("cpu:0"):
            while missing:
                batch = keras.tree.map_structure(_on_host, self._held.pop(0))
                count = batch_size_of(batch)
                if count > missing:
                    self._held.insert(0, sliced(batch, slice(missing, None)))
                    batch, count = sliced(batch, slice(missing)), missing
                taken.append(batch)
                missing -= count
            self.samples -= size
            return taken[0] if len(taken) == 1 else keras.tree.map_structure(_joined, *taken)


def _on_host(leaf: Any) -> Any:
    """Returns an array that holds no memory of an accelerator, and is in one piece. TensorFlow's
    iterators give such tensors, unless they are divided among replicas."""
    on_host = keras.backend.backend() == "tensorflow" and keras.ops.is_tensor(leaf)
    return leaf if leaf is None or on_host else np.asarray(leaf)


def _joined(*leaves: Any) -> Any:
    return None if leaves[0] is None else keras.ops.concatenate(leaves, axis=0)


def _sample_shapes(batch: Any) -> list[Any]:
    """The shape of one sample in every array of a batch."""
    flat = keras.tree.flatten(batch)
    return [None if leaf is None else tuple(leaf.shape[1:]) for leaf in flat]
