"""Batches of a strategy's iterators reach the runner divided, and Keras's own step as they came."""

from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from noting_runner import Runner

from keras_remat.backends.installed import Caller
from keras_remat.backends.tensorflow.graph.sharded import ShardedArray
from keras_remat.backends.tensorflow.mirrored.swap import MirroredTrainFunction


@pytest.fixture
def model():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    return SimpleNamespace(distribute_strategy=strategy, train_function=next, steps_per_execution=1)


def test_every_array_is_divided_and_what_is_not_there_is_none(model):
    runner = Runner()
    train = MirroredTrainFunction(model, runner)
    x, no_weights = tf.ones((4, 2)), tf.experimental.Optional.empty(tf.TensorSpec(()))
    train(iter([(x, no_weights, None)]))
    ((array, *rest),) = runner.ran
    assert isinstance(array, ShardedArray)
    assert (array.shape, len(array.parts), rest) == ((4, 2), 1, [None, None])
    assert train.run_plain((array, None))[0] is x


@pytest.mark.parametrize("caller", [Caller.GUEST, Caller.LOOP, Caller.NOBODY])
def test_a_batch_that_is_not_of_fit_is_trained_by_keras(model, caller):
    runner = Runner(caller=caller)
    train = MirroredTrainFunction(model, runner)
    assert train(iter(["theirs"])) == "theirs"
    assert runner.ran == []
    assert (model.train_function is next) == (caller is Caller.NOBODY)


def test_what_a_step_raises_passes_through_after_the_original_is_back(model):
    train = MirroredTrainFunction(model, Runner(error=ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        train(iter([(tf.ones((4, 2)),)]))
    assert model.train_function is next


@pytest.mark.parametrize("last", [0, 2])
def test_a_strategy_s_iterator_says_whether_batches_have_a_fixed_size(model, last):
    model.train_function = lambda iterator: None  # nothing was traced for other batches before
    train = MirroredTrainFunction(model, Runner())
    data = tf.data.Dataset.range(12 + last).batch(4, drop_remainder=not last)
    train(iter(model.distribute_strategy.experimental_distribute_dataset(data)))
    assert train.knows_batch_size == (not last)


@pytest.mark.parametrize("fixed", [True, False])
def test_what_counts_samples_and_what_counts_steps_are_traced_by_different_functions(model, fixed):
    """Keras's own step, which has one trace for a size, would weigh the losses of other data by
    what was traced for joined batches, or for data whose batches all have one size."""
    asked, beside = [], []

    def make_train_function(force):
        assert force
        model.train_function = lambda iterator: beside.append(len(next(iterator).values[0]))

    def original(iterator):
        asked.append(len(next(iterator).values[0]))

    model.make_train_function, model.train_function = make_train_function, original
    ran = []
    for last in [0] * fixed + [2]:
        train = MirroredTrainFunction(model, Runner())
        data = tf.data.Dataset.range(12 + last).batch(4, drop_remainder=not last)
        train(iter(model.distribute_strategy.experimental_distribute_dataset(data)))
        for size in (4, 8, 4):  # two batches may be joined
            train.run_plain(np.arange(size))
        assert model.train_function is train
        train.restore()
        ran.append((asked[:], beside[:]))
        asked.clear()
        beside.clear()
    assert ran == ([([4, 4], [8]), ([], [4, 8, 4])] if fixed else [([4, 8, 4], [])])
