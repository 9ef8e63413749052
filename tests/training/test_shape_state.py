"""Records of shapes: first calls tell nothing, and a larger batch of another kind tells nothing."""

import numpy as np
import pytest

from keras_remat.core.schedule import Usage
from keras_remat.training.decide import Phase
from keras_remat.training.shape_state import ShapeState, is_within, signature_of


def signature(*shapes, dtype="float32"):
    return signature_of([None if shape is None else np.zeros(shape, dtype) for shape in shapes])


@pytest.mark.parametrize(
    ("small", "large", "within"),
    [
        (signature((4, 8)), signature((4, 8)), True),
        (signature((3, 8)), signature((4, 8)), True),
        (signature((2, 16)), signature((4, 8)), False),
        (signature((3, 8), None), signature((4, 8), None), True),
        (signature((3, 8), (3,)), signature((4, 8), None), False),
        (signature((3, 8)), signature((4, 8), (4,)), False),
        (signature((3,)), signature((4, 8)), False),
        (signature((3, 8), dtype="float64"), signature((4, 8)), False),
    ],
)
def test_a_batch_is_within_another_one_of_its_kind(small, large, within):
    assert is_within(small, large) is within


def test_arrays_of_python_objects_have_a_signature():
    assert signature((4, 1), dtype=object)[0][:2] == ((4, 1), "object")


def test_the_first_call_of_a_step_tells_nothing():
    state = ShapeState(signature=(), batch_size=1, run=len, phase=Phase.PLAIN)
    state = state.after_step(Usage(100.0, 100), 7)
    assert (state.called, state.steps, state.peak_bytes) == (True, (), 0)
    for seconds, peak in ((1.0, 5), (3.0, 9), (2.0, 6)):
        state = state.after_step(Usage(seconds, peak), peak)
    assert state.measured == Usage(2.0, 9)
    assert state.resident_bytes == 9


def test_of_a_final_step_only_the_newest_call_is_kept():
    state = ShapeState(signature=(), batch_size=1, run=len, phase=Phase.FINAL, called=True)
    for peak in (5, 3):
        state = state.after_step(Usage(1.0, peak), 0)
    assert state.peak_bytes == 3
