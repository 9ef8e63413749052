"""Loader batches joined and cut: every sample once, in order."""

import random

import keras
import numpy as np
import pytest

from keras_remat.backends.batches import batch_size_of
from keras_remat.errors import UnsupportedModelError
from keras_remat.training.grouping import BatchGrouper


def batch_of(first, size):
    """Samples numbered from ``first``: two inputs, targets, no weights."""
    numbers = np.arange(first, first + size)
    return ({"a": np.stack([numbers, -numbers], axis=1), "b": numbers * 10}, numbers, None)


def numbers_of(batch):
    """The sample numbers in a batch, after checking that all its arrays agree on them."""
    x, y, weights = batch
    numbers = keras.ops.convert_to_numpy(y)
    np.testing.assert_array_equal(
        keras.ops.convert_to_numpy(x["a"]), np.stack([numbers, -numbers], axis=1)
    )
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(x["b"]), numbers * 10)
    assert weights is None
    return numbers.tolist()


@pytest.mark.parametrize("seed", range(20))
def test_every_sample_comes_out_once_and_in_order(seed):
    rng = random.Random(seed)
    group, added, taken = BatchGrouper(), 0, []
    while added < 60:
        size = rng.randint(1, 9)
        group.add(batch_of(added, size))
        added += size
        while group.samples and rng.random() < 0.6:
            wanted = rng.randint(1, group.samples)
            batch = group.take(wanted)
            assert batch_size_of(batch) == wanted
            if rng.random() < 0.2:
                group.put_back(batch)
            else:
                taken += numbers_of(batch)
        assert group.samples == added - len(taken)
    if group.samples:
        taken += numbers_of(group.take(group.samples))
    assert taken == list(range(added))
    assert group.samples == 0


def test_batches_are_joined_and_the_last_one_is_split():
    group = BatchGrouper()
    for first in (0, 4, 8):
        group.add(batch_of(first, 4))
    assert numbers_of(group.take(10)) == list(range(10))
    assert group.samples == 2
    assert numbers_of(group.take(2)) == [10, 11]


def test_one_batch_is_cut_into_many():
    group = BatchGrouper()
    group.add(batch_of(0, 7))
    assert [numbers_of(group.take(n)) for n in (3, 3, 1)] == [[0, 1, 2], [3, 4, 5], [6]]


def test_a_batch_of_exactly_the_size_is_not_copied():
    group, batch = BatchGrouper(), batch_of(0, 4)
    group.add(batch)
    for taken, given in zip(
        keras.tree.flatten(group.take(4)), keras.tree.flatten(batch), strict=True
    ):
        assert taken is given


def test_put_back_samples_are_the_oldest_again():
    group = BatchGrouper()
    for first in (0, 3, 6):
        group.add(batch_of(first, 3))
    group.put_back(group.take(5))
    assert group.samples == 9
    assert numbers_of(group.take(4)) == [0, 1, 2, 3]
    assert numbers_of(group.take(5)) == [4, 5, 6, 7, 8]


@pytest.mark.parametrize("size", [0, -1, 4])
def test_more_than_is_held_or_nothing_cannot_be_taken(size):
    group = BatchGrouper()
    group.add(batch_of(0, 3))
    with pytest.raises(ValueError, match="3 held"):
        group.take(size)
    assert numbers_of(group.take(3)) == [0, 1, 2]


@pytest.mark.parametrize("odd", [np.ones((2, 5)), np.float32(1.0)])
def test_arrays_without_the_samples_in_front_are_refused_and_not_held(odd):
    group = BatchGrouper()
    with pytest.raises(UnsupportedModelError, match="3 samples"):
        group.add((np.ones((3, 2)), odd))
    assert group.samples == 0
    with pytest.raises(ValueError, match="0 held"):
        group.take(1)


def test_samples_of_other_shapes_are_refused_and_not_held():
    group = BatchGrouper()
    group.add((np.ones((3, 5)), np.ones((3, 1))))
    with pytest.raises(UnsupportedModelError, match=r"\(6,\).*\(5,\)"):
        group.add((np.ones((3, 6)), np.ones((3, 1))))
    assert group.samples == 3


class InTwoParts:
    """An array that two devices have a half of each, as far as it is asked."""

    def __init__(self, whole):
        self.whole, self.shape, self.dtype = whole, whole.shape, whole.dtype

    def __array__(self, dtype=None, copy=None):
        return np.concatenate(np.split(self.whole, 2))


def test_divided_arrays_are_joined_in_the_order_of_their_samples():
    group, numbers = BatchGrouper(), np.arange(12)
    group.add((InTwoParts(numbers[:6]),))
    group.add((InTwoParts(numbers[6:]),))
    (taken,) = group.take(8)
    np.testing.assert_array_equal(taken, numbers[:8])
    group.put_back((InTwoParts(numbers[:8]),))
    (taken,) = group.take(12)
    np.testing.assert_array_equal(taken, numbers)


def test_the_oldest_batch_comes_out_as_it_came():
    group = BatchGrouper()
    for first in (0, 4, 8):
        group.add(batch_of(first, 4))
    assert numbers_of(group.take(6)) == list(range(6))
    assert [numbers_of(group.take_oldest()) for _ in range(2)] == [[6, 7], [8, 9, 10, 11]]
    assert group.samples == 0
