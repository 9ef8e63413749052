"""A divided batch has the samples of all its parts."""

import numpy as np
import tensorflow as tf

from keras_remat.backends.batches import batch_size_of
from keras_remat.backends.tensorflow.graph.sharded import ShardedArray, part_of
from keras_remat.training.shape_state import signature_of


def sharded(*sizes):
    return ShardedArray(None, tuple(tf.ones((size, 3)) for size in sizes))


def test_size_and_signature_are_those_of_all_parts():
    batch = (sharded(4, 4), None)
    assert batch_size_of(batch) == 8
    assert [leaf and leaf[:2] for leaf in signature_of(batch)] == [((8, 3), "float32"), None]


def test_parts_are_even_where_all_have_one_shape_and_samples():
    assert sharded(4, 4).is_even
    assert not sharded(4, 3).is_even
    assert not sharded(1, 0).is_even
    assert not sharded(0, 0).is_even


def test_a_replica_gets_its_part_and_all_of_what_is_not_divided():
    assert part_of(sharded(4, 3), 1).shape == (3, 3)
    assert part_of(np.ones((4, 3)), 1).shape == (4, 3)
