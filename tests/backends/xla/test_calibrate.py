import pytest

from keras_remat.backends.xla.calibrate import FIRST_RATIO, Calibration


def test_before_anything_was_compiled():
    assert Calibration().predict(1000, 2000) == int(1000 * FIRST_RATIO)


@pytest.mark.parametrize(
    ("simulated", "ratio"), [(100, 1.6), (400, 1.6), (600, 1.4), (800, 1.2), (1000, 1.2)]
)
def test_in_between_on_the_line_outside_as_the_nearest(simulated, ratio):
    calibration = Calibration()
    calibration.learn(800, 1000, 960)
    calibration.learn(400, 1000, 640)
    assert calibration.predict(simulated, 1000) == pytest.approx(simulated * ratio, abs=1)


def test_what_was_compiled_is_predicted_at_any_batch_size():
    calibration = Calibration()
    calibration.learn(300, 1000, 450)
    assert calibration.predict(300, 1000) == 450
    assert calibration.predict(3000, 10000) == 4500


def test_a_step_without_activations_teaches_nothing():
    calibration = Calibration()
    calibration.learn(0, 0, 10)
    assert calibration.predict(0, 0) == 0
