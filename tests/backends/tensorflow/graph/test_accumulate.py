"""Micro-batches: the gradient of the whole batch, for less memory; refused where the sum would not
be that."""

import keras
import keras_models
import numpy as np
import pytest

import keras_remat
from keras_remat.backends.tensorflow import backend
from keras_remat.backends.tensorflow.graph.accumulate import accumulated_train_step
from keras_remat.errors import UnsupportedModelError
from keras_remat.units import MIB


def stepped(count, **options):
    """The trainable weights and logs after one SGD step of an MLP in ``count`` micro-batches, with
    sample weights."""
    model, (x, y) = keras_models.mlp(
        48, dropout=0.0, optimizer=keras.optimizers.SGD(0.5), **options
    )
    arrays = backend().example_batch(model, (x, y, np.linspace(0.5, 1.5, len(x), dtype="float32")))
    traced = backend().trace(model, arrays, count)
    problem = keras_remat.Problem(traced.graph, backend().estimated_profile(traced, 0))
    logs = backend().lower(traced, problem, keras_remat.Schedule.store_all(traced.graph))(arrays)
    return [v.numpy() for v in model.trainable_variables], {
        key: float(value) for key, value in logs.items()
    }


@pytest.mark.parametrize("count", [2, 5])
def test_weights_and_metrics_are_those_of_the_whole_batch(count):
    whole, logs = stepped(1)
    cut, logs_of_pieces = stepped(count)
    for mine, theirs in zip(cut, whole, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)
    assert logs_of_pieces == pytest.approx(logs, rel=1e-5)


def test_rows_of_an_embedding_are_summed():
    def step(count):
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [
                keras.Input((4,), dtype="int32"),
                keras.layers.Embedding(9, 3),
                keras.layers.Flatten(),
                keras.layers.Dense(1),
            ]
        )
        model.compile(keras.optimizers.SGD(0.5), "mse")
        x = np.arange(32).reshape(8, 4) % 9
        arrays = backend().example_batch(model, (x, np.ones((8, 1), "float32")))
        (model.train_step if count == 1 else accumulated_train_step(model, count))(arrays)
        return [v.numpy() for v in model.trainable_variables]

    for mine, theirs in zip(step(4), step(1), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-7)


def test_own_train_steps_and_sums_are_refused():
    model, _ = keras_models.vae(8)
    with pytest.raises(UnsupportedModelError, match="train_step of its own"):
        accumulated_train_step(model, 2)
    model, _ = keras_models.mlp(8, loss=keras.losses.MeanSquaredError(reduction="sum"))
    with pytest.raises(UnsupportedModelError, match="reduces by 'sum'"):
        accumulated_train_step(model, 2)


def test_losses_that_are_no_means_over_the_batch_are_refused():
    inputs = keras.Input((6,))
    tokens = keras.layers.Embedding(10, 4, mask_zero=True)(inputs)
    masked = keras.Model(inputs, keras.layers.Dense(2)(tokens))
    masked.compile("sgd", "mse")
    batch = backend().example_batch(masked, (np.ones((8, 6)), np.zeros((8, 6, 2))))
    with pytest.raises(UnsupportedModelError, match="masked"):
        backend().trace(masked, batch, 2)
    outputs = keras.Sequential([keras.layers.Dense(2, activity_regularizer="l2", name="sums")])
    nested = keras.Model(inputs, outputs(inputs))
    nested.compile("sgd", "mse")
    with pytest.raises(UnsupportedModelError, match="regularizer of 'sums'"):
        accumulated_train_step(nested, 2)


def test_fit_trains_in_micro_batches_where_no_schedule_fits():
    """The limit is below what one sample batch needs in one piece; plain ``fit`` gives the same
    losses."""
    plain = keras_models.mlp(4096, width=512, blocks=2, dropout=0.0)
    expected = (
        plain[0].fit(*plain[1], batch_size=2048, shuffle=False, epochs=6, verbose=0).history["loss"]
    )
    model, data = keras_models.mlp(4096, width=512, blocks=2, dropout=0.0)
    arrays = backend().example_batch(model, tuple(part[:2048] for part in data))
    traced = backend().trace(model, arrays)
    problem = keras_remat.Problem(
        traced.graph, backend().estimated_profile(traced, backend().device.in_use_bytes())
    )
    remat = keras_remat.RematAutotune(
        memory_limit=problem.floor_bytes - MIB,
        margin=0.0,
        solver="greedy",
        solver_time_limit_s=5.0,
        profile_steps=1,
        verbose=0,
    )
    with pytest.warns(UserWarning, match="micro-batches"):
        history = model.fit(
            *data, batch_size=2048, shuffle=False, epochs=6, verbose=0, callbacks=[remat]
        ).history["loss"]
    assert history == pytest.approx(expected, rel=1e-4)
    assert remat.plan.measured.peak_bytes <= remat.report.limit_bytes
