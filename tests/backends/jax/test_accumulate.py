"""Micro-batches on JAX: one piece after the other, and with a loss that is scaled."""

import jax_models as models
import keras
import numpy as np
import pytest
from jax_models import regression, weighted_samples
from keras import layers

import keras_remat
from keras_remat.backends.jax.lower import lower, lower_plain
from keras_remat.backends.jax.private import state_values
from keras_remat.backends.jax.trace import trace
from keras_remat.core.schedule import Schedule
from keras_remat.errors import UnsupportedModelError


def test_a_piece_starts_when_the_one_before_has_ended(monkeypatch):
    def temporary(count):
        traced = trace(regression(256), weighted_samples(8192), count)
        return models.temp_bytes(lower_plain(traced))

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


@pytest.mark.slow
def test_fit_chooses_pieces_and_recomputation_together():
    """Every number of pieces that is tried trains batches; so does the odd last one."""
    x, y, weights = weighted_samples(3 * 4096 + 300)
    options = {
        "batch_size": 4096, "sample_weight": weights, "shuffle": False, "epochs": 9, "verbose": 0,
    }  # fmt: skip
    model = regression()
    watching = keras_remat.RematAutotune(batch_size="keep", profile_steps=1, verbose=0)
    expected = model.fit(x, y, **options, callbacks=[watching]).history
    plain, resident = watching.report.baseline.peak_bytes, watching.problem.profile.resident_bytes
    limit = resident + 8 * (plain - resident) // 10
    remat = keras_remat.RematAutotune(
        memory_limit=limit, micro_batches="auto", solver="greedy", solver_time_limit_s=5.0,
        profile_steps=1, verbose=0,
    )  # fmt: skip
    history = regression().fit(x, y, **options, callbacks=[remat]).history
    told = [event.message for event in remat.report.events if event.kind == "micro-batches"]
    assert any("in 2 micro-batches" in message for message in told)
    assert any(message.startswith("Measured per step") for message in told)
    assert {(epoch.samples, epoch.steps) for epoch in remat.report.epochs} == {(len(x), 4)}
    for key in ("loss", "mae"):
        assert history[key] == pytest.approx(expected[key], rel=1e-4)
    assert remat.plan.measured.peak_bytes <= limit


@pytest.mark.parametrize("name", ["stateless_compute_loss", "compute_loss_and_updates"])
def test_what_computes_the_loss_without_state_is_not_cut_either(name):
    own = {name: lambda self, *args, **options: getattr(keras.Model, name)(self, *args, **options)}
    inputs = layers.Input((16,))
    model = type("Own", (keras.Model,), own)(inputs, layers.Dense(4)(inputs))
    model.compile("sgd", "mse")
    with pytest.raises(UnsupportedModelError, match=f"{name} of its own"):
        trace(model, weighted_samples(8), 2)


def test_a_scaled_loss_is_cut_too():
    model = models.mixed_precision()
    assert "LossScale" in type(model.optimizer).__name__
    batch = models.batch(model)
    traced = trace(model, batch, 2)
    state = models.copy_state(state_values(model))
    _, after = lower(traced, Schedule.store_all(traced.graph))(models.copy_state(state), batch)
    assert all(np.isfinite(v).all() for v in after[0])
    assert any((a != b).any() for a, b in zip(after[0], state[0], strict=True))
