import jax
import jax.numpy as jnp
import numpy as np
import pytest

from keras_remat.backends.jax.barrier import guard, never


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32", "uint8", "bool"])
def test_bits_are_unchanged_whatever_the_trigger_holds(dtype, bad):
    x = jnp.asarray([0, 1, 1, 0, 3], dtype)
    kept = jax.jit(lambda x, t: guard(x, never([t])))(x, jnp.full((2, 3), bad))
    assert kept.dtype == x.dtype
    np.testing.assert_array_equal(np.asarray(kept), np.asarray(x))


@pytest.mark.parametrize("literal", [0, 1, -1, 0.5])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8", "int4", "bool"])
def test_a_guarded_constant_is_not_folded(dtype, literal):
    """A select between two equal constants would be, and the guard with it."""
    x = jnp.asarray(literal).astype(dtype)
    compiled = jax.jit(lambda t: guard(x, never([t]))).lower(jnp.ones(3)).compile()
    assert " compare(" in compiled.as_text() or " and(" in compiled.as_text(), compiled.as_text()
    assert compiled(jnp.ones(3)) == x


def test_nan_and_infinity_pass_through():
    x = jnp.asarray([np.nan, np.inf, -np.inf, -0.0])
    kept = jax.jit(lambda x, t: guard(x, never([t])))(x, jnp.ones(()))
    np.testing.assert_array_equal(np.asarray(kept).view("uint32"), np.asarray(x).view("uint32"))


@pytest.mark.parametrize(
    "trigger",
    [np.zeros(3, "int32"), np.ones(2, bool), np.zeros((1, 1), "float16"), np.array(2, "uint32")],
)
def test_any_dtype_triggers(trigger):
    assert not bool(jax.jit(lambda t: never([t, jnp.zeros(2)]))(trigger))


def test_a_value_of_64_bits_triggers_and_is_guarded_in_a_step_of_32():
    def step(x):
        with jax.enable_x64(True):
            wide = x.astype("float64") * 0.1
        return guard(wide, never([wide])), wide

    kept, wide = map(np.asarray, jax.jit(step)(jnp.arange(3.0)))
    assert kept.dtype == "float64"
    np.testing.assert_array_equal(kept, wide)


def test_keys_are_guarded():
    key = jax.random.key(3)
    kept = jax.jit(lambda k, t: guard(k, never([t])))(key, jnp.ones(2))
    assert jax.random.key_data(kept).tolist() == jax.random.key_data(key).tolist()
    assert not bool(never([key]))


def test_the_compiler_can_neither_fold_nor_merge():
    """Two equal chains, one far behind the other: merged, the compiled step has one of them."""

    def step(x, protect):
        def block(x, w):
            return jnp.tanh(x @ w)

        w = jnp.eye(256)
        first = block(x, w)
        late = first
        for _ in range(4):
            late = jnp.sin(late @ w)
        again = block(x, guard(w, never([late])) if protect else w)
        return late.sum() + (again * late).sum()

    def chains_of(protect):
        spec = jax.ShapeDtypeStruct((4096, 256), "float32")
        compiled = jax.jit(lambda x: step(x, protect)).lower(spec).compile()
        return compiled.as_text().count(" tanh(")

    assert (chains_of(True), chains_of(False)) == (2, 1)
