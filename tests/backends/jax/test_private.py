"""What is used of JAX and Keras in private: that it is there, and does what we say of it."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import jax_models as models
import keras
import numpy as np
import pytest

from keras_remat.backends import keras_private
from keras_remat.backends.jax import private

VECTOR = jax.ShapeDtypeStruct((4,), "float32")


def built(make=models.small):
    model = make()
    keras_private.build(model, models.batch(model))
    return model


# ------------------------------------------------------------------ equations


@jax.custom_jvp
def tripled(x):
    return 3.0 * x


tripled.defjvp(lambda x, t: (3.0 * x[0], 3.0 * t[0]))


@jax.custom_vjp
def doubled(x):
    return 2.0 * x


doubled.defvjp(lambda x: (2.0 * x, None), lambda _, gradient: (gradient * 2.0,))

CALLS = {
    "jit": jax.jit(jnp.sin),
    "custom_jvp": tripled,
    "custom_vjp": doubled,
    "remat": jax.checkpoint(jnp.sin),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_tells_what_it_calls(name):
    (eqn,) = jax.make_jaxpr(CALLS[name])(VECTOR).eqns
    inner = private.called_jaxpr(eqn)
    assert [aval.shape for aval in inner.in_avals] == [v.aval.shape for v in eqn.invars]
    assert [aval.shape for aval in inner.out_avals] == [v.aval.shape for v in eqn.outvars]
    assert inner.eqns


OPERATIONS = {
    "sin": jnp.sin,
    "scan": lambda x: jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, length=3)[0],
    "while": lambda x: jax.lax.while_loop(lambda c: c[0] < 1, lambda c: c + jnp.exp(c), x),
    "cond": lambda x: jax.lax.cond(True, jnp.sin, jnp.cos, x),
}


def equation(name):
    (found,) = (e for e in jax.make_jaxpr(OPERATIONS[name])(VECTOR).eqns
                if e.primitive.name == name)  # fmt: skip
    return found


@pytest.mark.parametrize(("name", "bodies"), [("sin", 0), ("scan", 1), ("while", 2), ("cond", 2)])
def test_an_operation_calls_nothing_and_carries_its_bodies(name, bodies):
    eqn = equation(name)
    assert private.called_jaxpr(eqn) is None
    found = private.inner_jaxprs(eqn.params)
    assert len(found) == bodies
    assert all(body.eqns for body in found)


def test_a_call_that_holds_no_jaxpr_is_an_operation():
    strange = SimpleNamespace(primitive=SimpleNamespace(name="jit"), params={})
    assert private.called_jaxpr(strange) is None


def test_scopes_say_where_an_equation_was_traced():
    def loss(x):
        with jax.named_scope("dense"):
            return jnp.sin(x).sum()

    stacks = {
        e.primitive.name: private.name_stack(e) for e in jax.make_jaxpr(jax.grad(loss))(VECTOR).eqns
    }
    assert stacks["sin" if "sin" in stacks else "cos"] == "jvp(dense)"
    assert stacks["mul"] == "transpose(jvp(dense))"


@pytest.mark.parametrize("name", ["sin", "scan", "while"])
def test_an_equation_runs_on_arrays_and_on_tracers(name):
    x = jnp.asarray([0.1, 0.2, 0.3, 0.4])
    eqn = equation(name)
    expected = OPERATIONS[name](x)
    for run in (private.bind, jax.jit(lambda eqn, xs: private.bind(eqn, xs), static_argnums=0)):
        (result,) = run(eqn, [x])
        np.testing.assert_allclose(result, expected, rtol=1e-6)


def test_an_equation_may_have_several_results():
    (eqn,) = jax.make_jaxpr(lambda x: jax.lax.top_k(x, 2))(VECTOR).eqns
    values, indices = private.bind(eqn, [jnp.asarray([3.0, 1.0, 4.0, 1.5])])
    assert values.tolist() == [4.0, 3.0]
    assert indices.tolist() == [2, 0]


@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_into_other_arrays_is_the_scan(reverse):
    def turn(x, rows):
        row, number = rows
        x = jnp.sin(x + row)
        return x, (x, number > 1)

    def scanned(x, rows, numbers):
        return jax.lax.scan(turn, x, (rows, numbers), reverse=reverse)

    given = jnp.arange(4.0), jnp.arange(12.0).reshape(3, 4), jnp.arange(3)
    (eqn,) = jax.make_jaxpr(scanned)(*given).eqns
    stacks = [jnp.ones(x.shape, x.dtype) for x in private.stacked_shapes(eqn)]
    assert [x.shape for x in stacks] == [(3, 4), (3,)]
    expected = private.bind(eqn, given)
    for one, other in zip(private.scan_into(eqn, given, stacks), expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_scan_of_no_rounds_writes_into_no_arrays():
    """JAX cannot write its loop down: the body would read from arrays without elements."""

    def scanned(x, rows):
        return jax.lax.scan(lambda x, row: (x + row, x), x, rows)

    (eqn,) = jax.make_jaxpr(scanned)(jnp.arange(4.0), jnp.zeros((0, 4))).eqns
    assert private.stacked_shapes(eqn) == []


# ------------------------------------------------------------------ state


@pytest.fixture(scope="module")
def stepped():
    """A model, its state and batch, and the logs and the new state of Keras's own step."""
    model = built()
    batch, state = models.batch(model), private.state_values(model)
    return model, state, batch, *jax.jit(model.train_step)(state, batch)


def test_state_is_the_trainer_s_in_its_order(stepped):
    """Keras's own step takes it, and returns the new one in the same order."""
    model, state, _, _, trained = stepped
    for group, variables in zip(trained, private.state_variables(model), strict=True):
        assert [tuple(v.shape) for v in group] == [tuple(v.shape) for v in variables]
        assert [v.dtype for v in group] == [v.dtype for v in variables]
    changed = [
        [not np.array_equal(a, b) for a, b in zip(old, new, strict=True)]
        for old, new in zip(state, trained, strict=True)
    ]
    assert all(any(group) for group in changed), "weights, averages, slots, metrics"


def test_specs_are_those_of_the_values():
    model = built()
    values, specs = private.state_values(model), private.state_specs(model)
    assert len(specs) == len(values) == 4
    assert all(specs), "trainable and not, optimizer, metrics"
    for spec, value in zip(jax.tree.leaves(specs), jax.tree.leaves(values), strict=True):
        assert isinstance(spec, jax.ShapeDtypeStruct)
        assert (spec.shape, spec.dtype) == (value.shape, value.dtype)


def test_under_a_distribution_specs_have_shardings():
    with keras.distribution.DataParallel(devices=["cpu:0"]).scope():
        model = built()
        values = private.state_values(model)
        for specs in (private.state_specs(model), private.state_specs(model, values)):
            for spec, value in zip(jax.tree.leaves(specs), jax.tree.leaves(values), strict=True):
                assert spec.sharding == value.sharding


def test_state_is_assigned_after_it_was_taken_off():
    model = built()
    state = jax.tree.map(lambda x: jnp.ones_like(x), private.state_values(model))
    private.purge_state(model)
    groups = private.state_variables(model)
    assert all(v._value is None for group in groups for v in group)
    assert private.state_specs(model), "shapes and dtypes stay"
    private.assign_state(model, state)
    assert all(np.all(np.asarray(v) == 1) for group in groups for v in group)


def test_keras_writes_the_published_state_back():
    """What it does when ``fit`` ends, and after an error in it."""
    model = built()
    state = jax.tree.map(lambda x: jnp.full_like(x, 2), private.state_values(model))
    private.publish_state(model, state)
    model.jax_state_sync()
    for variables, values in zip(private.state_variables(model), state, strict=True):
        for variable, value in zip(variables, values, strict=True):
            np.testing.assert_array_equal(variable.value, value)


# ------------------------------------------------------------------ models


@pytest.mark.parametrize("specs", [False, True])
def test_a_model_is_built_from_arrays_or_specs(specs):
    model = models.compiled(keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(10)]))
    x, y = np.ones((8, 3), "float32"), np.zeros(8, "int32")
    batch = (
        jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (x, y)) if specs else (x, y)
    )
    keras_private.build(model, batch)
    assert [tuple(w.shape) for w in model.weights] == [(3, 4), (4,), (4, 10), (10,)]
    assert model.optimizer.built
    assert model.metrics_variables
    keras_private.build(model, batch)
    assert len(model.weights) == 4, "once more does nothing"


def test_metrics_are_updated_as_in_keras_s_step(stepped):
    model, (weights, others, slots, metrics), (x, y), logs, trained = stepped
    _, (loss, predicted, _, metrics) = model.compute_loss_and_updates(
        weights, others, metrics, x, y, None, training=True, optimizer_variables=slots
    )
    mine, updated = private.update_metrics(model, metrics, loss, x, y, predicted, None)
    assert set(mine) == set(logs) == {"loss", "accuracy"}
    for name, value in mine.items():
        assert float(value) == pytest.approx(float(logs[name]), rel=1e-5)
    for one, other in zip(updated, trained[3], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
