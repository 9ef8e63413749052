"""Loader batches joined and cut: every sample once, in order."""

import random
import weakref

import keras
import numpy as np
import pytest

from keras_remat.backends.batches import batch_size_of
from keras_remat.errors import UnsupportedModelError
from keras_remat.training.grouping import HeldBatches, bytes_beside


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


def numbers_taken(group, size):
    """The sample numbers of a batch that is taken, and what is left."""
    batch, others = group.taking(size)
    return numbers_of(batch), others


@pytest.mark.parametrize("seed", range(20))
def test_every_sample_comes_out_once_and_in_order(seed):
    rng = random.Random(seed)
    group, added, taken = HeldBatches(), 0, []
    while added < 60:
        size = rng.randint(1, 9)
        group = group.adding(batch_of(added, size))
        added += size
        while group.samples and rng.random() < 0.6:
            wanted = rng.randint(1, group.samples)
            before, (batch, group) = group.samples, group.taking(wanted)
            assert batch_size_of(batch) == wanted
            draw = rng.random()
            if draw < 0.2:
                cut = rng.randint(1, 9)
                group = group.with_oldest(batch) if draw < 0.1 else group.given_back(batch, cut)
                assert group.samples == before
            else:
                taken += numbers_of(batch)
        assert group.samples == added - len(taken)
    if group.samples:
        batch, group = group.taking(group.samples)
        taken += numbers_of(batch)
    assert taken == list(range(added))
    assert group.samples == 0


def test_a_batch_of_exactly_the_size_is_not_copied():
    group, batch = HeldBatches(), batch_of(0, 4)
    group = group.adding(batch)
    for taken, given in zip(
        keras.tree.flatten(group.taking(4)[0]), keras.tree.flatten(batch), strict=True
    ):
        assert taken is given


def test_a_batch_that_is_given_back_is_not_held_in_one_piece():
    """Else all of it would be in memory while the sizes that are tried next are trained."""
    group, batch = HeldBatches(), (np.arange(7), None)
    watch = weakref.ref(batch[0])
    group = group.given_back(batch, 3)
    del batch
    assert watch() is None
    assert [part[0].tolist() for part in group.batches] == [[0, 1, 2], [3, 4, 5], [6]]
    assert keras.ops.convert_to_numpy(group.taking(7)[0][0]).tolist() == [*range(7)]


@pytest.mark.parametrize("size", [0, -1, 4])
def test_more_than_is_held_or_nothing_cannot_be_taken(size):
    group = HeldBatches()
    group = group.adding(batch_of(0, 3))
    with pytest.raises(ValueError, match="3 held"):
        group.taking(size)
    assert numbers_taken(group, 3)[0] == [0, 1, 2]


@pytest.mark.parametrize("odd", [np.ones((2, 5)), np.float32(1.0)])
def test_arrays_without_the_samples_in_front_are_refused_and_not_held(odd):
    group = HeldBatches()
    with pytest.raises(UnsupportedModelError, match="3 samples"):
        group = group.adding((np.ones((3, 2)), odd))
    assert group.samples == 0
    with pytest.raises(ValueError, match="0 held"):
        group.taking(1)


def test_samples_of_other_shapes_are_refused_and_not_held():
    group = HeldBatches()
    group = group.adding((np.ones((3, 5)), np.ones((3, 1))))
    with pytest.raises(UnsupportedModelError, match=r"\(6,\).*\(5,\)"):
        group = group.adding((np.ones((3, 6)), np.ones((3, 1))))
    assert group.samples == 3


class InTwoParts:
    """An array that two devices have a half of each, as far as it is asked."""

    def __init__(self, whole):
        self.whole, self.shape, self.dtype = whole, whole.shape, whole.dtype

    def __array__(self, dtype=None, copy=None):
        return np.concatenate(np.split(self.whole, 2))


def test_what_is_cut_off_a_batch_lies_beside_a_step_where_it_is_a_copy():
    """MobileNet's largest batch in ``fit`` on PyTorch was a sample short for the loader's batch,
    which was counted twice."""
    images, classes = np.zeros((6, 8), np.float32), np.zeros(6, np.int32)
    as_they_are = (images, classes, None)
    assert bytes_beside(as_they_are) == images.nbytes + classes.nbytes
    tensors = keras.tree.map_structure(keras.ops.convert_to_tensor, (images, classes))
    (cut,), kept = HeldBatches().adding((tensors[0],)).taking(4)[1].batches[0], tensors[0]
    is_copy = not np.shares_memory(np.asarray(cut), np.asarray(kept))
    assert bytes_beside(tensors) >= (1 + is_copy) * (images.nbytes + classes.nbytes)


def test_divided_arrays_are_joined_in_the_order_of_their_samples():
    group, numbers = HeldBatches(), np.arange(12)
    group = group.adding((InTwoParts(numbers[:6]),))
    group = group.adding((InTwoParts(numbers[6:]),))
    (taken,), group = group.taking(8)
    np.testing.assert_array_equal(taken, numbers[:8])
    group = group.with_oldest((InTwoParts(numbers[:8]),))
    (taken,), _ = group.taking(12)
    np.testing.assert_array_equal(taken, numbers)


def test_the_oldest_batch_comes_out_as_it_came():
    group = HeldBatches()
    for first in (0, 4, 8):
        group = group.adding(batch_of(first, 4))
    taken, group = numbers_taken(group, 6)
    assert taken == list(range(6))
    for numbers in ([6, 7], [8, 9, 10, 11]):
        batch, group = group.taking_oldest()
        assert numbers_of(batch) == numbers
    assert group.samples == 0
