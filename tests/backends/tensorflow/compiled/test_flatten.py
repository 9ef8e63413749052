"""A traced step without state: what becomes of reads, writes and effects, how tensors are numbered,
and that the numbers stay the same."""

import numpy as np
import pytest
import tensorflow as tf

from keras_remat.backends.tensorflow.compiled.flatten import Literal, flatten, nbytes
from keras_remat.errors import UnsupportedModelError

VECTOR = tf.TensorSpec((4,), tf.float32)


def graph_of(function, *specs):
    return tf.function(function, autograph=False, jit_compile=True).get_concrete_function(*specs)


def flat(function, *specs):
    return flatten(graph_of(function, *(specs or (VECTOR,))).graph)


def kinds(stateless):
    return [equation.kind for equation in stateless.program.equations]


def run(stateless, *batch):
    """Computes what a step returns and what it writes, equation by equation, from its numbers."""
    program = stateless.program
    variables = [tf.raw_ops.ReadVariableOp(resource=h, dtype=program.dtypes[at])
                 for at, h in enumerate(stateless.handles, stateless.batch)]  # fmt: skip
    given = [*map(tf.constant, batch), *variables, *stateless.captured]
    document = tf.compat.v1.GraphDef(library=program.library)
    document.node.extend(program.constants.values())
    names = [f"{name}:0" for name in program.given]
    for at, (name, tensor) in enumerate(zip(program.given, given, strict=True)):
        assert (tuple(tensor.shape), tensor.dtype) == (program.shapes[at], program.dtypes[at])
        node = document.node.add(name=name, op="Placeholder")
        node.attr["dtype"].type = tensor.dtype.as_datatype_enum
        node.attr["shape"].shape.CopyFrom(tensor.shape.as_proto())

    def name_of(atom):
        return names[atom] if isinstance(atom, int) else f"{atom.name}:0"

    for equation in program.equations:
        node = document.node.add()
        node.CopyFrom(equation.source)
        del node.input[:]
        node.input.extend(map(name_of, equation.inputs))
        assert equation.outputs[0] == len(names)
        names += [f"{node.name}:{at}" for at in range(len(equation.outputs))]
    assert len(names) == len(program.shapes)
    wanted = [*stateless.returned, *stateless.written.values()]
    pure = tf.compat.v1.wrap_function(
        lambda: tf.graph_util.import_graph_def(document, name=""), []
    ).prune(names[: program.n_given], [name_of(atom) for atom in wanted])
    results = [x.numpy() for x in pure(*given)]
    at = len(stateless.returned)
    handles = [stateless.handles[number - stateless.batch] for number in stateless.written]
    return results[:at], dict(zip(map(id, handles), results[at:], strict=True))


def written_to(stateless, results, variable):
    (at,) = (h for h in stateless.handles if h is variable.handle)
    return results[1][id(at)]


# ------------------------------------------------------------------ variables


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
