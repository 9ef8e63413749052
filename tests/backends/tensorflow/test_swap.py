"""Taking the place of Keras's train function, and giving it back; with a model and a runner that
only record."""

from types import SimpleNamespace

import pytest
import tensorflow as tf
from noting_runner import Runner

from keras_remat.backends.installed import Caller
from keras_remat.backends.tensorflow.swap import InstalledTrainFunction


def original(iterator):
    return ["original", *iterator]


def installed(runner, steps_per_execution=1):
    model = SimpleNamespace(train_function=original, steps_per_execution=steps_per_execution)
    return model, InstalledTrainFunction(model, runner)


def test_every_call_takes_one_batch():
    runner = Runner()
    model, function = installed(runner)
    assert model.train_function is function
    data = iter("abc")
    assert [model.train_function(data) for _ in range(2)] == ["logs a", "logs b"]
    assert runner.ran == ["a", "b"]
    assert next(data) == "c"
    assert runner.finished == 0


def test_steps_per_execution_batches_a_call_and_a_short_last_one():
    runner = Runner()
    model, _ = installed(runner, steps_per_execution=2)
    data = iter("abc")
    assert model.train_function(data) == "logs b"
    assert model.train_function(data) == "logs c"
    assert runner.finished == 1
    with pytest.raises(StopIteration):
        model.train_function(data)
    assert runner.ran == list("abc")


def test_end_of_data_trains_the_rest_and_lets_keras_see_the_end():
    runner = Runner(rest="rest")
    model, function = installed(runner)
    with pytest.raises(StopIteration):
        model.train_function(iter(""))
    assert runner.finished == 1
    assert model.train_function is function, "the end of an epoch is no failure"


def test_rest_trained_in_a_short_call_gives_its_logs():
    model, _ = installed(Runner(rest="rest"), steps_per_execution=3)
    assert model.train_function(iter("ab")) == "rest"


def test_end_of_a_tf_dataset_is_no_failure_either():
    model, function = installed(Runner(error=tf.errors.OutOfRangeError(None, None, "end")))
    with pytest.raises(tf.errors.OutOfRangeError):
        model.train_function(iter("a"))
    assert model.train_function is function


@pytest.mark.parametrize(("rest", "logs"), [(None, "logs b"), ("rest", "rest")])
def test_last_call_of_an_epoch_trains_the_rest(rest, logs):
    runner = Runner(rest=rest, last_at=2)
    model, _ = installed(runner)
    data = iter("ab")
    assert model.train_function(data) == "logs a"
    assert runner.finished == 0
    assert model.train_function(data) == logs
    assert runner.finished == 1


@pytest.mark.parametrize(
    "error",
    [
        ValueError("step"),
        KeyboardInterrupt(),
        tf.errors.ResourceExhaustedError(None, None, "memory"),
    ],
)
def test_what_a_step_raises_passes_through_and_the_original_is_back(error):
    model, _ = installed(Runner(error=error))
    with pytest.raises(type(error)):
        model.train_function(iter("a"))
    assert model.train_function is original


def test_error_of_the_iterator_gives_the_original_back():
    def broken():
        raise OSError("disk")
        yield

    model, _ = installed(Runner())
    with pytest.raises(OSError, match="disk"):
        model.train_function(broken())
    assert model.train_function is original


def test_call_of_a_later_fit_goes_to_the_original():
    runner = Runner(caller=Caller.NOBODY)
    model, function = installed(runner)
    assert model.train_function(iter("ab")) == ["original", "a", "b"]
    assert runner.ran == []
    assert model.train_function is original
    assert function(iter("c")) == ["original", "c"]
    assert runner.stopped


def test_a_fit_inside_of_fit_is_the_originals_and_ends_nothing():
    runner = Runner(caller=Caller.INNER)
    model, function = installed(runner)
    assert model.train_function(iter("ab")) == ["original", "a", "b"]
    assert model.train_function is function
    assert not hasattr(runner, "stopped")


def test_plain_run_is_the_originals_with_one_batch():
    _, function = installed(Runner())
    assert function.run_plain("a") == ["original", "a"]


def test_function_left_behind_is_replaced_not_wrapped():
    model, first = installed(Runner())
    second = InstalledTrainFunction(model, Runner())
    assert second.original is original
    assert model.train_function is second
    first.restore()
    assert model.train_function is second, "restoring what was replaced meanwhile changes nothing"
    second.restore()
    second.restore()
    assert model.train_function is original


def test_empty_optionals_become_none():
    runner = Runner()
    model, _ = installed(runner)
    x = tf.ones((2, 3))
    model.train_function(
        iter([({"a": x}, tf.experimental.Optional.empty(tf.TensorSpec(())), None)])
    )
    ((inputs, targets, weights),) = runner.ran
    assert inputs["a"] is x
    assert targets is None
    assert weights is None


def test_what_an_iterator_promises_tells_where_parts_are_missing():
    runner = Runner()
    model, _ = installed(runner)
    x, nothing = tf.ones((2, 3)), tf.experimental.Optional.empty(tf.TensorSpec(()))
    lacks, whole = tf.data.Dataset.from_tensors((x, nothing)), tf.data.Dataset.from_tensors((x, x))
    for data in (lacks, whole, lacks):
        model.train_function(iter(data))
    assert [targets is None for _, targets in runner.ran] == [True, False, True]


@pytest.mark.parametrize("caller", [Caller.LOOP, Caller.GUEST])
def test_train_on_batch_is_one_batch_and_ends_nothing(caller):
    runner = Runner(rest="rest", caller=caller)
    model, function = installed(runner, steps_per_execution=2)
    assert model.train_function(iter("a")) == f"{caller.value} logs a"
    assert runner.finished == 0
    assert model.train_function is function


def test_takes_its_place_again_and_knows_a_function_made_anew():
    model, function = installed(Runner())
    assert not function.take_place()
    function.restore()
    assert not function.take_place()
    assert model.train_function is function
    model.train_function = other = lambda iterator: ["other", *iterator]
    assert function.take_place()
    assert (model.train_function, function.original) == (function, other)
