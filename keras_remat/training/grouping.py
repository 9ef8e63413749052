"""Loader batches joined into larger ones, and cut to size: every sample once, in order."""

from __future__ import annotations

from typing import Any

from keras_remat.backends.batches import batch_size_of
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
            UnsupportedModelError: its arrays do not all have the samples in their first dimension.
        """
        import keras

        size = batch_size_of(batch)
        for leaf in keras.tree.flatten(batch):
            if leaf is not None and (len(leaf.shape) == 0 or leaf.shape[0] != size):
                raise UnsupportedModelError(
                    f"Batches cannot be joined: an array of shape {tuple(leaf.shape)} does not have the {size} samples of its batch."
                )
        self._held.append(batch)
        self.samples += size

    def put_back(self, batch: Any) -> None:
        """Undoes a :meth:`take`: the samples are the oldest again."""
        self._held.insert(0, batch)
        self.samples += batch_size_of(batch)

    def take(self, size: int) -> Any:
        """Returns the oldest ``size`` samples as one batch.

        Raises:
            ValueError: fewer are held.
        """
        import keras

        if not 0 < size <= self.samples:
            raise ValueError(f"{size} samples asked for, {self.samples} held")
        taken: list[Any] = []
        missing = size
        while missing:
            batch = self._held.pop(0)
            count = batch_size_of(batch)
            if count > missing:
                self._held.insert(
                    0,
                    keras.tree.map_structure(
                        lambda leaf, at=missing: None if leaf is None else leaf[at:], batch
                    ),
                )
                batch = keras.tree.map_structure(
                    lambda leaf, at=missing: None if leaf is None else leaf[:at], batch
                )
                count = missing
            taken.append(batch)
            missing -= count
        self.samples -= size
        if len(taken) == 1:
            return taken[0]

        def join(*leaves: Any) -> Any:
            return None if leaves[0] is None else keras.ops.concatenate(leaves, axis=0)

        return keras.tree.map_structure(join, *taken)
