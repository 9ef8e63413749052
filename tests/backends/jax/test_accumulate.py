"""Micro-batches: the gradient of the whole batch, for less memory; refused where the sum would not
be that."""

import jax
import jax.numpy as jnp
import jax_models as models
import keras
import numpy as np
import pytest
from keras import layers

import keras_remat
from keras_remat.backends.jax import backend
from keras_remat.backends.jax.accumulate import accumulated_train_step
from keras_remat.backends.jax.lower import lower, lower_plain
from keras_remat.backends.jax.measure import copy_state, memory
from keras_remat.backends.jax.private import build, state_values
from keras_remat.backends.jax.trace import as_specs, trace
from keras_remat.core.schedule import Schedule
from keras_remat.errors import UnsupportedModelError


def dense(width=32, dropout=0.0):
    """A regression; its loss is a mean."""
    keras.utils.set_random_seed(0)
    inputs = x = layers.Input((16,))
    for _ in range(3):
        x = layers.Dense(width, activation="tanh")(x)
        x = layers.Dropout(dropout)(x) if dropout else x
    model = keras.Model(inputs, layers.Dense(4)(x))
    model.compile(keras.optimizers.SGD(0.5), "mse", metrics=["mae"])
    return model


def samples(count):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(count, 16)), rng.normal(size=(count, 4))
    return x.astype("float32"), y.astype("float32"), np.linspace(0.5, 1.5, count, dtype="float32")


def stepped(count):
    """The state and logs after one SGD step in ``count`` micro-batches, with sample weights."""
    model, batch = dense(), samples(47)
    traced = trace(model, batch, count)
    state = copy_state(state_values(model))
    logs, state = lower(traced, Schedule.store_all(traced.graph))(state, batch)
    return state, {key: float(value) for key, value in logs.items()}


@pytest.mark.parametrize("count", [2, 5])
def test_weights_and_metrics_are_those_of_the_whole_batch(count):
    whole, logs = stepped(1)
    cut, logs_of_pieces = stepped(count)
    for mine, theirs in zip(cut[0], whole[0], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)
    assert logs_of_pieces == pytest.approx(logs, rel=1e-5)


def test_rows_of_an_embedding_are_summed():
    def step(count):
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [
                keras.Input((4,), dtype="int32"),
                layers.Embedding(9, 3),
                layers.Flatten(),
                layers.Dense(1),
            ]
        )
        model.compile(keras.optimizers.SGD(0.5), "mse")
        batch = (np.arange(32).reshape(8, 4) % 9).astype("int32"), np.ones((8, 1), "float32")
        build(model, as_specs(batch))
        train_step = model.train_step if count == 1 else accumulated_train_step(model, count)
        return train_step(state_values(model), batch)[1][0]

    for mine, theirs in zip(step(4), step(1), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-7)


def test_own_train_steps_and_sums_are_refused():
    class Own(keras.Model):
        def train_step(self, state, data):
            return super().train_step(state, data)

    inputs = layers.Input((16,))
    own = Own(inputs, layers.Dense(4)(inputs))
    own.compile("sgd", "mse")
    with pytest.raises(UnsupportedModelError, match="train_step of its own"):
        accumulated_train_step(own, 2)
    model = dense()
    model.compile("sgd", keras.losses.MeanSquaredError(reduction="sum"))
    with pytest.raises(UnsupportedModelError, match="reduces by 'sum'"):
        accumulated_train_step(model, 2)


def test_a_piece_starts_when_the_one_before_has_ended(monkeypatch):
    def temporary(count):
        model = models.convnet(size=32)
        return memory(lower_plain(trace(model, models.batch(model), count))).temp_bytes

    whole = temporary(1)
    assert temporary(4) <= 0.4 * whole
    monkeypatch.setattr("keras_remat.backends.jax.accumulate.guard", lambda x, condition: x)
    assert temporary(4) > 0.6 * whole


def test_the_forward_phase_of_every_piece_is_one():
    model = models.mixer()
    batch = models.batch(model)
    whole, cut = (trace(model, batch, count).graph for count in (1, 3))
    count = {
        phase: [sum(op.phase == phase for op in graph.ops) for graph in (whole, cut)]
        for phase in ("forward", "backward")
    }
    for one, three in count.values():
        assert three == pytest.approx(3 * one, rel=0.2)


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
        backend().trace(model, jax.tree.map(jnp.asarray, arrays), 2)


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
    """The limit is below what one batch needs in one piece; plain ``fit`` gives the same losses."""
    x, y, _ = samples(4096)
    options = {"batch_size": 2048, "shuffle": False, "epochs": 3, "verbose": 0}
    expected = dense(512).fit(x, y, **options).history["loss"]
    model, device = dense(512), backend()
    arrays = device.example_batch(model, (x[:2048], y[:2048]))
    traced = device.trace(model, arrays)
    problem = keras_remat.Problem(
        traced.graph, device.estimated_profile(traced, device.device.in_use_bytes())
    )
    remat = keras_remat.RematAutotune(
        memory_limit=problem.floor_bytes - 2**19,
        margin=0.0,
        solver="greedy",
        solver_time_limit_s=5.0,
        profile_steps=1,
        verbose=0,
    )
    with pytest.warns(UserWarning, match="micro-batches"):
        history = model.fit(x, y, **options, callbacks=[remat]).history["loss"]
    assert history == pytest.approx(expected, rel=1e-4)
    assert remat.plan.measured.peak_bytes <= remat.report.limit_bytes


def test_fit_chooses_pieces_and_recomputation_together():
    """Every number of pieces that is tried trains batches; so does the odd last one."""
    x, y, weights = samples(3 * 4096 + 300)
    options = {
        "batch_size": 4096, "sample_weight": weights, "shuffle": False, "epochs": 9, "verbose": 0,
    }  # fmt: skip
    model = dense(128)
    watching = keras_remat.RematAutotune(batch_size="keep", profile_steps=1, verbose=0)
    expected = model.fit(x, y, **options, callbacks=[watching]).history
    plain, resident = watching.report.baseline.peak_bytes, watching.problem.profile.resident_bytes
    limit = resident + 8 * (plain - resident) // 10
    remat = keras_remat.RematAutotune(
        memory_limit=limit, micro_batches="auto", solver="greedy", solver_time_limit_s=5.0,
        profile_steps=1, verbose=0,
    )  # fmt: skip
    history = dense(128).fit(x, y, **options, callbacks=[remat]).history
    told = [event.message for event in remat.report.events if event.kind == "micro-batches"]
    assert any("in 2 pieces" in message for message in told)
    assert any(message.startswith("Measured per step") for message in told)
    assert {(epoch.samples, epoch.steps) for epoch in remat.report.epochs} == {(len(x), 4)}
    for key in ("loss", "mae"):
        assert history[key] == pytest.approx(expected[key], rel=1e-4)
    assert remat.plan.measured.peak_bytes <= limit


def test_losses_that_are_no_means_over_the_batch_are_refused():
    inputs = layers.Input((6,))
    tokens = layers.Embedding(10, 4, mask_zero=True)(inputs)
    masked = keras.Model(inputs, layers.Dense(2)(tokens))
    masked.compile("sgd", "mse")
    batch = backend().example_batch(masked, (np.ones((8, 6)), np.zeros((8, 6, 2))))
    with pytest.raises(UnsupportedModelError, match="masked"):
        trace(masked, batch, 2)


def test_a_scaled_loss_is_cut_too():
    model = models.mixed_precision()
    assert "LossScale" in type(model.optimizer).__name__
    batch = models.batch(model)
    traced = trace(model, batch, 2)
    state = copy_state(state_values(model))
    _, after = lower(traced, Schedule.store_all(traced.graph))(copy_state(state), batch)
    assert all(np.isfinite(v).all() for v in after[0])
    assert any((a != b).any() for a, b in zip(after[0], state[0], strict=True))
