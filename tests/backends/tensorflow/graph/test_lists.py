"""What tensor lists hold, by the graph alone."""

from collections import Counter

import pytest
import tensorflow as tf

from keras_remat.backends.tensorflow.graph.lists import held_bytes

STEPS, ELEMENT = 6, 32 * 16 * 4  # bytes of an element, a multiple of the alignment


def held(function, *specs, smallest_bytes=0):
    """The graph of a function, and what its lists hold by tensor name."""
    graph = tf.function(function, autograph=False).get_concrete_function(*specs).graph
    document = graph.as_graph_def()
    shapes = {
        tensor.name: (
            tuple(tensor.shape) if tensor.shape.is_fully_defined() else None,
            tensor.dtype,
        )
        for op in graph.get_operations()
        for tensor in op.outputs
    }
    nodes = {node.name: node for node in document.node}
    return nodes, held_bytes(nodes, document.library, shapes, smallest_bytes)


def by_kind(nodes, found):
    """Node kind → how many lists hold how many bytes."""
    kinds = {}
    for tensor, nbytes in found.items():
        kinds.setdefault(nodes[tensor.partition(":")[0]].op, Counter())[nbytes] += 1
    return kinds


def looped(weights, body):
    """The gradient of a loop that hands ``x`` and an array of outputs on."""

    def run(x, steps=STEPS):
        with tf.GradientTape() as tape:
            tape.watch([x, weights])
            array = tf.TensorArray(tf.float32, size=STEPS, element_shape=x.shape)

            def step(i, x, array):
                x = body(x)
                return i + 1, x, array.write(i, x)

            _, _, array = tf.while_loop(
                lambda i, *_: i < steps, step, (0, x, array), maximum_iterations=steps
            )
            loss = tf.reduce_sum(array.stack())
        return tape.gradient(loss, [x, weights])

    return run


X = tf.TensorSpec((32, 16), tf.float32)


@pytest.fixture
def weights():
    return tf.Variable(tf.ones((16, 16)))


def test_an_accumulator_holds_an_element_per_iteration_and_a_read_variable_none(weights):
    """Kept for the gradient: x before the product, which is the output of the iteration before,
    and the tanh, which is that output; so all outputs, once. The variable is pushed as it is."""
    nodes, found = held(looped(weights, lambda x: tf.tanh(x @ weights)), X)
    of_loops = by_kind(nodes, found)
    assert of_loops["While"][STEPS * ELEMENT] == 1
    assert set(of_loops["While"]) <= {STEPS * ELEMENT, STEPS * 256}  # and counters


def test_what_an_iteration_makes_is_kept_beside_its_output(weights):
    nodes, found = held(looped(weights, lambda x: tf.sin(tf.cos(x @ weights))), X)
    # x, x @ w and its cosine
    assert by_kind(nodes, found)["While"][STEPS * ELEMENT] == 3


def test_the_gradient_hands_on_what_it_got_and_holds_nothing_new(weights):
    nodes, found = held(looped(weights, lambda x: tf.tanh(x @ weights)), X)
    assert "StatelessWhile" not in by_kind(nodes, found)


def test_a_list_of_a_tensor_is_a_copy_of_it():
    def run(x):
        return tf.raw_ops.TensorListFromTensor(tensor=x, element_shape=x.shape[1:])

    nodes, found = held(run, tf.TensorSpec((7, 10), tf.float32))
    assert by_kind(nodes, found)["TensorListFromTensor"] == {7 * 256: 1}  # aligned, each


def test_zeros_like_a_list_are_as_large():
    def run(x):
        made = tf.raw_ops.TensorListFromTensor(tensor=x, element_shape=x.shape[1:])
        return tf.raw_ops.ZerosLike(x=made), tf.identity(made)

    nodes, found = held(run, tf.TensorSpec((7, 64), tf.float32))
    kinds = by_kind(nodes, found)
    assert kinds["ZerosLike"] == kinds["TensorListFromTensor"] == {7 * 256: 1}
    assert "Identity" not in kinds  # the same list


def test_reserved_room_is_no_memory_and_unknown_lengths_and_shapes_are_left_out():
    def run(n):
        reserve = tf.raw_ops.TensorListReserve
        one, size = tf.ones((16,)), tf.constant([16])
        known = reserve(element_shape=size, num_elements=4, element_dtype=tf.float32)
        longer = reserve(element_shape=size, num_elements=n, element_dtype=tf.float32)
        shapeless = reserve(element_shape=[-1], num_elements=4, element_dtype=tf.float32)
        write = tf.raw_ops.TensorListSetItem
        return known, *(write(input_handle=of, index=0, item=one) for of in (longer, shapeless))

    assert held(run, tf.TensorSpec((), tf.int32))[1] == {}


def test_accumulators_of_a_loop_of_unknown_length_are_left_out(weights):
    run = looped(weights, lambda x: tf.sin(tf.cos(x @ weights)))
    nodes, found = held(run, X, tf.TensorSpec((), tf.int32))
    assert by_kind(nodes, found)["While"] == {STEPS * ELEMENT: 1}  # the outputs'


def test_elements_that_the_allocator_does_not_count_are_left_out(weights):
    run = looped(weights, lambda x: tf.sin(x @ weights))
    nodes, found = held(run, X, smallest_bytes=ELEMENT)
    assert set(by_kind(nodes, found)["While"]) == {STEPS * ELEMENT}
    assert held(run, X, smallest_bytes=ELEMENT + 1)[1] == {}


def test_a_branch_is_no_list_and_a_loop_in_a_loop_is_the_outer_ones_workspace(weights):
    def inner(x):
        return tf.while_loop(
            lambda i, _: i < 2, lambda i, x: (i + 1, tf.sin(x)), (0, x), maximum_iterations=2
        )[1]

    _, found = held(looped(weights, lambda x: inner(x @ weights)), X)
    assert all(nbytes <= STEPS * ELEMENT for nbytes in found.values())

    def branch(x):
        return tf.cond(x[0, 0] > 0, lambda: tf.sin(x), lambda: x)

    assert held(branch, X)[1] == {}
