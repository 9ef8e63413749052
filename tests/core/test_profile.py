"""Costs that make no sense are refused with field and value."""

import math

import numpy as np
import pytest

from keras_remat.core.profile import Profile
from keras_remat.errors import InvalidProblemError


@pytest.mark.parametrize(
    "seconds",
    [-1.0, -1e-300, math.nan, math.inf, -math.inf, True, None, "1", 10**400, np.float32(1)],
)
def test_times_are_finite_floats_of_at_least_zero(seconds):
    with pytest.raises(InvalidProblemError) as caught:
        Profile((0.0, seconds), (0, 0), 0)
    assert caught.value.field == "ops[1].time_s"
    assert caught.value.value is seconds


@pytest.mark.parametrize("nbytes", [-1, 1.0, True, None, "1", np.int64(1)])
def test_workspace_is_an_int_of_at_least_zero(nbytes):
    with pytest.raises(InvalidProblemError) as caught:
        Profile((0.0, 0.0), (0, nbytes), 0)
    assert caught.value.field == "ops[1].workspace_bytes"
    assert repr(nbytes) in str(caught.value)


@pytest.mark.parametrize("nbytes", [-1, 1.0, False, None, "1"])
def test_resident_bytes_is_an_int_of_at_least_zero(nbytes):
    with pytest.raises(InvalidProblemError) as caught:
        Profile((), (), nbytes)
    assert caught.value.field == "resident_bytes"
    assert repr(nbytes) in str(caught.value)


def test_lists_of_different_length():
    with pytest.raises(InvalidProblemError, match="2 times but 1 workspaces"):
        Profile((0.0, 0.0), (0,), 0)


def test_source_is_measured_or_estimated():
    assert Profile((), (), 0, source="estimated").source == "estimated"
    with pytest.raises(InvalidProblemError, match="guessed") as caught:
        Profile((), (), 0, source="guessed")
    assert caught.value.field == "source"


def test_lists_become_tuples_and_times_become_floats():
    profile = Profile([1, np.float64(2.5)], [3, 4], 5)
    assert profile == Profile((1.0, 2.5), (3, 4), 5)
    assert [type(t) for t in profile.op_time_s] == [float, float]
    assert hash(profile) == hash(Profile((1.0, 2.5), (3, 4), 5))
