"""Represents a batch that is divided among replicas: each gets one part of every array.

The layers above read only the shape and dtype of a batch's arrays. The shape here is that of all
parts together, so a batch has the number of samples that ``fit`` was called with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf


@dataclass(frozen=True, eq=False)
class ShardedArray:
    """Holds one array of a divided batch.

    Args:
        given: the array as Keras's iterator yields it.
        parts: each replica's part.
    """

    given: Any
    parts: tuple[Any, ...]

    @property
    def dtype(self) -> Any:
        """Returns the dtype of every part."""
        return self.parts[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape of all parts together."""
        first = tuple(self.parts[0].shape)
        return (sum(int(part.shape[0]) for part in self.parts), *first[1:]) if first else ()

    @property
    def is_even(self) -> bool:
        """Returns whether all parts have the same shape and are not empty."""
        shapes = {tuple(part.shape) for part in self.parts}
        return len(shapes) == 1 and 0 not in next(iter(shapes))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Returns all parts together, in the host's memory."""
        return np.concatenate([np.asarray(part) for part in self.parts]).astype(
            dtype or self.parts[0].dtype.as_numpy_dtype, copy=False
        )


def divided(strategy: Any, array: Any) -> ShardedArray:
    """Divides an array's samples among the replicas of a strategy, as evenly as possible."""
    devices = strategy.extended.worker_devices
    parts = []
    for device, part in zip(devices, np.array_split(np.asarray(array), len(devices)), strict=True):
        with tf.device(device):
            parts.append(tf.identity(part))
    given = strategy.experimental_distribute_values_from_function(
        lambda context: parts[context.replica_id_in_sync_group]
    )
    return ShardedArray(given, tuple(parts))


def part_of(leaf: Any, replica: int) -> Any:
    """Returns a replica's part of an array; the whole array where the batch is not divided."""
    return leaf.parts[replica] if isinstance(leaf, ShardedArray) else tf.convert_to_tensor(leaf)
