"""A guard keeps bits, and is kept by XLA, whatever is guarded."""

import pytest
import tensorflow as tf

from keras_remat.backends.tensorflow.barrier import guard, never


@pytest.mark.parametrize("literal", [0, 1, -1, 0.5])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8", "bool"])
def test_a_guarded_constant_is_not_folded(dtype, literal):
    """A select between two equal constants would be, and the guard with it."""

    @tf.function(jit_compile=True)
    def guarded(t):
        return guard(tf.cast(tf.constant(literal), dtype), never([t]))

    trigger = tf.ones(3)
    assert guarded(trigger) == tf.cast(tf.constant(literal), dtype)
    text = guarded.experimental_get_compiler_ir(trigger)(stage="optimized_hlo")
    assert " compare(" in text or " and(" in text, text


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "bool", "complex64"])
def test_bits_are_unchanged(dtype):
    x = tf.cast(tf.constant([0, 1, 1, 3]), dtype)
    assert bool(tf.reduce_all(guard(x, never([tf.ones([2, 2])])) == x))


@pytest.mark.parametrize("in_branch", [False, True])
@pytest.mark.parametrize("others", [[], [3]])
def test_a_tensor_without_elements_has_no_bits(in_branch, others):
    """A weight without elements has a gradient without elements."""

    @tf.function(jit_compile=True)
    def condition(*tensors):
        return never(tensors, in_branch)

    assert not condition(tf.zeros([0, 4]), *map(tf.ones, others))
