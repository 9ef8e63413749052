"""The learning rate is scaled while a step runs, and the user's own before and after it."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import keras
import pytest

from keras_remat.training.learning_rate import LearningRateScaling


def scaling(rule, rate=0.5):
    optimizer = keras.optimizers.SGD(rate)
    model = SimpleNamespace(optimizer=optimizer)
    return LearningRateScaling(model, rule, nullcontext), optimizer


def rate_of(optimizer):
    return float(keras.ops.convert_to_numpy(optimizer.learning_rate))


@pytest.mark.parametrize(("rule", "factor"), [(None, 1.0), ("linear", 4.0), ("sqrt", 2.0)])
def test_factor_follows_the_rule(rule, factor):
    assert scaling(rule)[0].factor(64, 16) == factor


def test_rate_is_scaled_during_the_step_only():
    scaled, optimizer = scaling("linear")
    with scaled.during(3.0):
        assert rate_of(optimizer) == 1.5
    assert rate_of(optimizer) == 0.5


def test_all_optimizers_of_a_model_are_scaled():
    """As of a GAN, which has two as attributes; Keras gives it a third that updates nothing."""
    scaled, compiled = scaling("linear")
    generators, discriminators = keras.optimizers.SGD(0.25), keras.optimizers.SGD(1.0)
    vars(scaled._model).update(generators=generators, discriminators=discriminators, again=compiled)
    optimizers = (compiled, generators, discriminators)
    with scaled.during(2.0):
        assert [rate_of(one) for one in optimizers] == [1.0, 0.5, 2.0]
    assert [rate_of(one) for one in optimizers] == [0.5, 0.25, 1.0]


def test_rate_is_the_users_after_an_interrupt():
    scaled, optimizer = scaling("linear")
    with pytest.raises(KeyboardInterrupt), scaled.during(3.0):
        raise KeyboardInterrupt
    assert rate_of(optimizer) == 0.5


def test_a_factor_of_one_touches_nothing():
    model = SimpleNamespace()  # without an optimizer
    with LearningRateScaling(model, "linear", nullcontext).during(1.0):
        pass


def test_a_schedule_is_left_alone_with_one_warning():
    scaled, _ = scaling("linear", keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9))
    with pytest.warns(UserWarning, match="not scaled"), scaled.during(2.0):
        pass
    assert scaled.factor(64, 16) == 1.0, "not again"


def test_a_schedule_is_asked_while_its_variables_have_their_values():
    """JAX takes the number of updates away from the optimizer while ``fit`` runs."""
    reading = []

    class Optimizer(keras.optimizers.SGD):
        @property
        def learning_rate(self):
            assert reading, "deleted"
            return 0.5

    @contextmanager
    def variables():
        reading.append(True)
        yield
        reading.clear()

    scaled = LearningRateScaling(SimpleNamespace(optimizer=Optimizer()), "linear", variables)
    with pytest.warns(UserWarning, match="not scaled"), scaled.during(2.0):
        pass


def test_what_is_said_of_a_schedule_before_the_first_step_is_true():
    scaled, _ = scaling("linear", keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9))
    with pytest.warns(UserWarning, match="not scaled"):
        scaled.leave_schedule_alone()
    assert scaled.factor(64, 16) == 1.0
    constant, _ = scaling("linear")
    constant.leave_schedule_alone()
    assert constant.factor(64, 16) == 4.0
