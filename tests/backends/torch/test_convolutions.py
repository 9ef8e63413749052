"""What convolutions take on a CPU beside their results, predicted by shape and measured."""

import keras
import numpy as np
import pytest
import torch
from keras import layers

import keras_remat
from keras_remat.backends.base import load_backend
from keras_remat.batch_size.scaling import batch_scaling
from keras_remat.batch_size.step_scaling import SlicedScaling, in_slices
from keras_remat.planning.slicing import in_micro_batches

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="PyTorch lacks oneDNN"
)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _first_step(shape, samples, build):
    """A model's profile by shapes, and the peak of its first step, predicted and measured."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input(shape)
    model = keras.Model(inputs, layers.Dense(3, "softmax")(build(inputs)))
    model.compile("sgd", "sparse_categorical_crossentropy")
    on = load_backend()
    batch = np.ones((samples, *shape), "float32"), np.zeros(samples, "int32")
    data = on.example_batch(model, batch)
    traced = on.trace(model, data)
    profile = on.estimated_profile(traced, on.device.in_use_bytes())
    problem = keras_remat.Problem(traced.graph, profile)
    order = keras_remat.Schedule.store_all(traced.graph)
    run = on.lower(traced, problem, order)
    _, usage = on.measure(lambda: run(data))
    return profile, keras_remat.simulate(problem, order).peak_bytes, usage.peak_bytes


def _small_images(x):
    for _ in range(2):
        x = layers.Conv2D(96, 3, padding="same", activation="relu")(x)
    return layers.GlobalAveragePooling2D()(layers.Conv2D(96, 1)(x))


@pytest.mark.parametrize("samples", [2, 16])
def test_a_first_prediction_counts_the_copies_of_weights(samples):
    """On small images that is most of what they take, however many they are."""
    profile, predicted, measured = _first_step((6, 6, 96), samples, _small_images)
    assert measured == pytest.approx(predicted, rel=0.001)
    kernel = 4 * 3 * 3 * 96 * 96
    ones = 4 * 96 * 96 * (samples >= 16)  # 1x1 kernels are oneDNN's from there on
    assert sum(profile.op_workspace_bytes) == 2 * (kernel + 2 * kernel) + ones + 2 * ones


def _series(x):
    for filters in (64, 64, 96):
        x = layers.Conv1D(filters, 5, padding="same", activation="relu")(x)
    return layers.GlobalAveragePooling1D()(x)


def _enlarged(x):
    for filters in (64, 20):
        x = layers.Conv2DTranspose(filters, 4, strides=2, padding="same")(x)
    return layers.GlobalAveragePooling2D()(x)


def _channels_first(x):
    first = {"data_format": "channels_first", "padding": "same"}
    for filters, strides in (20, 1), (48, 2), (32, 1):
        x = layers.Conv2D(filters, 3, strides, **first)(x)
    return layers.GlobalAveragePooling2D(data_format="channels_first")(x)


def _volumes(x):
    for filters in (16, 8):
        x = layers.Conv3D(filters, 3, padding="same")(x)
    return layers.GlobalAveragePooling3D()(x)


@pytest.mark.parametrize(
    ("build", "shape", "samples"),
    [
        (_series, (64, 16), 1),
        (_series, (64, 16), 8),
        (_enlarged, (4, 4, 64), 4),
        (_channels_first, (3, 17, 17), 4),
        (_volumes, (8, 8, 8, 4), 1),
        (_small_images, (6, 6, 96), 1),
    ],
)
def test_a_first_prediction_counts_the_copies_of_images(build, shape, samples):
    """They are made where channels lie first, and of patches where there is one small image."""
    profile, predicted, measured = _first_step(shape, samples, build)
    assert measured == pytest.approx(predicted, rel=0.03)
    assert max(profile.op_workspace_bytes) > 0.04 * measured, "it matters"


def test_a_search_expects_kernels_that_begin_at_a_larger_batch():
    """Two and four samples of 1x1 convolutions need no copies of weights; sixteen do."""
    inputs = keras.Input((8, 8, 64))
    model = keras.Model(inputs, layers.Conv2D(64, 1, padding="same")(layers.Conv2D(64, 1)(inputs)))
    model.compile("sgd", "mse")
    on = load_backend()

    def of(samples):
        batch = on.example_batch(model, (np.ones((samples, 8, 8, 64), "float32"),) * 2)
        return batch, on.trace(model, batch)

    batch, step = of(2)
    problem = keras_remat.Problem(step.graph, on.estimated_profile(step, 0))
    scaling = batch_scaling(on, model, problem, batch, traced=step)
    asked = {n: scaling.at(n).profile.op_workspace_bytes for n in (2, 15, 16, 31, 64)}
    expected = {n: on.estimated_profile(of(n)[1], 0).op_workspace_bytes for n in asked}
    assert asked == expected
    assert sum(expected[15]) == 0 < sum(expected[16]) == sum(expected[64])
    sliced, _ = in_micro_batches(step, problem, 2, 2, on.estimated_profile)
    parts = SlicedScaling(scaling, step.slicer.rules, 2, sliced.slicing, step.slicer.granule_bytes)
    expected = on.estimated_profile(in_slices(of(32)[1], sliced.slicing), 0).op_workspace_bytes
    assert parts.at(32).profile.op_workspace_bytes == expected
    assert sum(expected) > 0


@pytest.mark.parametrize("build", [_enlarged, _channels_first])
def test_a_part_of_a_batch_needs_what_a_step_of_as_many_samples_needs(build):
    """A forward part is written into the whole result; only its own share of that is copied."""
    inputs = keras.Input((17, 17, 3) if build is _enlarged else (3, 17, 17))
    model = keras.Model(inputs, layers.Dense(3, "softmax")(build(inputs)))
    model.compile("sgd", "sparse_categorical_crossentropy")
    on = load_backend()

    def of(samples):
        data = np.ones((samples, *inputs.shape[1:]), "float32"), np.zeros(samples, "int32")
        step = on.trace(model, on.example_batch(model, data))
        return step, keras_remat.Problem(step.graph, on.estimated_profile(step, 0))

    (whole, costs), (_, alone) = of(64), of(16)
    sliced, of_parts = in_micro_batches(whole, costs, 64, 4, on.estimated_profile)
    forward = "convolution.default"
    expected = [
        alone.profile.op_workspace_bytes[op.id] for op in alone.graph.ops if op.kind == forward
    ]
    parts = {
        op.name.rsplit("/", 1)[0]: of_parts.profile.op_workspace_bytes[op.id]
        for op in of_parts.graph.ops
        if op.kind == forward
    }
    assert len(sliced.graph.ops) > len(whole.graph.ops)
    assert list(parts.values()) == expected
    assert max(expected) > 0
