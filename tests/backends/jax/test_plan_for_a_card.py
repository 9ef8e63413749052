"""Plans for a card that need not be there: what is asked, what the plan says, where it installs."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import jax_models as models
import keras
import numpy as np
import pytest

import keras_remat
from keras_remat.backends.jax import JaxBackend
from keras_remat.backends.jax.measure import live_target
from keras_remat.cards.table import card
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate
from keras_remat.errors import PlanMismatchError, RematError
from keras_remat.units import GIB, MIB


@pytest.fixture
def compiled(monkeypatch):
    """A stand-in for the compiler of cards: an eighth more than is simulated. It holds what was
    compiled."""
    seen = []

    def compile_bytes(self, problem, schedule):
        if problem.graph.fingerprint not in self._traced:
            return None
        seen.append(schedule)
        order = schedule or Schedule.store_all(problem.graph)
        return 9 * (simulate(problem, order).peak_bytes - problem.profile.resident_bytes) // 8

    monkeypatch.setattr(JaxBackend, "_compile_bytes", compile_bytes)
    return seen


def settled(plan):
    """The plan without the seconds of its solver."""
    return replace(plan, solution=replace(plan.solution, solve_time_s=0.0))


def test_a_plan_for_a_card_and_one_on_a_device_of_its_kind_are_equal():
    model = models.mixer()
    batch = models.batch(model, 64)
    options = {"solver": "greedy", "profile": "estimated"}
    plain = keras_remat.make_plan(model, batch, "1GiB", **options).store_all.peak_bytes
    here = keras_remat.make_plan(model, batch, int(0.65 * plain), **options)
    for_card = keras_remat.make_plan(model, batch, int(0.65 * plain), card=live_target(), **options)
    assert here.solution.schedule.recomputed
    assert here.compiled is not None
    assert settled(for_card) == settled(here)


def test_nothing_runs_and_the_card_is_named(compiled, tmp_path, monkeypatch):
    monkeypatch.setattr(JaxBackend, "lower", None)
    monkeypatch.setattr(JaxBackend, "snapshot", None)
    model = models.mixer()
    plan = keras_remat.make_plan(model, models.batch(model, 64), "17MiB", card="t4")
    assert plan.card == "T4"
    assert plan.profile_source == "estimated"
    assert plan.solution.schedule.recomputed
    assert plan.compiled.peak_bytes == plan.predicted.peak_bytes <= plan.budget_bytes < 17 * MIB
    assert compiled
    for text in (plan.summary(), str(plan), plan._repr_html_()):
        assert "T4" in text
    assert "compiled" in plan.summary()
    plan.save(tmp_path / "plan.json")
    assert keras_remat.load_plan(tmp_path / "plan.json") == plan


class SharpnessAware(keras.Model):
    """Takes its gradients where the loss is sharpest nearby (Foret et al., ICLR 2021)."""

    def train_step(self, state, data):
        weights, others, optimizer, metrics = state
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        losses = jax.value_and_grad(self.compute_loss_and_updates, has_aux=True)

        def gradients(at):
            return losses(
                at, others, metrics, x, y, sample_weight,
                training=True, optimizer_variables=optimizer,
            )  # fmt: skip

        _, ascent = gradients(weights)
        norm = jnp.sqrt(sum(jnp.sum(one**2) for one in ascent))
        near = [weight + 0.05 * one / norm for weight, one in zip(weights, ascent, strict=True)]
        (_, (loss, predicted, others, metrics)), descent = gradients(near)
        weights, optimizer = self.optimizer.stateless_apply(optimizer, descent, weights)
        logs, metrics = self._update_metrics_variables(
            metrics, loss, x, y, predicted, sample_weight
        )
        return logs, (weights, others, optimizer, metrics)


@pytest.mark.card
def test_a_sharpness_aware_step_with_batch_normalization_is_planned_far_below_plain():
    """XLA's compiler for CPUs keeps more of it."""
    inputs = x = keras.Input((32, 32, 8))
    for _ in range(4):
        x = keras.layers.Conv2D(32, 3, padding="same", use_bias=False)(x)
        x = keras.layers.ReLU()(keras.layers.BatchNormalization()(x))
    outputs = keras.layers.Dense(1)(keras.layers.GlobalAveragePooling2D()(x))
    model = SharpnessAware(inputs, outputs)
    model.compile("sgd", "mse")
    options = {"card": "H100", "solver": "greedy", "margin": 0.0}
    batch = np.ones((16, 32, 32, 8), "float32"), np.ones((16, 1), "float32")
    plain = keras_remat.make_plan(model, batch, "1GiB", **options).store_all.peak_bytes
    limit = int(0.5 * plain)
    plan = keras_remat.make_plan(model, batch, limit, **options)
    assert plan.recomputes
    assert plan.compiled.peak_bytes <= limit


def test_limits_of_a_card(compiled):
    model = models.small()
    t4 = card("T4")

    def budget(limit, **options):
        return keras_remat.make_plan(model, 8, limit, margin=0.0, **options).budget_bytes

    assert budget(None, card="T4") == t4.usable_bytes
    assert budget("80%", card="T4") == int(0.8 * t4.total_bytes)
    assert budget("3GiB", card="T4") == 3 * GIB
    half = replace(t4, total_bytes=GIB, usable_bytes=GIB // 2)
    assert budget(None, card=half) == GIB // 2
    with pytest.warns(UserWarning, match="the device has 1 GiB"):
        assert budget("3GiB", card=half) == GIB


def test_none_is_all_that_the_device_has():
    model = models.small()
    plan = keras_remat.make_plan(model, 8, margin=0.0, profile="estimated")
    assert plan.budget_bytes == JaxBackend().device.total_bytes()
    assert plan.card is None


def test_no_array_of_the_batch_is_made(compiled):
    """A batch of 64 GiB."""
    model = models.small()
    with pytest.raises(RematError, match="limit"):
        keras_remat.make_plan(model, 2**30, card="H100")


def test_wrong_arguments(compiled):
    model = models.small()
    with pytest.raises(ValueError, match="leave profile out"):
        keras_remat.make_plan(model, 8, "1GiB", card="T4", profile="measured")
    with pytest.raises(ValueError, match="leave profile out"):
        keras_remat.find_max_batch_size(model, 8, "1GiB", card="T4", profile="measured")
    with pytest.raises(ValueError, match="did you mean H100"):
        keras_remat.make_plan(model, 8, card="H10")
    with pytest.raises(TypeError, match="name such as"):
        keras_remat.make_plan(model, 8, card=4)


def test_the_largest_batch_on_a_card_takes_few_compilations(compiled):
    model = models.mixer()
    found = keras_remat.find_max_batch_size(model, 16, "64MiB", card="T4", time_limit_s=4.0)
    assert 16 < found.plain_batch_size < found.max_batch_size
    assert found.plan.card == "T4"
    assert found.plan.measured is None
    assert len(compiled) <= 3
    assert all(schedule is None for schedule in compiled)


def test_a_plan_for_a_card_installs_on_a_device_of_its_kind(tmp_path):
    model = models.mixer(blocks=1)
    batch = models.batch(model, 64)
    here = replace(live_target(), card="this CPU")
    plain = keras_remat.make_plan(model, batch, "1GiB", card=here).store_all.peak_bytes
    made = keras_remat.make_plan(model, batch, int(0.8 * plain), card=here, solver="greedy")
    made.save(tmp_path / "plan.json")
    remat = keras_remat.RematAutotune("1GiB", "keep", plan=tmp_path / "plan.json", verbose=0)
    model.fit(*batch, batch_size=64, epochs=2, verbose=0, callbacks=[remat])
    assert remat.plan.solution.schedule == made.solution.schedule
    assert remat.plan.card == "this CPU"


def test_what_differs_from_the_card_is_named(compiled):
    model = models.small()
    made = keras_remat.make_plan(model, 8, card="T4")
    other = keras_remat.make_plan(model, 16, "1GiB", profile="estimated")
    with pytest.raises(PlanMismatchError, match=r"made for the card T4.*runs on cpu:0"):
        made.check(other.problem)


@pytest.mark.card
def test_a_plan_compiled_for_a_card():
    model = models.mixer()
    batch = models.batch(model, 512)
    plain = keras_remat.make_plan(model, batch, card="T4")
    assert plain.store_all.peak_bytes > 100 * MIB
    assert not plain.recomputes
    limit = int(0.8 * plain.store_all.peak_bytes)
    plan = keras_remat.make_plan(model, batch, limit, card="T4", solver_time_limit_s=5.0)
    assert plan.recomputes
    assert np.less_equal(plan.compiled.peak_bytes, plan.budget_bytes)
    assert plan.compiled.time_s != plan.predicted.time_s, "counted from the compiled modules"
    assert abs(plan.overhead) < 0.5
    assert "what the compiler made of it" in str(plan)
