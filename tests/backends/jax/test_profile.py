from dataclasses import replace

import jax
import jax.numpy as jnp
import jax_models as models
import keras
import pytest
from random_schedules import forget

from keras_remat.backends.jax.lower import lower, lower_plain
from keras_remat.backends.jax.profile import _bodies_bytes, estimated_profile
from keras_remat.backends.jax.trace import trace
from keras_remat.backends.xla.kernel_costs import kernel_time_s, scaled
from keras_remat.cards.table import card
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate
from keras_remat.core.target import live


@pytest.fixture(scope="module")
def setting():
    model = models.mixer()
    batch = models.batch(model, 64)
    return trace(model, batch)


def test_scaling_keeps_the_split_and_calls_it_an_estimate(setting):
    traced = setting
    schedule = forget(traced.graph)
    estimated = estimated_profile(traced)
    profile = scaled(estimated, schedule, 2.5)
    assert profile.source == estimated.source == "estimated"
    assert profile.resident_bytes == estimated.resident_bytes
    assert sum(profile.op_time_s[i] for i in schedule.order) == pytest.approx(2.5)
    ratio = [m / e for m, e in zip(profile.op_time_s, estimated.op_time_s, strict=True)]
    assert max(ratio) == pytest.approx(min(ratio))


def test_resident_bytes_are_never_less_than_the_inputs(setting):
    own = estimated_profile(setting).resident_bytes
    assert estimated_profile(setting, 1).resident_bytes == own
    assert estimated_profile(setting, own + 7).resident_bytes == own + 7


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_every_op_has_its_costs_on_every_platform(setting, platform):
    profile = estimated_profile(replace(setting, target=live(platform, "a device")))
    assert profile.device == "a device"
    assert min(profile.op_time_s) > 0
    assert min(profile.op_workspace_bytes) == 0


def test_products_dominate(setting):
    traced = setting
    times = estimated_profile(traced).op_time_s
    products = sum(times[op.id] for op in traced.graph.ops if op.kind == "dot_general")
    assert 0.3 * sum(times) < products < sum(times)


@pytest.mark.parametrize(("name", "is_whole"), [("H100", True), ("T4", False)])
def test_a_softmax_that_is_one_kernel_costs_one_where_it_runs_again(name, is_whole):
    """Its last equation is a division: alone, XLA fuses that into what reads it."""
    inputs = keras.Input((128, 64))
    shares = keras.layers.Softmax()(keras.layers.Dense(64)(inputs))
    outputs = keras.layers.GlobalAveragePooling1D()(keras.layers.Dense(10)(shares))
    model = models.compiled(keras.Model(inputs, outputs))
    target = card(name)
    traced = trace(model, models.batch(model, 64), target=target)
    division = next(op for op in traced.graph.ops if op.kind == "div" and op.phase == "forward")
    nbytes = 2 * traced.graph.values[division.outputs[0]].nbytes
    share = estimated_profile(traced).op_time_s[division.id] / kernel_time_s(
        0, nbytes, target.rates
    )
    assert (share >= 1.0) is is_whole
    assert is_whole or share < 0.2


def test_resident_bytes_are_the_arguments_of_the_compiled_step(setting):
    traced = setting
    arguments = lower(traced, forget(traced.graph)).memory_analysis().argument_size_in_bytes
    constants = sum(c.nbytes for c in traced.program.constants)
    assert estimated_profile(traced).resident_bytes == arguments + constants


def test_the_prediction_is_near_what_the_compiler_needs(setting):
    traced = setting
    problem = Problem(traced.graph, estimated_profile(traced))
    schedule = forget(
        traced.graph,
        {op.id for op in traced.graph.ops if op.phase == "forward" and op.kind in ("add", "lt")},
    )
    predicted = simulate(problem, schedule).peak_bytes - problem.profile.resident_bytes
    assert 0.75 < models.temp_bytes(lower(traced, schedule)) / predicted < 1.5


def test_a_loop_has_workspace():
    model = models.recurrent()
    traced = trace(model, models.batch(model))
    workspaces = estimated_profile(traced).op_workspace_bytes
    assert any(workspaces[op.id] > 0 for op in traced.graph.ops if op.kind in ("scan", "while"))


def long_branch(x):
    for _ in range(4):
        x = jnp.tanh(x) * 2
    return x


SIZE = 1024
BYTES = 4 * SIZE


@pytest.mark.parametrize(
    ("body", "most"),
    [
        # a product and the tanh that it reads, whatever ran before them
        (lambda x: jax.lax.cond(x[0] > 0, long_branch, lambda x: x, x), 2 * BYTES),
        # the larger branch, not both
        (lambda x: jax.lax.cond(x[0] > 0, long_branch, long_branch, x), 2 * BYTES),
        # what a branch returns is the op's output
        (lambda x: jax.lax.cond(x[0] > 0, jnp.tanh, lambda x: x, x), 0),
        # what a round of a loop writes is not what it reads; and the counter
        (lambda x: jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x), x), BYTES + 4),
    ],
    ids=["cond", "both branches", "one op", "loop"],
)
def test_a_body_needs_what_is_alive_in_it_at_once(body, most):
    closed = jax.make_jaxpr(body)(jnp.zeros(SIZE))
    (equation,) = [e for e in closed.jaxpr.eqns if e.primitive.name in ("cond", "scan", "while")]
    assert _bodies_bytes(equation, equation.primitive.name) == most


class Gate(keras.layers.Layer):
    """One of two chains of layers, by what it is given."""

    def build(self, shape):
        self.left, self.right = (
            self.add_weight(shape=(shape[-1], shape[-1])) for _ in ("left", "right")
        )

    def call(self, x):
        def chain(kernel, x):
            for _ in range(4):
                x = jnp.tanh(x @ kernel)
            return x

        return jax.lax.cond(
            jnp.mean(x) > 0,
            lambda x: chain(self.left.value, x),
            lambda x: chain(self.right.value, x),
            x,
        )


def test_a_step_with_branches_is_predicted_with_what_the_plain_one_takes():
    """Each branch's residuals are outputs; what else is in a branch counts once, and in turn."""
    inputs = keras.Input((64,))
    x = Gate()(keras.layers.Dense(64, activation="gelu")(inputs))
    model = keras.Model(inputs, keras.layers.Dense(1)(x))
    model.compile(keras.optimizers.SGD(0.01), "mse")
    traced = trace(model, models.batch(model, 512))
    problem = Problem(traced.graph, estimated_profile(traced))
    peak = simulate(problem, Schedule.store_all(traced.graph)).peak_bytes
    predicted = peak - problem.profile.resident_bytes
    assert 0.8 < predicted / models.temp_bytes(lower_plain(traced)) < 1.2
