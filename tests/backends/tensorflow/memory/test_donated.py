"""Which values are left alone for good after a launch that failed."""

import sys

import numpy as np
import pytest
import tensorflow as tf

from keras_remat.backends.tensorflow.memory import donated
from keras_remat.units import KIB, MIB


def variables(*kib):
    return [tf.Variable(np.zeros(KIB * k // 4, np.float32)) for k in kib]


def abandoned(of, updated, missing_bytes, monkeypatch):
    """The positions of the variables whose values are kept for good."""
    kept = []
    monkeypatch.setattr(donated, "keep_for_ever", lambda value: kept.append(value.shape))
    donated.abandon_donated(of, {id(v) for v in updated}, missing_bytes)
    return [i for i, v in enumerate(of) if v.shape in kept]


def test_updated_variables_and_small_ones_were_donated(monkeypatch):
    of = variables(8 * KIB, 4 * KIB, 16)  # weights, frozen weights, moving averages
    assert abandoned(of, of[:1], 8 * MIB, monkeypatch) == [0, 2]


def test_others_were_where_more_is_missing_than_the_updated_ones_hold(monkeypatch):
    of = variables(8 * KIB, 4 * KIB, 16)
    assert abandoned(of, of[:1], 12 * MIB, monkeypatch) == [0, 1, 2]


def test_large_variables_are_there_where_nothing_is_missing(monkeypatch):
    of = variables(65 * KIB)
    assert abandoned(of, of, 0, monkeypatch) == []
    assert abandoned(of, of, 65 * MIB, monkeypatch) == [0]


def test_a_value_kept_for_ever_outlives_its_variable():
    value = tf.zeros([3])
    before = sys.getrefcount(value)
    donated.keep_for_ever(value)
    assert sys.getrefcount(value) == before + 1


@pytest.mark.parametrize("missing_bytes", [-MIB, 0])
def test_few_bytes_are_abandoned_where_other_memory_hides_the_truth(missing_bytes, monkeypatch):
    of = variables(512)
    assert abandoned(of, of, missing_bytes, monkeypatch) == [0]
