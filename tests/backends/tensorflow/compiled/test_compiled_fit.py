"""``jit_compile=True`` inside ``fit``: the limit is kept, and what XLA refuses trains in order."""

import gc
from pathlib import Path

import keras
import keras_models
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from own_process import came_of
from random_models import follow_advice
from tight_limit import tight_limit as limit_of

import keras_remat

BATCH = 2048
QUICK = {"solver": "greedy", "solver_time_limit_s": 2.0, "profile_steps": 1, "verbose": 0}


def model_and_data(samples=6 * BATCH, dropout=0.1, blocks=6):
    quick = {"optimizer": "sgd", "metrics": []}
    return keras_models.mlp(samples, 256, blocks, dropout, jit_compile=True, **quick)


def tight_limit(model, data, share=0.55):
    """Between what the device holds now and the compiled plain step's predicted peak."""
    backend = keras_remat.backends.tensorflow.backends(model, "compiled")[0]
    return limit_of(backend, model, data, BATCH, share)


def fit(model, data, *callbacks, **options):
    options = {"batch_size": BATCH, "verbose": 0, "shuffle": False, **options}
    return model.fit(*data, callbacks=list(callbacks), **options).history


_ALONE = """
import json
import keras_remat
import numpy as np
import tensorflow as tf
import test_compiled_fit as t
tf.raw_ops.Empty(shape=[2**29], dtype=tf.uint8)  # one region, as a GPU has it
from keras_remat.backends.tensorflow.swap import InstalledTrainFunction
model, data = t.model_and_data(2 * t.BATCH, blocks=2)
limit = t.tight_limit(model, data, 0.65)
remat = keras_remat.RematAutotune(limit, "keep", compilation="compiled", **t.QUICK)
history = t.fit(model, data, remat, epochs=2)
plain, data = t.model_and_data(2 * t.BATCH, blocks=2)
expected = t.fit(plain, data, epochs=2)
for a, b in zip(model.variables, plain.variables, strict=True):
    np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-3, atol=1e-5)
print(json.dumps({
    "expected": expected, "history": history,
    "recomputes": remat.plan.recomputes, "limit": limit, "settled": remat.plan.measured.peak_bytes,
    "epoch": remat.report.epochs[1].peak_bytes,
    "kinds": [event.kind for event in remat.report.events],
    "installed": isinstance(model.train_function, InstalledTrainFunction),
}))
"""


def test_fit_compiled_keeps_to_the_limit_and_has_plain_s_numbers():
    """In a process of its own, in one region: the one buffer gets a free chunk of up to twice its
    size where other tests, or regions that double, have left one."""
    said = came_of("-c", _ALONE, cwd=Path(__file__).parent)
    for key, values in said["expected"].items():
        assert said["history"][key] == pytest.approx(values, rel=1e-5), key
    assert said["recomputes"]
    assert said["settled"] <= said["limit"]
    assert said["epoch"] <= said["limit"]
    assert "remark" not in said["kinds"]
    assert not said["installed"]


@pytest.mark.slow
def test_a_limit_that_is_advised_is_kept_from_the_first_step_on():
    """Keras's own step of this model is not compiled. The chunk of the plan's one buffer hangs on
    what other tests left of the pool: it is asked for."""
    gc.collect()
    row = follow_advice(28, compilation="compiled", solver_time_limit_s=3.0)
    assert row["refusals"] == 1
    assert row["trained"] == row["advised"] > row["refused"]
    assert row["peak"] <= 1.02 * row["trained"]


@pytest.mark.slow
def test_second_fit_with_an_odd_last_batch():
    model, data = model_and_data(2 * BATCH + 100)
    plain, _ = model_and_data(2 * BATCH + 100)
    for _ in range(2):
        expected = fit(plain, data, epochs=2)
        remat = keras_remat.RematAutotune(
            tight_limit(model, data, 0.7), "keep", compilation="compiled", **QUICK
        )
        history = fit(model, data, remat, epochs=2)
        assert history["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert [epoch.samples for epoch in remat.report.epochs] == [2 * BATCH + 100] * 2


@pytest.mark.slow
def test_auto_measures_both_and_says_which_stays():
    """Without dropout: XLA and TensorFlow's kernels draw other numbers from the same seed."""
    model, data = model_and_data(24 * BATCH, dropout=0)
    remat = keras_remat.RematAutotune(tight_limit(model, data), "keep", **QUICK)
    history = fit(model, data, remat)
    told = [event.message for event in remat.report.events if event.kind == "compilation"]
    assert told[0] == "Finished tuning the compiled step. Now trying ordered."
    assert told[1].startswith("Measured per step: compiled ") or "cannot be used" in told[1]
    assert history["loss"] == pytest.approx(
        fit(*model_and_data(24 * BATCH, dropout=0))["loss"], rel=1e-4
    )


class SquareRoot(layers.Layer):
    """An op that XLA has no kernel for."""

    def call(self, x):
        n = x.shape[-1]
        spread = tf.eye(n) + 0.01 * tf.matmul(x, x, transpose_a=True) / tf.cast(
            tf.shape(x)[0], tf.float32
        )
        return tf.matmul(x, tf.stop_gradient(tf.linalg.sqrtm(spread)))


@pytest.mark.parametrize("case", ["traced and refused", "refused when it is compiled"])
def test_what_xla_cannot_do_trains_in_order_with_the_reason(case, monkeypatch):
    monkeypatch.setattr("keras_remat.training.tools.Tools.plain_fits", lambda *_: False)
    if case == "traced and refused":
        model, data = keras_models.lstm(48)
        reason = "While"
    else:
        keras.utils.set_random_seed(0)
        inputs = layers.Input((8,))
        model = keras.Model(inputs, layers.Dense(1)(SquareRoot()(layers.Dense(8)(inputs))))
        data = (np.ones((48, 8), "float32"), np.ones((48, 1), "float32"))
        reason = "XLA cannot compile"
    model.compile("sgd", "mse", jit_compile=True)
    remat = keras_remat.RematAutotune("8GiB", "keep", **QUICK)
    history = fit(model, data, remat, batch_size=16)
    assert np.isfinite(history["loss"]).all()
    event = next(event for event in remat.report.events if event.kind == "compilation")
    assert reason in event.message
    assert "training goes on ordered" in event.message
    assert remat.report.epochs[0].samples == 48


def test_compilation_is_checked():
    with pytest.raises(
        ValueError, match="unknown compilation 'xla'; there are auto, compiled, ordered"
    ):
        keras_remat.RematAutotune("1GiB", compilation="xla")


@pytest.mark.parametrize(("compilation", "kind"), [("auto", "compiled"), ("ordered", "ordered")])
def test_a_plan_is_made_for_the_way_the_model_trains(compilation, kind):
    model, data = model_and_data(32, blocks=1)
    plan = keras_remat.make_plan(
        model, data, "8GiB", profile="estimated", solver="greedy", compilation=compilation
    )
    backend = keras_remat.backends.tensorflow.backends(model, kind)[0]
    traced = backend.trace(model, backend.example_batch(model, data))
    assert plan.fingerprint == traced.graph.fingerprint


def test_an_unknown_compilation_is_told():
    model, data = model_and_data(32, blocks=1)
    with pytest.raises(ValueError, match="did you mean 'compiled'"):
        keras_remat.make_plan(model, data, "8GiB", compilation="compile")
