"""Steps in slices on PyTorch compute what whole ones do, in less memory."""

from random import Random

import jax_models
import keras
import numpy as np
import pytest
import torch
import torch_kinds as kinds
import torch_models as models
from keras import layers
from random_schedules import random_schedule

import keras_remat
from keras_remat.backends.torch import backend
from keras_remat.backends.torch.variables import places_of
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate
from keras_remat.core.slices import Slicing
from keras_remat.core.validate import validate
from keras_remat.errors import InfeasibleBudgetError

SAMPLES = 16


def head(samples=SAMPLES):
    """A language model of which all is small but the logits, and a batch of its texts."""
    return jax_models.head(16384, samples, metrics=["accuracy"])


def convnet():
    """Convolutions with batch normalization, pooling and dropout, and a batch of 10 images."""
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((12, 12, 3))
    for filters in (6, 8):
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        x = layers.MaxPooling2D()(layers.ReLU()(layers.BatchNormalization()(x)))
    x = layers.DepthwiseConv2D(3, strides=2, padding="same")(x)
    x = layers.Dropout(0.3)(layers.GlobalAveragePooling2D()(x))
    model = keras.Model(inputs, layers.Dense(3, "softmax")(x))
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
    rng = np.random.default_rng(0)
    images = rng.random((10, 12, 12, 3), dtype="float32")
    return model, (images, rng.integers(0, 3, 10).astype("int32"))


def traced(model, batch, on=None):
    on = on or backend()
    return on.trace(model, on.example_batch(model, batch))


def state(model):
    return [place.tensor.detach().clone() for place in places_of(model).own]


def sliced_along_batch(step, samples, parts=2):
    """The step with all ops in slices that can run so along the batch."""
    rules = step.slicer.rules
    able = (i for i, rule in rules.items() if rule.divides % samples == 0)
    return step.slicer.sliced(Slicing(tuple(sorted(able)), parts))


def outcome(on, step, schedule, model, batch):
    """What one step returns, and what it leaves; the model is put back."""
    torch.manual_seed(3)
    problem = Problem(step.graph, on.estimated_profile(step, on.device.in_use_bytes()))
    validate(problem, schedule)
    put_back, run = on.snapshot(model), on.lower(step, problem, schedule)
    logs, usage = on.measure(lambda: run(batch))
    left = state(model)
    put_back()
    return logs, left, usage.peak_bytes, simulate(problem, schedule).peak_bytes


#: What has rules of its own: a head, images, attention, loops, gradients of views, noise, pools.
BUILT = {
    "head": head, "images": convnet, "attention": models.attention,
    **{
        name: kinds.EQUAL[name]
        for name in (
            "masked GRU", "turned", "updated slices", "group norms", "pools", "resized", "noisy",
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("name", BUILT)
def test_a_step_in_slices_is_the_whole_step_up_to_the_order_of_sums(name):
    """In an order in which ops run again, too."""
    model, batch = BUILT[name]()
    on = backend()
    batch = on.example_batch(model, batch)
    step = traced(model, batch, on)
    sliced = sliced_along_batch(step, len(batch[0]))
    assert len(sliced.whole.sliced.slicing.ops) > 25
    often = 2 / len(sliced.graph.ops)
    again = random_schedule(Random(0), sliced.graph, recompute=often)
    first = state(model)
    expected, theirs, _, _ = outcome(on, step, Schedule.store_all(step.graph), model, batch)
    logs, ours, _, _ = outcome(on, sliced, again, model, batch)
    for key in expected:
        np.testing.assert_allclose(logs[key], expected[key], rtol=1e-5)
    for mine, other, before in zip(ours, theirs, first, strict=True):
        if not other.is_floating_point():
            assert torch.equal(mine, other)
        elif other.numel():
            changed = float((other - before).abs().max())
            bound = 1e-4 * changed + 3e-7 * max(1.0, float(other.abs().max()))
            np.testing.assert_allclose(mine, other, rtol=0, atol=bound)


def test_operators_along_the_axes_of_a_single_number_stay_whole():
    """PyTorch lets a number be sorted, or summed, along its first axis."""

    def scaled(x):
        if x.device.type == "meta":
            return x
        total = x.detach().sum()
        return x * torch.softmax(total, 0) * torch.cumsum(total, 0) * torch.sum(total, 0)

    model, batch = kinds.of(scaled)()
    step = traced(model, batch)
    sliced = sliced_along_batch(step, len(batch[0]))
    assert len(sliced.whole.sliced.slicing.ops) > 5


def test_slices_take_the_bytes_that_are_simulated():
    """A quarter of the logits at a time; nothing is held behind the graph's back."""
    model, batch = head()
    on = backend()
    batch = on.example_batch(model, batch)
    step = traced(model, batch, on)
    sliced, resident = sliced_along_batch(step, SAMPLES, 4), on.device.in_use_bytes()
    _, _, whole, _ = outcome(on, step, Schedule.store_all(step.graph), model, batch)
    _, _, took, simulated = outcome(on, sliced, Schedule.store_all(sliced.graph), model, batch)
    assert took - resident == pytest.approx(simulated - resident, rel=0.01)
    assert took - resident < 0.35 * (whole - resident)


def below_the_floor(model, batch, share):
    """A limit that leaves ``share`` of what the step's largest op needs beside what is resident."""
    on = backend()
    step = traced(model, batch, on)
    problem = Problem(step.graph, on.estimated_profile(step, on.device.in_use_bytes()))
    resident = problem.profile.resident_bytes
    return int(resident + share * (problem.floor_bytes - resident)), problem.floor_bytes


def test_plans_and_searches_go_below_the_floor():
    """And what is refused names the op that needs too much in slices."""
    limit, floor = below_the_floor(*head(), 0.4)
    model, batch = head()
    plan = keras_remat.make_plan(model, batch, limit, margin=0.0, solver="greedy")
    assert plan.slicing is not None
    assert plan.predicted.peak_bytes <= limit < floor
    found = keras_remat.find_max_batch_size(model, batch, limit, margin=0.0, time_limit_s=4)
    assert found.plan.slicing is not None
    assert found.max_batch_size % found.plan.slicing.parts == 0
    assert found.max_batch_size >= SAMPLES
    least, _ = below_the_floor(model, batch, 0.01)
    with pytest.raises(InfeasibleBudgetError, match="slice_"):
        keras_remat.make_plan(model, batch, least, margin=0.0)
