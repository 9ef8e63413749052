"""Micro-batches, on the framework that Keras runs on: the gradient of the whole batch, for less
memory; refused where the sum would not be that."""

import keras
import numpy as np
import pytest
from jax_models import regression, weighted_samples
from keras import layers

import keras_remat
from keras_remat.backends.base import load_backend
from keras_remat.errors import UnsupportedModelError
from keras_remat.planning import slicing

SGD = keras.optimizers.SGD


def stepped(model, batch, count):
    """The trainable weights and logs after one step in ``count`` micro-batches."""
    backend = load_backend()
    batch = backend.example_batch(model, batch)
    traced = backend.trace(model, batch, count)
    problem = keras_remat.Problem(traced.graph, backend.estimated_profile(traced, 0))
    logs = backend.lower(traced, problem, keras_remat.Schedule.store_all(traced.graph))(batch)
    weights = [v.numpy() for v in model.trainable_variables]
    return weights, {key: float(value) for key, value in logs.items()}


@pytest.mark.parametrize(("samples", "count"), [(47, 5), (3, 5)])
def test_weights_and_metrics_are_those_of_the_whole_batch(samples, count):
    whole, logs = stepped(regression(), weighted_samples(samples), 1)
    cut, logs_of_pieces = stepped(regression(), weighted_samples(samples), count)
    for mine, theirs in zip(cut, whole, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)
    assert logs_of_pieces == pytest.approx(logs, rel=1e-5)


def test_rows_of_an_embedding_are_summed():
    def step(count):
        keras.utils.set_random_seed(0)
        embedding = layers.Embedding(9, 3)
        model = keras.Sequential(
            [keras.Input((4,), dtype="int32"), embedding, layers.Flatten(), layers.Dense(1)]
        )
        model.compile(SGD(0.5), "mse")
        batch = (np.arange(32).reshape(8, 4) % 9).astype("int32"), np.ones((8, 1), "float32")
        if count > 1:
            return stepped(model, batch, count)[0]
        model.train_on_batch(*batch)
        return model.get_weights()

    for mine, theirs in zip(step(4), step(1), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-7)


def assert_refused(model, batch, reason):
    batch = load_backend().example_batch(model, batch)
    with pytest.raises(UnsupportedModelError, match=reason):
        load_backend().trace(model, batch, 2)


def test_own_train_steps_and_sums_are_refused():
    class Own(keras.Model):
        def train_step(self, *arguments):
            return super().train_step(*arguments)

    inputs = layers.Input((16,))
    own = Own(inputs, layers.Dense(4)(inputs))
    own.compile("sgd", "mse")
    assert_refused(own, weighted_samples(8), "train_step of its own")
    model = regression()
    model.compile("sgd", keras.losses.MeanSquaredError(reduction="sum"))
    assert_refused(model, weighted_samples(8), "reduces by 'sum'")


@pytest.mark.parametrize("on_instance", [False, True])
def test_own_losses_are_refused(on_instance):
    """Whether they are means over the batch, only their author knows."""

    class Own(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return keras.ops.sum(keras.ops.square(y - y_pred))

    inputs = layers.Input((16,))
    model = (keras.Model if on_instance else Own)(inputs, layers.Dense(4)(inputs))
    model.compile("sgd")
    if on_instance:
        model.compute_loss = Own.compute_loss.__get__(model)
    assert_refused(model, weighted_samples(8), "compute_loss of its own")


def test_losses_that_are_no_means_over_the_batch_are_refused():
    inputs = layers.Input((6,))
    tokens = layers.Embedding(10, 4, mask_zero=True)(inputs)
    masked = keras.Model(inputs, layers.Dense(2)(tokens))
    masked.compile("sgd", "mse")
    assert_refused(masked, (np.ones((8, 6)), np.zeros((8, 6, 2))), "masked")
    outputs = keras.Sequential([layers.Dense(2, activity_regularizer="l2", name="sums")])
    nested = keras.Model(inputs, outputs(inputs))
    nested.compile("sgd", "mse")
    assert_refused(nested, (np.ones((8, 6)), np.zeros((8, 2))), "regularizer of 'sums'")


def contrastive(y_true, y_pred):
    """One number for every sample, of all samples of the batch."""
    return -keras.ops.log_softmax(y_pred @ keras.ops.transpose(y_true))[:, 0]


class Summed(keras.losses.Loss):
    def __call__(self, y_true, y_pred, sample_weight=None):
        return keras.ops.sum(keras.ops.square(y_true - y_pred))


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
        (contrastive, "compares the samples"),
        (Summed(), "__call__ of its own"),
    ],
)
def test_losses_that_turn_out_to_be_no_means_are_refused(loss, reason):
    """What the loss says of itself is its reduction, and that is the mean."""
    model = keras.Sequential([keras.Input((6,)), layers.Dense(3, activation="softmax")])
    model.compile("sgd", loss)
    ranks = 1 if reason == "does not mask" else 2
    assert_refused(model, (np.ones((8, 6), "float32"), np.ones((8, 3)[:ranks], "float32")), reason)
    assert keras.losses.MeanSquaredError()(np.ones((2, 3)), np.zeros((2, 3))) == 1.0


def differences(model, batch, count=2):
    backend = load_backend()
    return backend.trace(model, backend.example_batch(model, batch), count).differences


def test_what_sees_a_whole_batch_is_named():
    """Nothing is said of layers whose state rests, nor of metrics that are sums over samples."""

    def root_mean(y_true, y_pred):
        return keras.ops.sqrt(keras.ops.mean(keras.ops.square(y_true - y_pred)))

    def compiled(*inner, metrics=()):
        model = keras.Sequential([keras.Input((16,)), *inner, layers.Dense(4)])
        model.compile("sgd", "mse", metrics=list(metrics))
        return model

    resting = layers.BatchNormalization(trainable=False), layers.Normalization(mean=0, variance=1)
    rests = compiled(*resting, layers.Dropout(0.1), metrics=["mae", "mse"])
    assert differences(rests, weighted_samples(8)) == ()
    moving = layers.BatchNormalization(name="first"), layers.BatchNormalization()
    assert differences(compiled(*moving), weighted_samples(8), 1) == ()
    (said,) = differences(compiled(*moving), weighted_samples(8))
    assert "(first and 1 more) see one micro-batch" in said
    named = layers.BatchNormalization(name="spectral")
    if keras.backend.backend() != "torch":  # it differentiates through a branch
        named = layers.SpectralNormalization(layers.Dense(3), name="spectral")
    state, metric = differences(compiled(named, metrics=["mae", root_mean]), weighted_samples(8))
    assert "(spectral) see one micro-batch" in state
    assert "(root_mean) are the means" in metric
    assert np.isfinite(compiled(*moving).evaluate(*weighted_samples(8)[:2], verbose=0))


def test_metrics_of_several_outputs_outlive_a_refusal(monkeypatch):
    """A trace that ends midway leaves variables that it made without values."""
    monkeypatch.setattr(type(load_backend()), "runs_slices", False)
    inputs = layers.Input((6,))
    ends = [layers.Dense(3, activation="softmax", name=name)(inputs) for name in "pq"]
    model = keras.Model(inputs, ends)
    model.compile("sgd", ["mse", keras.losses.Dice()])
    x, y = np.ones((8, 6), "float32"), np.full((8, 3), 1 / 3, "float32")
    remat = keras_remat.RematAutotune("1GiB", "keep", micro_batches=2, verbose=0)
    with pytest.warns(UserWarning, match="goes on unmodified"):
        history = model.fit(x, (y, y), batch_size=4, epochs=2, verbose=0, callbacks=[remat]).history
    assert np.isfinite(history["loss"]).all()
    assert len(history["loss"]) == 2


def test_an_array_that_does_not_have_the_samples_is_not_cut():
    x, table = keras.Input((6,)), keras.Input((6,))
    added = layers.Lambda(lambda both: both[0] + keras.ops.mean(both[1], 0))([x, table])
    model = keras.Model([x, table], layers.Dense(1)(added))
    model.compile("sgd", "mse")
    arrays = (np.ones((8, 6), "float32"), np.ones((4, 6), "float32")), np.ones((8, 1), "float32")
    batch = keras.tree.map_structure(keras.ops.convert_to_tensor, arrays)
    with pytest.raises(UnsupportedModelError, match=r"shape \(4, 6\) does not have its 8 samples"):
        load_backend().trace(model, batch, 2)


@pytest.mark.parametrize("frozen", [False, True])
def test_fit_cuts_batches_of_a_model_that_is_not_built(frozen):
    """Its weights do not exist before it is traced, or there are none to train."""

    def fit(*callbacks):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([layers.Dense(4), layers.Dense(1)])
        model.trainable = not frozen
        model.compile(SGD(0.1), "mse")
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


def test_fit_trains_in_micro_batches_where_no_schedule_fits(monkeypatch):
    """The limit is below what one batch needs in one piece, and slices do not help; plain ``fit``
    gives the same losses. Where the pool has odd gaps, two micro-batches are over the limit, and
    four are trained after three tries: so there are many steps."""
    monkeypatch.setattr(slicing, "candidates", lambda *arguments: iter(()))
    x, y, _ = weighted_samples(8192)
    options = {"batch_size": 4096, "shuffle": False, "epochs": 8, "verbose": 0}
    expected = regression(256).fit(x, y, **options).history["loss"]
    model, backend = regression(256), load_backend()
    traced = backend.trace(model, backend.example_batch(model, (x[:4096], y[:4096])))
    profile = backend.estimated_profile(traced, backend.device.in_use_bytes())
    remat = keras_remat.RematAutotune(
        memory_limit=keras_remat.Problem(traced.graph, profile).floor_bytes - 2**19,
        margin=0.0,
        solver="greedy",
        solver_time_limit_s=1.0,
        profile_steps=1,
        verbose=0,
    )
    with pytest.warns(UserWarning, match="micro-batches"):
        history = model.fit(x, y, **options, callbacks=[remat]).history["loss"]
    assert history == pytest.approx(expected, rel=1e-4)
    assert remat.plan.measured.peak_bytes <= remat.report.limit_bytes
