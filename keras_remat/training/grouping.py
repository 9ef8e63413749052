"""Joins loader batches into larger ones and splits them to size: every sample once, in order.

Batches are held, joined and sliced in the host's memory, so that a GPU gets one batch at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import keras
import numpy as np

from keras_remat.backends.batches import (
    batch_bytes,
    batch_size_of,
    leaves_of,
    sliced,
    uneven_shape,
)
from keras_remat.errors import UnsupportedModelError


@dataclass(frozen=True)
class HeldBatches:
    """Holds loader batches back until enough samples are there.

    Samples stay in order, and none is dropped or repeated: all that go in by :meth:`adding` come
    out by :meth:`taking`.

    Args:
        batches: the oldest first.
        samples: number of samples in all of them.
    """

    batches: tuple[Any, ...] = ()
    samples: int = 0

    def adding(self, batch: Any) -> Self:
        """Returns the batches with one more, which can be joined with those before it.

        Raises:
            UnsupportedModelError: its arrays do not all have the samples in their first dimension,
                or do not have the shapes of those that are held.
        """
        uneven = uneven_shape(batch)
        if uneven is not None:
            raise UnsupportedModelError(
                f"Batches cannot be joined: an array of shape {uneven} does not have the "
                f"{batch_size_of(batch)} samples of its batch."
            )
        if self.batches and _sample_shapes(self.batches[-1]) != _sample_shapes(batch):
            raise UnsupportedModelError(
                f"Batches cannot be joined: samples have the shapes {_sample_shapes(batch)} in one "
                f"and {_sample_shapes(self.batches[-1])} in the other."
            )
        return self.with_newest(keras.tree.map_structure(_on_host, batch))

    def with_newest(self, batch: Any) -> Self:
        """Returns the batches with one more, which is trained as it is."""
        return replace(
            self, batches=(*self.batches, batch), samples=self.samples + batch_size_of(batch)
        )

    def keeping_newest(self) -> Self:
        """Returns the batches, the newest with memory of its own.

        A generator may write the next batch into the arrays that it gave.
        """
        newest = keras.tree.map_structure(_copied, self.batches[-1])
        return replace(self, batches=(*self.batches[:-1], newest))

    def with_oldest(self, batch: Any) -> Self:
        """Returns the batches as before a :meth:`taking`: the batch is the oldest again."""
        return replace(
            self, batches=(batch, *self.batches), samples=self.samples + batch_size_of(batch)
        )

    def given_back(self, batch: Any, size: int) -> Self:
        """Returns the batches as before a :meth:`taking`, with the batch split to ``size`` samples.

        Arrays of the host become batches with memory of their own, which is freed once each is
        trained. In one piece, the whole batch would stay in memory until its last sample is
        trained.
        """
        with keras.device("cpu:0"):
            whole = keras.tree.map_structure(_on_host, batch)
            parts = tuple(
                keras.tree.map_structure(_copied, sliced(whole, slice(start, start + size)))
                for start in range(0, batch_size_of(whole), size)
            )
        samples = self.samples + batch_size_of(whole)
        return replace(self, batches=(*parts, *self.batches), samples=samples)

    def taking_oldest(self) -> tuple[Any, Self]:
        """Returns the oldest batch that is held, or the rest of it, and the others.

        Raises:
            IndexError: none is held.
        """
        batch = self.batches[0]
        samples = self.samples - batch_size_of(batch)
        return batch, replace(self, batches=self.batches[1:], samples=samples)

    def taking(self, size: int) -> tuple[Any, Self]:
        """Returns the oldest ``size`` samples as one batch, and the others.

        Raises:
            ValueError: fewer are held.
        """
        if not 0 < size <= self.samples:
            raise ValueError(f"{size} samples asked for, {self.samples} held")
        taken: list[Any] = []
        missing, left = size, list(self.batches)
        with keras.device("cpu:0"):
            while missing:
                batch = keras.tree.map_structure(_on_host, left.pop(0))
                count = batch_size_of(batch)
                if count > missing:
                    left.insert(0, sliced(batch, slice(missing, None)))
                    batch, count = sliced(batch, slice(missing)), missing
                taken.append(batch)
                missing -= count
            others = replace(self, batches=tuple(left), samples=self.samples - size)
            joined = taken[0] if len(taken) == 1 else keras.tree.map_structure(_joined, *taken)
            return joined, others


def bytes_beside(batch: Any) -> int:
    """Returns the host bytes that lie beside a step of joined batches.

    They are those of the loader's newest batch and of the part that was cut off it. A part of a
    NumPy array or a PyTorch tensor shares the memory of the whole; a part of another framework's
    tensor may be a copy.
    """
    shares = keras.backend.backend() == "torch"
    copies = [one for one in leaves_of(batch) if not shares and not isinstance(one, np.ndarray)]
    return batch_bytes(batch) + batch_bytes(copies)


def _on_host(leaf: Any) -> Any:
    """Returns an array in one piece on the host.

    TensorFlow's iterators give such tensors, unless they are divided among replicas.
    """
    on_host = keras.backend.backend() == "tensorflow" and keras.ops.is_tensor(leaf)
    return leaf if leaf is None or on_host else np.asarray(leaf)


def _copied(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def _joined(*leaves: Any) -> Any:
    return None if leaves[0] is None else keras.ops.concatenate(leaves, axis=0)


def _sample_shapes(batch: Any) -> list[Any]:
    """Returns the shape of one sample in every array of a batch."""
    return [None if leaf is None else tuple(leaf.shape[1:]) for leaf in leaves_of(batch)]
