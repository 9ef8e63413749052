"""Micro-batches: the gradient of the whole batch, for less memory; refused where the sum would not
be that."""

import keras
import keras_models
import numpy as np
import pytest
import tensorflow as tf

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


IGNORED = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (IGNORED, "does not mask"),
        (lambda y, p: keras.losses.sparse_categorical_crossentropy(y, p, True, 0), "does not mask"),
        (keras.losses.Circle(), "does not mask"),
        (keras.losses.Dice(), r"shape \(\)"),
        (keras.losses.Dice(axis=0), r"shape \(3,\)"),
        ("tversky", r"shape \(\)"),
        (lambda y, p: keras.ops.sum(keras.ops.square(y - p)), r"shape \(\)"),
    ],
)
def test_losses_that_turn_out_to_be_no_means_are_refused(loss, reason):
    """What the loss says of itself is its reduction, and that is the mean."""
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, activation="softmax")])
    model.compile("sgd", loss)
    ranks = 1 if reason == "does not mask" else 2
    y = np.ones((8, 3)[:ranks], "float32")
    batch = backend().example_batch(model, (np.ones((8, 6), "float32"), y))
    with pytest.raises(UnsupportedModelError, match=reason):
        backend().trace(model, batch, 2)
    assert keras.losses.MeanSquaredError()(np.ones((2, 3)), np.zeros((2, 3))) == 1.0


def test_an_array_that_does_not_have_the_samples_is_not_cut():
    x, table = keras.Input((6,)), keras.Input((6,))
    added = keras.layers.Lambda(lambda both: both[0] + keras.ops.mean(both[1], 0))([x, table])
    model = keras.Model([x, table], keras.layers.Dense(1)(added))
    model.compile("sgd", "mse")
    arrays = (np.ones((8, 6), "float32"), np.ones((4, 6), "float32")), np.ones((8, 1), "float32")
    with pytest.raises(UnsupportedModelError, match=r"shape \(4, 6\) does not have its 8 samples"):
        backend().trace(model, tf.nest.map_structure(tf.constant, arrays), 2)


@pytest.mark.parametrize("frozen", [False, True])
def test_fit_cuts_batches_of_a_model_that_is_not_built(frozen):
    """Its weights do not exist before it is traced, or there are none to train."""

    def fit(*callbacks):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(1)])
        model.trainable = not frozen
        model.compile(keras.optimizers.SGD(0.1), "mse")
        x = np.linspace(-1, 1, 96, dtype="float32").reshape(16, 6)
        history = model.fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0, shuffle=False,
                            callbacks=list(callbacks)).history  # fmt: skip
        return history["loss"], model.get_weights()

    remat = keras_remat.RematAutotune(
        "1GiB", "keep", micro_batches=2, solver="greedy", profile_steps=1, verbose=0
    )
    losses, weights = fit()
    ours, our_weights = fit(remat)
    assert remat.plan is not None
    assert ours == pytest.approx(losses, rel=1e-4)
    for mine, theirs in zip(our_weights, weights, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)


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
