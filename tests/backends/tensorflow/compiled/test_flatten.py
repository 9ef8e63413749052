"""A traced step without state: what becomes of effects, how tensors are numbered, and that the
numbers stay the same."""

import numpy as np
import pytest
import tensorflow as tf
from flat_steps import VECTOR, flat, graph_of, kinds, run, written_to

from keras_remat.backends.tensorflow.compiled.flatten import Literal, flatten, nbytes
from keras_remat.errors import UnsupportedModelError

# ------------------------------------------------------------------ effects


def test_random_numbers_with_a_seed_are_pure():
    stateless = flat(lambda x: x + tf.random.stateless_uniform((4,), seed=[1, 2]))
    (result,), _ = run(stateless, np.zeros(4, "float32"))
    np.testing.assert_array_equal(result, tf.random.stateless_uniform((4,), seed=[1, 2]))


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (lambda x: x + tf.random.uniform((4,)), "RandomUniform"),
        (lambda x: tf.numpy_function(np.sin, [x], tf.float32), "PyFunc"),
    ],
)
def test_a_hidden_effect_is_refused_by_name(function, named):
    with pytest.raises(UnsupportedModelError, match=named):
        flat(function)


def test_assertions_and_aliases_are_no_equations():
    def step(x):
        tf.raw_ops.Assert(condition=x[0] > 0, data=[x])
        y = tf.stop_gradient(tf.identity(x))
        return tf.sin(tf.debugging.check_numerics(y, "bad")), y

    stateless = flat(step)
    assert [(e.kind, e.inputs) for e in stateless.program.equations] == [("Sin", (0,))]
    assert stateless.returned == (1, 0)


@pytest.mark.parametrize("up", [True, False])
def test_control_flow_is_one_equation_and_carried_whole(up):
    def step(x, up):
        x = tf.while_loop(lambda i, _: i < 3, lambda i, x: (i + 1, tf.sin(x) + x), [0, x])[1]
        return tf.cond(up, lambda: tf.exp(x), lambda: tf.cos(x))

    stateless = flat(step, VECTOR, tf.TensorSpec((), tf.bool))
    assert {"StatelessWhile", "StatelessIf"} <= set(kinds(stateless))
    assert not {"Sin", "Exp", "Cos"} & set(kinds(stateless)), "the bodies stay inside"
    x = np.asarray([0.5, 1.0, -1.0, 0.0], "float32")
    (result,), _ = run(stateless, x, up)
    np.testing.assert_allclose(result, step(tf.constant(x), tf.constant(up)), rtol=1e-6)


def test_a_branch_is_pure_though_its_kind_may_have_effects():
    """What its functions change would be among its inputs."""
    spec = tf.TensorSpec((4,), tf.float32)
    branches = [
        tf.function(f, autograph=False).get_concrete_function(spec) for f in (tf.sin, tf.cos)
    ]

    def step(x):
        (result,) = tf.raw_ops.If(
            cond=x[0] > 0,
            input=[x],
            Tout=[tf.float32],
            then_branch=branches[0],
            else_branch=branches[1],
            output_shapes=[(4,)],
        )
        return result + 1.0

    concrete = graph_of(step, VECTOR)
    assert "If" in {operation.type for operation in concrete.graph.get_operations()}
    stateless = flatten(concrete.graph)
    assert "StatelessIf" in kinds(stateless)
    assert "If" not in kinds(stateless)
    (result,), _ = run(stateless, np.ones(4, "float32"))
    np.testing.assert_allclose(result, np.full(4, 1 + np.sin(1)), rtol=1e-6)


# ------------------------------------------------------------------ what is folded and dropped


def _drawn_in_a_branch(x):
    return tf.cond(x[0] > 0, lambda: x + tf.random.normal((4,)), lambda: x)


def _drawn_in_a_loop_of_a_branch(x):
    def loop():
        more = lambda i, _: i < 2  # noqa: E731
        return tf.while_loop(more, lambda i, y: (i + 1, y + tf.random.uniform((4,))), (0, x))[1]

    return tf.cond(x[0] > 0, loop, lambda: x)


@pytest.mark.parametrize("function", [_drawn_in_a_branch, _drawn_in_a_loop_of_a_branch])
def test_control_flow_that_draws_random_numbers_is_refused(function):
    """Where it ran again it would draw others."""
    with pytest.raises(UnsupportedModelError, match="effect"):
        flat(function)


def test_a_branch_that_calls_a_function_or_asserts_is_pure():
    called = tf.function(lambda x: tf.sin(x))

    def branch(x):
        tf.debugging.assert_positive(x[1:])
        return called(x)

    assert "StatelessIf" in kinds(flat(lambda x: tf.cond(x[0] > 0, lambda: branch(x), lambda: x)))


def test_what_is_neither_returned_nor_written_is_dropped():
    def step(x):
        tf.exp(tf.tanh(x))
        return tf.sin(x)

    assert kinds(flat(step)) == ["Sin"]


def test_constants_are_folded():
    stateless = flat(lambda x: x * tf.sin(tf.constant([1.0, 2.0, 3.0, 4.0])))
    assert kinds(stateless) == ["Mul"]
    (x, literal), = (e.inputs for e in stateless.program.equations)  # fmt: skip
    assert x == 0
    assert (literal.dtype, literal.nbytes) == (tf.float32, 16)
    node = stateless.program.constants[literal.name]
    np.testing.assert_allclose(tf.make_ndarray(node.attr["value"].tensor), np.sin([1, 2, 3, 4]))


def test_operations_stand_in_the_order_they_were_traced_in():
    """Though the first that is returned is the last."""

    def step(x):
        a = tf.sin(x)
        b = tf.cos(x)
        c = tf.tanh(a)
        d = tf.exp(x)
        return d + b, c

    stateless = flat(step)
    assert kinds(stateless) == ["Sin", "Cos", "Tanh", "Exp", "AddV2"]


# ------------------------------------------------------------------ numbers


def test_batch_comes_first_then_variables_then_what_else_is_captured():
    v, held = tf.Variable([1.0, 2.0, 3.0, 4.0]), tf.reshape(tf.range(400.0), (100, 4))

    def step(x, not_read, y):
        return tf.reduce_sum(held * x, 0) + v, y

    stateless = flat(step, VECTOR, VECTOR, VECTOR)
    program = stateless.program
    assert stateless.batch == 3
    assert stateless.handles[0] is v.handle
    assert [captured is held for captured in stateless.captured] == [True]
    assert program.n_given == len(program.given) == 5
    assert program.shapes[:5] == ((4,), (4,), (4,), (4,), (100, 4))
    x, y = np.ones(4, "float32"), np.full(4, 7, "float32")
    (total, same), _ = run(stateless, x, x, y)
    np.testing.assert_array_equal(total, held.numpy().sum(0) + v.numpy())
    assert stateless.returned[1] == 2
    np.testing.assert_array_equal(same, y)


def test_a_small_tensor_is_captured_as_a_constant():
    """TensorFlow writes its value down, so it may be folded and is nothing that the step is
    given."""
    small = tf.constant([1.0, 2.0, 3.0, 4.0])
    stateless = flat(lambda x: (x * small, x + tf.sin(small)))
    assert stateless.captured == ()
    assert kinds(stateless) == ["Mul", "AddV2"]
    (product, total), _ = run(stateless, np.ones(4, "float32"))
    np.testing.assert_array_equal(product, small)
    np.testing.assert_allclose(total, 1 + np.sin(small), rtol=1e-6)


def test_a_step_may_return_and_write_constants():
    v = tf.Variable(1.0)

    def step(x):
        v.assign(5.0)
        return x, tf.constant(2)

    stateless = flat(step)
    results = run(stateless, np.ones(4, "float32"))
    assert isinstance(stateless.returned[1], Literal)
    assert results[0][1] == 2
    assert written_to(stateless, results, v) == 5


def test_one_tensor_may_be_returned_and_written_twice():
    one, other = tf.Variable(tf.zeros(4)), tf.Variable(tf.zeros(4))

    def step(x):
        y = tf.sin(x)
        one.assign(y)
        other.assign(y)
        return y, y

    stateless = flat(step)
    assert kinds(stateless) == ["Sin"]
    assert len({*stateless.returned, *stateless.written.values()}) == 1
    assert len(stateless.written) == 2


def test_every_output_of_an_operation_has_a_number():
    stateless = flat(lambda x: tf.unstack(x)[2] + tf.split(x, 4)[1])
    outputs = {e.kind: e.outputs for e in stateless.program.equations}
    assert len(outputs["Unpack"]) == len(outputs["Split"]) == 4
    (result,), _ = run(stateless, np.asarray([1, 10, 100, 1000], "float32"))
    assert result == [110]


def test_a_scope_is_that_of_the_operation_s_name():
    def step(x):
        with tf.name_scope("outside"), tf.name_scope("inside"):
            return tf.sin(x)

    (equation,) = flat(step).program.equations
    assert equation.scope == "outside/inside"


# ------------------------------------------------------------------ bytes


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((3, 5), tf.float32, 60),
        ((3, 5), tf.bfloat16, 30),
        ((), tf.int64, 8),
        ((7, 0), tf.float32, 0),
        (None, tf.float32, 0),
        ((), tf.variant, 0),
    ],
)
def test_bytes_follow_shape_and_dtype(shape, dtype, expected):
    assert nbytes(shape, dtype) == expected


def test_sizes_are_those_of_the_numbers():
    program = flat(lambda x, w: tf.cast(x @ w, tf.float16), tf.TensorSpec((8, 4), tf.float32),
                   tf.TensorSpec((4, 2), tf.float32)).program  # fmt: skip
    assert program.sizes == (128, 32, 64, 32)
    assert program.describe(3) == ((8, 2), "float16")
