"""Taking the place of Keras's train function, and giving it back; with a model and a runner that
only record."""

from types import SimpleNamespace

import pytest
from noting_runner import Runner

from keras_remat.backends.installed import Caller
from keras_remat.backends.jax.device import Device
from keras_remat.backends.jax.swap import InstalledTrainFunction


class StateRunner(Runner):
    """Trains a batch by adding it to the state; ``rest`` is what :meth:`finish` returns, once."""

    def __init__(self, device, **options):
        super().__init__(**options)
        self.device = device

    def run(self, batch):
        if self.error is not None and len(self.device.state) == 4:
            raise self.error
        self.device.state = (*self.device.state, int(batch))
        return f"logs {int(batch)}"

    def finish(self):
        rest, self.rest = self.rest, None
        if rest is not None:
            self.device.state = (*self.device.state, rest)
        return rest


def original(state, iterator):
    return "original", (*state, *iterator)


def installed(steps_per_execution=1, **options):
    device = Device()
    model = SimpleNamespace(train_function=original, steps_per_execution=steps_per_execution)
    return model, InstalledTrainFunction(model, StateRunner(device, **options), device), device


def test_state_goes_in_and_out_with_every_call():
    model, _, device = installed()
    data = iter([1, 2])
    assert model.train_function((), data) == ("logs 1", (1,))
    assert model.train_function((1,), data) == ("logs 2", (1, 2))
    assert device.state is None
    with pytest.raises(StopIteration):
        model.train_function((1, 2), data)


def test_rest_at_the_end_of_data_is_returned_with_its_state():
    model, function, _ = installed(rest="rest")
    data = iter([])
    assert model.train_function((1,), data) == ("rest", (1, "rest"))
    with pytest.raises(StopIteration):
        model.train_function((1, "rest"), data)
    assert model.train_function is function


def test_several_steps_a_call_and_a_short_last_one():
    model, *_ = installed(steps_per_execution=2)
    data = iter([1, 2, 3])
    assert model.train_function((), data) == ("logs 2", (1, 2))
    assert model.train_function((), data) == ("logs 3", (3,))


@pytest.mark.parametrize("error", [ValueError("step"), KeyboardInterrupt()])
def test_after_an_error_keras_knows_the_newest_state(error):
    """Of two steps in one call the second fails: what the first trained is not lost."""
    model, _, device = installed(steps_per_execution=2, error=error)
    with pytest.raises(type(error)):
        model.train_function(("weights", "seeds", "slots"), iter([1, 2]))
    assert model.train_function is original
    assert device.state is None
    assert tuple(model._jax_state.values()) == ("weights", "seeds", "slots", 1)
    assert not model._jax_state_synced


def test_call_of_a_later_fit_goes_to_the_original():
    model, *_ = installed(caller=Caller.NOBODY)
    assert model.train_function((0,), iter([1])) == ("original", (0, 1))
    assert model.train_function is original


def test_function_left_behind_is_replaced_not_wrapped():
    model, first, device = installed()
    second = InstalledTrainFunction(model, StateRunner(device), device)
    assert second.original is original
    first.restore()
    assert model.train_function is second, "restoring what was replaced meanwhile changes nothing"
    second.restore()
    second.restore()
    assert model.train_function is original


@pytest.mark.parametrize("caller", [Caller.LOOP, Caller.GUEST])
def test_train_on_batch_is_one_batch_and_its_state_is_returned(caller):
    model, function, device = installed(steps_per_execution=2, caller=caller, rest="rest")
    assert model.train_function((), iter([1])) == (f"{caller.value} logs 1", (1,))
    assert model.train_function is function
    assert device.state is None


def test_takes_its_place_again_and_knows_a_function_made_anew():
    model, function, _ = installed()
    assert not function.take_place()
    function.restore()
    assert not function.take_place()
    assert model.train_function is function
    model.train_function = other = lambda state, iterator: ("other", state)
    assert function.take_place()
    assert (model.train_function, function.original) == (function, other)
