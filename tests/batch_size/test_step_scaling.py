"""A step in slices at batch sizes that were never traced, and the largest of those that trains."""

from dataclasses import replace

import keras
import numpy as np
import pytest
from tight_limit import with_margin

import keras_remat
from keras_remat.backends.tensorflow import backend, private
from keras_remat.batch_size.scaling import batch_scaling
from keras_remat.batch_size.search import search_batch_size
from keras_remat.batch_size.step_scaling import (
    SlicedScaling,
    in_slices,
    scalings_below,
    searched_further,
    sliced_scaling,
)
from keras_remat.core.limit import Limit
from keras_remat.core.problem import Problem
from keras_remat.core.slices import Slicing
from keras_remat.errors import InvalidProblemError, UnsupportedModelError
from keras_remat.planning.slicing import in_micro_batches
from keras_remat.units import MIB

BACKEND = backend()


def head(vocabulary=1024, width=32, normal=True):
    """Its logits and their gradient are what a step needs."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((width,))
    rows = keras.layers.BatchNormalization()(inputs) if normal else inputs
    model = keras.Model(inputs, keras.layers.Dense(vocabulary)(rows))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    rng = np.random.default_rng(0)
    batch = rng.random((2048, width), "float32"), rng.integers(0, vocabulary, 2048)
    return model, batch


def costs_of(traced):
    return Problem(traced.graph, BACKEND.estimated_profile(traced))


def test_slices_at_another_size_are_those_of_a_trace_of_that_size():
    model, (x, y) = head()
    steps = {
        size: BACKEND.trace(model, BACKEND.example_batch(model, (x[:size], y[:size])))
        for size in (256, 384)
    }
    step = steps[256]
    sliced, _ = in_micro_batches(step, costs_of(step), 256, 4, BACKEND.estimated_profile)
    batch = BACKEND.example_batch(model, (x[:256], y[:256]))
    whole = batch_scaling(BACKEND, model, costs_of(step), batch)
    scaling = SlicedScaling(
        whole, step.slicer.rules, 256, sliced.slicing, step.slicer.granule_bytes
    )
    of_trace = in_slices(steps[384], sliced.slicing).graph
    assert scaling.at(384).graph.fingerprint == of_trace.fingerprint
    assert [v.nbytes for v in scaling.at(384).graph.values] == [v.nbytes for v in of_trace.values]
    with pytest.raises(InvalidProblemError, match="cannot run in 4 slices"):
        scaling.at(385)
    with pytest.raises(UnsupportedModelError, match="does not run in slices"):
        in_slices(step, Slicing((len(step.graph.ops) + 1,), 4))
    assert in_slices(step, None) is step


@pytest.mark.parametrize("wanted", [8, 16, 64])
def test_a_kernel_s_scratch_is_of_as_many_images_at_every_size_and_in_slices(wanted, monkeypatch):
    monkeypatch.setattr(private, "onednn_is_on", lambda: False)
    inputs = x = keras.Input((32, 32, 4))
    for filters in (8, 4):
        x = keras.layers.MaxPooling2D()(keras.layers.Conv2D(filters, 3)(x))
    model = keras.Model(inputs, x)
    model.compile("sgd", "mse", jit_compile=False)

    def of(size):
        data = np.zeros((size, 32, 32, 4), "float32"), np.zeros((size, *x.shape[1:]), "float32")
        batch = BACKEND.example_batch(model, data)
        return batch, BACKEND.trace(model, batch)

    batch, step = of(8)
    sliced, costs = in_micro_batches(step, costs_of(step), 8, 4, BACKEND.estimated_profile)
    scaling = sliced_scaling(BACKEND, model, sliced, costs, batch)
    traced = of(wanted)[1]
    asked = scaling.whole.at(wanted).profile.op_workspace_bytes
    expected = BACKEND.estimated_profile(traced).op_workspace_bytes
    assert asked == pytest.approx(expected, rel=0.05)
    told = in_slices(traced, sliced.slicing)
    expected = BACKEND.estimated_profile(told).op_workspace_bytes
    assert scaling.at(wanted).profile.op_workspace_bytes == pytest.approx(expected, rel=0.05)
    assert max(expected) > 10 * MIB


def test_a_size_that_whole_ops_do_not_reach_is_searched_in_slices():
    model, (x, y) = head()
    batch = BACKEND.example_batch(model, (x[:256], y[:256]))
    step = BACKEND.trace(model, batch)
    whole = batch_scaling(BACKEND, model, costs_of(step), batch)
    resident = whole.at(1024).profile.resident_bytes
    limit = Limit(resident + (whole.at(1024).floor_bytes - resident) * 7 // 10, 0.0)

    def search(scaling, share):
        parts = 1 if scaling.slicing is None else scaling.slicing.parts
        return search_batch_size(
            scaling, 256, limit, BACKEND, at_most=1024, time_limit_s=3 * share, multiple=parts
        )

    found = search(whole, 1.0)
    assert 256 <= found.max_batch_size < 1024
    in_slices = list(scalings_below(whole, step, 256, 1024, limit))
    scaling, further = searched_further(whole, found, in_slices, 1024, search)
    assert further.max_batch_size == 1024
    assert 256 % scaling.slicing.parts == 0
    assert scaling.whole is whole
    assert f"in {scaling.slicing.parts} slices" in str(further)
    reached = found.max_batch_size
    assert searched_further(whole, found, in_slices, reached, search) == (whole, found)
    assert list(scalings_below(whole, replace(step, slicer=None), 256, 1024, limit)) == []


def test_a_batch_below_the_floor_is_where_a_search_in_slices_begins():
    model, batch = head(normal=False)
    traced = BACKEND.trace(model, BACKEND.example_batch(model, batch))
    profile = BACKEND.estimated_profile(traced, BACKEND.device.in_use_bytes())
    floor = Problem(traced.graph, profile).floor_bytes
    limit = with_margin(profile.resident_bytes + (floor - profile.resident_bytes) // 2)
    weights = model.get_weights()
    found = keras_remat.find_max_batch_size(
        model, batch, limit, time_limit_s=1, compilation="ordered"
    )
    # whole ops stop at half of it; how far a search gets beyond depends on what an allocator that
    # others have used adds to sizes that run, and on the clock
    assert found.max_batch_size > 1024
    assert found.plan.measured is not None
    assert found.plan.slicing is not None
    assert found.max_batch_size % found.plan.slicing.parts == 0
    assert f"in {found.plan.slicing.parts} slices" in str(found)
    for before, after in zip(weights, model.get_weights(), strict=True):
        np.testing.assert_array_equal(before, after)
