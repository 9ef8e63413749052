"""A traced step without state: what becomes of reads and writes of variables."""

import numpy as np
import pytest
import tensorflow as tf
from flat_steps import flat, graph_of, kinds, run, written_to

from keras_remat.backends.tensorflow.compiled.flatten import flatten
from keras_remat.errors import UnsupportedModelError


def test_a_read_is_the_variable_s_value():
    v = tf.Variable([1.0, 2.0, 3.0, 4.0])
    stateless = flat(lambda x: x * v)
    assert kinds(stateless) == ["Mul"]
    assert [h is v.handle for h in stateless.handles] == [True]
    assert stateless.written == {}
    (equation,) = stateless.program.equations
    assert equation.inputs == (0, 1), "the batch, then the variable"


def test_a_read_after_a_write_is_the_new_value_and_one_before_it_the_old():
    v = tf.Variable([1.0, 2.0, 3.0, 4.0])

    def step(x):
        before = v * 2.0
        v.assign(x)
        v.assign_add(x)
        return before, v * 2.0

    stateless = flat(step)
    x = np.asarray([1.0, 10.0, 100.0, 1000.0], "float32")
    results = run(stateless, x)
    np.testing.assert_array_equal(results[0][0], 2 * v.numpy())
    np.testing.assert_array_equal(results[0][1], 4 * x)
    np.testing.assert_array_equal(written_to(stateless, results, v), 2 * x)


@pytest.mark.parametrize("seen", [True, False])
def test_only_what_changes_is_written(seen):
    read, changed, same = tf.Variable(1.0), tf.Variable(2.0), tf.Variable(3.0)

    def step(x):
        changed.assign_add(1.0)
        same.assign(same.read_value())
        return x * read if seen else x

    stateless = flat(step)
    assert len(stateless.handles) == 2 + seen
    (number,) = stateless.written
    assert stateless.handles[number - stateless.batch] is changed.handle


ROWS = [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
INDICES = np.array([2, 0, 2], np.int32)
UPDATES = np.array([[1, 2], [3, 4], [5, 6]], np.float32)


def scatter(kind, rows=3):
    def access(v, x):
        getattr(tf.raw_ops, kind)(
            resource=v.handle, indices=INDICES[:rows], updates=UPDATES[:rows] + x
        )

    return access


ACCESSES = {
    "AssignVariableOp": lambda v, x: v.assign(v * x),
    "AssignAddVariableOp": lambda v, x: v.assign_add(v * x),
    "AssignSubVariableOp": lambda v, x: v.assign_sub(v * x),
    "VariableShape": lambda v, x: (
        tf.cast(tf.raw_ops.VariableShape(input=v.handle, out_type=tf.int32), tf.float32) * x
    ),
    "ResourceGather": lambda v, x: tf.gather(v, INDICES) * x,
    "ResourceScatterAdd": scatter("ResourceScatterAdd"),
    "ResourceScatterSub": scatter("ResourceScatterSub"),
    "ResourceScatterUpdate": scatter("ResourceScatterUpdate", rows=2),
}


@pytest.mark.parametrize("kind", ACCESSES)
def test_an_operation_on_a_variable_does_the_same_to_its_value(kind):
    v = tf.Variable(ROWS)

    def step(x):
        result = ACCESSES[kind](v, x)
        return v + 0.0, x if result is None or kind.startswith("Assign") else result

    concrete = graph_of(step, tf.TensorSpec((), tf.float32))
    assert kind in {operation.type for operation in concrete.graph.get_operations()}
    stateless = flatten(concrete.graph)
    assert kind not in kinds(stateless)
    results = run(stateless, np.float32(3))
    value, returned = concrete(tf.constant(3.0))
    np.testing.assert_array_equal(results[0][0], value)
    np.testing.assert_array_equal(results[0][1], returned)
    if stateless.written:
        np.testing.assert_array_equal(written_to(stateless, results, v), v.numpy())
    else:
        np.testing.assert_array_equal(v.numpy(), ROWS)


def test_rows_are_gathered_from_every_entry_of_a_batch():
    v = tf.Variable([[1.0, 2.0], [3.0, 4.0]])

    def step(x):
        gathered = tf.raw_ops.ResourceGather(
            resource=v.handle, indices=[[1, 1], [0, 1]], dtype=tf.float32, batch_dims=1
        )
        return gathered * x[:1]

    (result,), _ = run(flat(step), np.ones(4, "float32"))
    np.testing.assert_array_equal(result, [[2, 2], [3, 4]])


def test_a_type_of_its_own_stays():
    """Half precision, and integers."""
    half, count = tf.Variable(tf.ones(4, tf.float16)), tf.Variable(3, dtype=tf.int64)

    def step(x):
        half.assign_sub(tf.cast(x, tf.float16))
        count.assign_add(1)
        return tf.gather(half, [0])

    stateless = flat(step)
    results = run(stateless, np.full(4, 0.5, "float32"))
    assert written_to(stateless, results, half).tolist() == [0.5] * 4
    assert written_to(stateless, results, half).dtype == np.float16
    assert written_to(stateless, results, count) == 4


def test_an_unknown_access_to_a_variable_is_refused_by_name():
    v = tf.Variable(ROWS)

    def step(x):
        tf.raw_ops.ResourceScatterMul(resource=v.handle, indices=INDICES, updates=UPDATES)
        return x

    with pytest.raises(UnsupportedModelError, match=r"ResourceScatterMul.*on a variable"):
        flat(step)


@pytest.mark.parametrize("first", [1.0, -1.0])
@pytest.mark.parametrize("second", [1.0, -1.0])
def test_variables_in_branches_are_values(first, second):
    """One is changed by both branches, one by one, one by a branch in a branch; one is only read,
    and one by nobody."""
    both, one, deep, read, nobody = (tf.Variable([float(n)] * 4) for n in range(1, 6))

    def inner():
        deep.assign_sub(read)
        return tf.constant(2.0)

    def up(x):
        both.assign_add(x)
        one.assign(read * x)
        return tf.cond(x[1] > 0, inner, lambda: deep[0])

    def down(x):
        both.assign(nobody * 0.0 + x)
        return tf.gather(read, 1) + 1.0

    def step(x):
        y = tf.cond(x[0] > 0, lambda: up(x), lambda: down(x))
        return y + both[0]

    variables = (both, one, deep, read, nobody)
    stateless = flat(step)
    x = np.asarray([first, second, 3.0, 4.0], "float32")
    (result,), written = run(stateless, x)
    found = [written.get(id(v.handle), v.numpy()) for v in variables]
    expected = step(tf.constant(x))
    np.testing.assert_array_equal(result, expected)
    np.testing.assert_array_equal(found, [v.numpy() for v in variables])


def test_a_variable_in_a_loop_is_refused():
    v = tf.Variable(1.0)

    def step(x):
        return tf.while_loop(lambda i, _: i < 3, lambda i, x: (i + 1, x * v), [0, x])[1]

    with pytest.raises(UnsupportedModelError, match=r"While \(.*on a variable"):
        flat(step)
