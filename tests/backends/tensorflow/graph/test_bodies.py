"""What branches and loops hold, by their bodies."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tight_fits import plan_with_plain_bits

import keras_remat
from keras_remat.backends.tensorflow import backend, private
from keras_remat.backends.tensorflow.graph import kernel_scratch
from keras_remat.backends.tensorflow.graph.bodies import body_bytes
from keras_remat.backends.tensorflow.graph.lists import held_bytes
from keras_remat.backends.tensorflow.graph.trace import trace
from keras_remat.backends.tensorflow.ordered.profile import estimated_profile
from keras_remat.backends.tensorflow.profiler import device

ROWS, WIDTH = 32, 16
BYTES = ROWS * WIDTH * 4  # of a value, a multiple of the alignment
X = tf.TensorSpec((ROWS, WIDTH), tf.float32)


def held(function, *specs, smallest_bytes=0):
    """What the bodies of a function's graph hold, and its nodes."""
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
    captures = {placeholder.op.name: external for external, placeholder in graph.captures}
    nodes = {node.name: node for node in document.node}
    in_lists = held_bytes(nodes, document.library, shapes, smallest_bytes)
    found = body_bytes(nodes, document.library, captures, shapes, smallest_bytes, in_lists)
    return found, nodes


def chain(length, weights=None):
    def run(x):
        for _ in range(length):
            x = tf.sin(x if weights is None else x @ weights)
        return x

    return run


def gradient(choose):
    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(choose(x))
        return tape.gradient(loss, x)

    return run


def cond(left, right):
    return lambda x: tf.cond(x[0, 0] > 0, lambda: left(x), lambda: right(x))


def switch(*branches):
    def choose(x):
        return tf.switch_case(
            tf.cast(x[0, 0], tf.int32), [lambda run=run: run(x) for run in branches]
        )

    return choose


@pytest.mark.parametrize(
    ("choose", "kept"),
    [
        # a sine keeps what it reads; the first one reads x, which is there anyway
        (cond(chain(4), chain(1)), 3),
        # the branch that keeps the most, not the sum of both
        (cond(chain(4), chain(3)), 3),
        (cond(chain(3), chain(4)), 3),
        (switch(chain(2), chain(5), chain(3)), 4),
        # a branch in a branch
        (cond(cond(chain(4), chain(2)), chain(2)), 3),
        (cond(chain(1), chain(1)), 0),
    ],
    ids=["one", "equal", "second", "switch", "nested", "none"],
)
def test_branches_keep_what_one_of_them_keeps(choose, kept):
    found, _ = held(gradient(choose), X, smallest_bytes=BYTES)
    assert sum(found.handed_on.values()) == kept * BYTES


def test_what_a_branch_returns_anyway_is_held_once():
    """A tanh's gradient reads what the tanh returns."""
    found, nodes = held(gradient(cond(tf.tanh, tf.identity)), X)
    (name,) = [
        n for n, node in nodes.items() if node.op in ("If", "StatelessIf") and "grad" not in n
    ]
    assert found.handed_on == {}
    assert set(found.shared.values()) == {f"{name}:0"}


def test_variables_that_a_branch_reads_are_no_bytes_of_its_own():
    weights = tf.Variable(tf.ones((WIDTH, WIDTH)))
    found, _ = held(gradient(cond(chain(3, weights), chain(1, weights))), X)
    # products, and sines that products read
    assert sum(found.handed_on.values()) == 5 * BYTES


def test_what_the_allocator_does_not_count_is_left_out():
    run = gradient(cond(chain(4), chain(1)))
    assert held(run, X, smallest_bytes=BYTES)[0].handed_on
    assert not held(run, X, smallest_bytes=BYTES + 1)[0].handed_on


@pytest.mark.parametrize(
    ("run", "most"),
    [
        # a chain's sines take one another's buffer over; the last one's is the op's output
        (cond(chain(4), tf.identity), 0),
        (cond(chain(4), chain(4)), 0),
        # what a sum reads is alive beside it
        (cond(lambda x: tf.cumsum(tf.cumsum(tf.cumsum(x))), tf.identity), 1),
        (cond(tf.identity, lambda x: tf.cumsum(tf.cumsum(x))), 1),
        (cond(tf.cumsum, tf.identity), 0),
        # a round returns what the next one reads
        (lambda x: tf.while_loop(lambda x: x[0, 0] > 0, lambda x: (tf.sin(x),), (x,))[0], 1),
    ],
    ids=["in place", "both", "not in place", "second", "one op", "loop"],
)
def test_a_body_needs_what_is_alive_in_it_at_once(run, most):
    found, _ = held(run, X)
    (workspace,) = found.workspace.values()
    assert workspace == most * BYTES


@pytest.mark.parametrize(
    ("push", "most"),
    [
        # a cumsum's output, which the next reads, and that one's
        (None, 2),
        # what is pushed counts as the list's: it is there once, beside the other one
        ("first", 1),
        ("second", 1),
        # the first is made where there is room for the second
        ("both", 0),
        # the round before has returned it
        ("given", 1),
    ],
)
def test_what_a_round_puts_into_a_list_counts_once(push, most):
    """A round returns what the next one reads."""

    def round_of(x, accumulators):
        first = tf.cumsum(x)
        second = tf.cumsum(first)
        pushed = {"first": [first], "second": [second], "both": [first, second], "given": [x]}
        return second, [
            tf.raw_ops.TensorListPushBack(input_handle=one, tensor=element)
            for one, element in zip(accumulators, pushed.get(push, []), strict=True)
        ]

    def run(x):
        count = {None: 0, "both": 2}.get(push, 1)
        new = [
            tf.raw_ops.EmptyTensorList(
                element_shape=X.shape, max_num_elements=4, element_dtype=tf.float32
            )
            for _ in range(count)
        ]
        return tf.while_loop(lambda x, _: x[0, 0] > 0, round_of, (x, new))

    (workspace,) = held(run, X)[0].workspace.values()
    assert workspace == most * BYTES


def gradients_in_a_loop(kernel):
    """Two gradients of a convolution's kernel in every round."""

    def run(image):
        def round_of(of_kernel, _):
            found = [
                tf.raw_ops.Conv2DBackpropFilter(
                    input=image + n, filter_sizes=kernel.shape, out_backprop=image,
                    strides=[1] * 4, padding="SAME",
                )
                for n in (0.0, 1.0)
            ]  # fmt: skip
            return of_kernel + found[0] + found[1], of_kernel[0, 0, 0, 0]

        return tf.while_loop(lambda k, first: first < 1, round_of, (kernel, 0.0))[0]

    return run


@pytest.mark.parametrize("onednn", [False, True], ids=["own kernels", "onednn"])
def test_what_kernels_of_a_body_ask_for_counts_and_one_of_them_runs_at_a_time(onednn, monkeypatch):
    kernel, image = tf.zeros((3, 3, 4, 4)), tf.TensorSpec((2, 16, 16, 4), tf.float32)
    run = gradients_in_a_loop(kernel)
    monkeypatch.setattr(private, "onednn_is_on", lambda: True)
    monkeypatch.setattr(device, "on_gpu", lambda: False)
    (without,) = held(run, image)[0].workspace.values()
    monkeypatch.setattr(private, "onednn_is_on", lambda: onednn)
    (workspace,) = held(run, image)[0].workspace.values()
    # 30 MiB hold 758 images of 4 * (256 * 36 + 256 * 4 + 36 * 4) bytes
    assert workspace - without == (0 if onednn else 4 * 758 * 256 * 36)

    graph = tf.function(run, autograph=False).get_concrete_function(image).graph
    document, before = graph.as_graph_def(), graph.as_graph_def()
    kernel_scratch.order_bodies(document)
    assert (document == before) is onednn
    waits = {
        node.name: [i[1:] for i in node.input if i.startswith("^")]
        for function in document.library.function
        for node in function.node_def
        if node.op == "Conv2DBackpropFilter"
    }
    first, second = waits
    assert waits == {first: [], second: [] if onednn else [first]}
    gathering = kernel_scratch.gathering_functions(document.library)
    assert len(gathering) == (0 if onednn else 1)


class Gate(keras.layers.Layer):
    """One of two chains of layers, by what it is given."""

    def __init__(self, several=False, **options):
        super().__init__(**options)
        self.several = several

    def build(self, shape):
        self.kernels = [
            self.add_weight(shape=(shape[-1], shape[-1])) for _ in range(2 + self.several)
        ]

    def call(self, x):
        def chain(kernel):
            y = x
            for _ in range(4):
                y = keras.ops.tanh(y @ kernel)
            return y

        if self.several:
            at = keras.ops.cast(keras.ops.mean(x) > 0, "int32")
            return keras.ops.switch(at, [lambda k=k: chain(k) for k in self.kernels])
        left, right = self.kernels
        return keras.ops.cond(keras.ops.mean(x) > 0, lambda: chain(left), lambda: chain(right))


def gated(several, rows=4096, width=64):
    keras.utils.set_random_seed(0)
    inputs = x = keras.Input((width,))
    for _ in range(3):
        x = Gate(several)(keras.layers.Dense(width, activation="gelu")(x))
    model = keras.Model(inputs, keras.layers.Dense(1)(x))
    model.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=False)
    rng = np.random.default_rng(0)
    return model, (rng.normal(size=(rows, width)).astype("f"), rng.random((rows, 1), "float32"))


@pytest.mark.parametrize(
    "several",
    [
        pytest.param(False, id="cond"),
        pytest.param(True, id="switch", marks=pytest.mark.slow),
    ],
)
def test_a_step_with_branches_trains_under_a_limit_that_both_of_them_exceed(several):
    plan_with_plain_bits(lambda: gated(several), 0.7, 2048)


def test_a_branch_is_predicted_with_what_its_step_takes():
    model, data = gated(False)
    traced = trace(model, data)
    profile = estimated_profile(traced)
    problem = keras_remat.Problem(traced.graph, profile)
    order = keras_remat.Schedule.store_all(traced.graph)
    predicted = keras_remat.simulate(problem, order).peak_bytes - profile.resident_bytes
    device = backend().device
    before = device.in_use_bytes()
    step = backend().lower(traced, problem, order)
    _, usage = backend().measure(lambda: step(backend().example_batch(model, data)))
    assert 0.8 < predicted / (usage.peak_bytes - before) < 1.25


@pytest.mark.parametrize("products", [1, 2])
def test_what_a_loop_adds_to_sums_waits_in_rounds_ahead(products):
    """The gradient of a weight is a sum over the rounds, which no round reads. The gradient of the
    state is read by the next round."""
    weights = tf.TensorSpec((WIDTH, WIDTH), tf.float32)

    def run(x, weights):
        with tf.GradientTape() as tape:
            tape.watch(weights)
            rounds = tf.while_loop(
                lambda at, _: at < 4, lambda at, x: (at + 1, chain(products, weights)(x)), (0, x)
            )
            loss = tf.reduce_sum(rounds[1])
        return tape.gradient(loss, weights)

    found, _ = held(run, X, weights)
    (nbytes,) = found.waiting.values()  # of the backward loop alone
    assert nbytes == products * WIDTH * WIDTH * 4
