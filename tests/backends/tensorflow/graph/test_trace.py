"""The graph of a train step: what is an op, what is a view, what precedes what, and that tracing
changes nothing."""

import functools
import gc
import re

import keras
import keras_models
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from keras_remat.backends.tensorflow import backend
from keras_remat.backends.tensorflow.graph import kinds
from keras_remat.core.graph import BACKWARD, FORWARD, UPDATE
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.errors import UnsupportedModelError

BACKEND = backend()


@functools.cache
def traced_model(make):
    """A model and its traced step, which must leave every variable as it was."""
    model, batch = make()
    data = BACKEND.example_batch(model, batch)
    before = {id(v): v.numpy() for v in keras_models.variables_of(model)}
    traced = BACKEND.trace(model, data)
    after = {id(v): v.numpy() for v in keras_models.variables_of(model)}
    for key, value in before.items():
        np.testing.assert_array_equal(value, after[key])
    return model, traced


@pytest.fixture(scope="module")
def convnet():
    return traced_model(keras_models.convnet)


def test_fingerprint_is_the_models_and_not_its_names():
    make = keras_models.mixed_precision
    rebuilt, batch = make()  # with other layer names
    assert (
        BACKEND.trace(rebuilt, BACKEND.example_batch(rebuilt, batch)).graph.fingerprint
        == traced_model(make)[1].graph.fingerprint
    )


def test_another_batch_size_is_another_graph():
    other = traced_model(lambda: keras_models.mlp(batch=4))[1]
    assert other.graph.fingerprint != traced_model(keras_models.mlp)[1].graph.fingerprint


def test_nothing_waits_for_an_op_without_an_effect(convnet):
    """Grappler ties the shapes that it folds to the activations they are of; those could then not
    run again once a shape was read."""
    ops = convnet[1].graph.ops
    reads = {op.id for op in ops if op.kind in kinds.VARIABLE_READS}
    of_reads = {
        op.id for op in ops if any(convnet[1].graph.values[v].producer in reads for v in op.inputs)
    }
    waited_for = {earlier for op in ops for earlier in op.after if ops[earlier].recomputable}
    assert waited_for <= reads | of_reads | {
        op.id for op in ops if op.phase == UPDATE or "adam" in op.name
    }
    assert any(op.kind == "Relu" for op in ops)
    assert not any(
        ops[earlier].kind in ("Relu", "_FusedConv2D", "Mean") for op in ops for earlier in op.after
    )


def test_what_equal_ops_were_merged_into_runs_where_the_first_of_them_did(convnet):
    """The labels' cast of the loss is merged with that of the accuracy, traced after the optimizer:
    the loss must not wait for it."""
    ops = convnet[1].graph.ops
    first_of_optimizer = next(op.id for op in ops if op.name.startswith("adam"))
    assert all(
        op.id < first_of_optimizer
        for op in ops
        if op.phase == BACKWARD and "gradient_tape/" in op.name
    )


def test_phases(convnet):
    ops = convnet[1].graph.ops
    assert {op.phase for op in ops} == {FORWARD, BACKWARD, UPDATE}
    for op in ops:
        if op.kind in ("Conv2DBackpropInput", "Conv2DBackpropFilter", "ReluGrad"):
            assert op.phase == BACKWARD
        if op.kind in ("Conv2D", "Relu", "DepthwiseConv2dNative"):
            assert op.phase == FORWARD
    weight_updates = [op for op in ops if op.kind.startswith(("AssignSub", "ResourceApply"))]
    assert {op.phase for op in weight_updates if "adam" in op.name.lower()} == {UPDATE}


@pytest.mark.parametrize("name", keras_models.MODELS)
def test_views_are_folded_and_every_owner_is_a_value(name):
    traced = traced_model(keras_models.MODELS[name])[1]
    assert not {op.kind for op in traced.graph.ops} & (
        kinds.VIEWS | {"NoOp", "Const", "Placeholder"}
    )
    for op in traced.graph.ops:
        for value_id in op.inputs:
            value = traced.graph.values[value_id]
            if value.producer is None:
                kind = traced.nodes[value.name.partition(":")[0]].op
                assert kind in {"Placeholder", "Const"}, (op.name, value.name, kind)


def test_reshape_of_an_activation_is_read_as_the_activation():
    def make():
        inputs = layers.Input((4, 6))
        x = layers.Dense(3)(layers.Reshape((24,))(layers.Dense(6, activation="relu")(inputs)))
        model = keras.Model(inputs, x)
        model.compile("sgd", "mse")
        return model, (np.ones((2, 4, 6), "float32"), np.ones((2, 3), "float32"))

    graph = traced_model(make)[1].graph
    relu = next(op for op in graph.ops if op.kind in ("Relu", "_FusedMatMul"))
    assert (
        len(graph.readers[relu.outputs[0]]) >= 2
    )  # the second layer, through the view, and the gradient
    assert "Reshape" not in {op.kind for op in graph.ops}


@pytest.mark.parametrize("name", keras_models.MODELS)
def test_whatever_changes_a_variable_follows_all_its_earlier_reads(name):
    """S4 only speaks of direct predecessors: a path through other ops would not hold the copy of a
    read back."""
    graph = traced_model(keras_models.MODELS[name])[1].graph
    ancestors = []
    for op in graph.ops:
        direct = {p for v in op.inputs if (p := graph.values[v].producer) is not None} | set(
            op.after
        )
        ancestors.append(direct.union(*(ancestors[i] for i in direct)))
    writes = [op for op in graph.ops if not op.recomputable and op.kind not in ("While", "If")]
    reads = kinds.VARIABLE_READS | set(kinds.STATELESS.values())
    assert writes
    for write in writes:
        handles = {v for v in write.inputs if graph.values[v].dtype == "resource"}
        for op in graph.ops:
            if op.kind in reads and handles & set(op.inputs):
                assert op.id in write.after or write.id in ancestors[op.id], (write.name, op.name)


def test_assignments_run_once_and_dropout_may_run_again(convnet):
    graph = convnet[1].graph
    by_kind = {}
    for op in graph.ops:
        by_kind.setdefault(op.kind, set()).add(op.recomputable)
    assert by_kind["AssignAddVariableOp"] == by_kind["AssignVariableOp"] == {False}
    random = [kind for kind in by_kind if kind.startswith("StatelessRandom")]
    assert random
    assert all(by_kind[kind] == {True} for kind in random)


def test_nodes_that_the_layout_pass_fuses_run_once(convnet):
    """Of two copies, it would fuse one's gradient of a kernel with the other's of a bias."""
    traced = convnet[1]
    together = [op for op in traced.graph.ops if len(traced.node_names[op.name]) > 1]
    assert together
    assert not any(op.recomputable for op in together)


def test_hidden_random_state_is_not_recomputable():
    class Noisy(layers.Layer):
        def call(self, x):
            return x + tf.random.normal(tf.shape(x))

    def make():
        inputs = layers.Input((3,))
        model = keras.Model(inputs, layers.Dense(1)(Noisy()(inputs)))
        model.compile("sgd", "mse")
        return model, (np.ones((2, 3), "float32"), np.ones((2, 1), "float32"))

    random = [op for op in traced_model(make)[1].graph.ops if op.kind == "RandomStandardNormal"]
    assert [op.recomputable for op in random] == [False]


def test_loops_and_branches_are_single_ops():
    assert any(
        op.kind in ("While", "StatelessWhile")
        for op in traced_model(keras_models.lstm)[1].graph.ops
    )
    branches = traced_model(keras_models.mixed_precision)[1].graph.ops
    assert any(op.kind in ("If", "StatelessIf") for op in branches)
    assert not any(op.recomputable for op in branches if op.kind == "If")


def test_a_loop_that_changes_nothing_may_run_again_and_one_that_does_may_not():
    """Both read a variable, for which TensorFlow gives both the type with an effect."""

    class Loops(layers.Layer):
        def build(self, shape):
            self.kernel = self.add_weight(shape=(3, 3))
            self.count = self.add_weight(shape=(), trainable=False)

        def call(self, x):
            def count(i, y):
                self.count.assign_add(1.0)
                return i + 1, y @ self.kernel

            loop = functools.partial(tf.while_loop, lambda i, _: i < 3, maximum_iterations=3)
            _, x = loop(lambda i, y: (i + 1, tf.tanh(y @ self.kernel)), (0, x))
            return loop(count, (0, x))[1]

    def make():
        model = keras.Sequential([layers.Input((3,)), Loops()])
        model.compile("sgd", "mse")
        return model, (np.ones((2, 3), "float32"), np.ones((2, 3), "float32"))

    graph = traced_model(make)[1].graph
    forward = [op for op in graph.ops if "While" in op.kind and op.phase == "forward"]
    assert [(op.kind, op.recomputable) for op in forward] == [
        ("StatelessWhile", True),
        ("While", False),
    ]
    pure, counting = forward
    update = next(op for op in graph.ops if op.kind == "AssignSubVariableOp")
    assert {pure.id, counting.id} & set(update.after)


def test_what_a_branch_returned_stays_while_its_gradient_may_read_it():
    """The gradient gets it in an ``Optional``, which shares its memory."""

    class Branch(layers.Layer):
        def call(self, x):
            return tf.cond(tf.reduce_mean(x) > 0, lambda: tf.tanh(x), lambda: x)

    def make():
        model = keras.Sequential([layers.Input((3,)), layers.Dense(4), Branch(), layers.Dense(1)])
        model.compile("sgd", "mse")
        return model, (np.ones((2, 3), "float32"), np.ones((2, 1), "float32"))

    graph = traced_model(make)[1].graph
    branch, gradient = (op for op in graph.ops if op.kind in kinds.BRANCHES)
    (returned,) = (v for v in branch.outputs if graph.values[v].dtype == "float32")
    assert returned in gradient.inputs


def test_sample_and_class_weights_are_inputs():
    weighted = traced_model(keras_models.two_by_two)[1]
    plain = traced_model(lambda: keras_models.two_by_two(weighted=False))[1]
    assert (len(weighted.inputs), len(plain.inputs)) == (6, 4)


def test_a_table_whose_rows_are_updated_is_copied_where_it_is_read():
    """From the first such update on, the kernel of a read copies the whole variable."""
    keras.utils.set_random_seed(0)
    tokens = layers.Input((4,), dtype="int32")
    model = keras.Model(tokens, layers.Dense(2)(layers.Embedding(20_000, 64)(tokens)))
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    data = tf.ones((8, 4), "int32"), tf.ones((8, 4, 2))
    traced = BACKEND.trace(model, data)
    graph, problem = traced.graph, Problem(traced.graph, BACKEND.estimated_profile(traced), None)
    table_bytes = 20_000 * 64 * 4
    (copied,) = (v for v in graph.values if v.nbytes == table_bytes and v.producer is not None)
    read = graph.ops[copied.producer]
    (update,) = (op for op in graph.ops if op.kind == "ResourceScatterSub")
    assert (read.kind, read.recomputable) == ("ReadVariableOp", True)
    assert read.id in update.after
    run = BACKEND.lower(traced, problem, Schedule.store_all(graph))
    peaks = [BACKEND.measure(lambda: run(data))[1].peak_bytes for _ in range(2)]
    assert peaks[1] - peaks[0] >= table_bytes // 2


def test_resident_bytes_count_weights_slots_and_batch(convnet):
    model, traced = convnet
    known = sum(
        v.value.dtype.size * int(np.prod(v.shape))
        for v in keras_models.variables_of(model)
        if v.dtype != "string"
    )
    batch = 8 * 16 * 16 * 3 * 4 + 8 * 4
    assert known * 0.95 <= traced.resident_bytes - batch <= known * 1.2 + 4096


def test_specs_give_the_graph_that_arrays_give():
    model, batch = keras_models.mlp()
    specs = tuple(tf.TensorSpec(a.shape, tf.as_dtype(a.dtype)) for a in batch)
    fingerprint = BACKEND.trace(model, specs).graph.fingerprint
    assert fingerprint == traced_model(keras_models.mlp)[1].graph.fingerprint


class Counts(layers.Layer):
    """Counts how often it is called."""

    calls = 0

    def call(self, x):
        self.calls += 1
        return x


class CountsTotals(keras.Model):
    """Has logs of its own."""

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        return super().compute_metrics(x, y, y_pred, sample_weight) | {"more": 1.0}


def of_two_outputs(**options):
    counts, inputs = Counts(), keras.Input((3,))
    x = counts(inputs)
    outputs = {"a": layers.Dense(1, name="a")(x), "b": layers.Dense(4, name="b")(x)}
    y = {"b": np.zeros((8,), "int32"), "a": np.ones((8, 1), "float32")}
    losses = {"a": "mse", "b": "sparse_categorical_crossentropy"}
    model = CountsTotals if options.pop("own", False) else keras.Model
    model = model(inputs, outputs)
    model.compile("sgd", losses, metrics={"b": "accuracy"}, **options)
    return model, counts, y


def of_layers():
    counts = Counts()
    model = keras.Sequential([keras.Input((3,)), counts, layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"], weighted_metrics=[keras.metrics.R2Score()])
    return model, counts, np.ones((8, 1), "float32")


@pytest.mark.parametrize("make", [of_two_outputs, of_layers])
def test_a_step_is_traced_once_and_makes_what_keras_makes(make):
    x = np.ones((8, 3), "float32")
    model, counts, y = make()
    counts.calls = 0
    backend().trace(model, backend().example_batch(model, (x, y, np.ones(8, "float32"))))
    assert counts.calls == (1 if make is of_two_outputs else 2)  # R2Score makes more at its update
    plain, _, y = make()
    plain.train_on_batch(x, y, np.ones(8, "float32"))
    for of in (model, plain):
        of.made = [re.sub(r"_\d+", "", variable.path) for variable in of.metrics_variables]
        of.names = [metric.name for metric in of.metrics]
    assert model.names == plain.names
    assert model.made == plain.made
    assert [v.dtype for v in model.metrics_variables] == [v.dtype for v in plain.metrics_variables]


@pytest.mark.parametrize(
    ("names", "as_given", "traces"),
    [("ba", list, 1), ("ba", dict, 2), ("b", lambda y: y["b"], 1)],
)
def test_targets_may_have_another_structure_than_outputs(names, as_given, traces):
    counts, inputs, x = Counts(), keras.Input((3,)), np.ones((8, 3), "float32")
    hidden = counts(inputs)
    model = keras.Model(inputs, [layers.Dense(1, name=name)(hidden) for name in names])
    model.compile("sgd", "mse")
    y = {name: np.ones((8, 1), "float32") for name in names}
    y = list(y.values()) if as_given is list else as_given(y)
    counts.calls = 0
    backend().trace(model, backend().example_batch(model, (x, y)))
    assert counts.calls == traces
    assert np.isfinite(model.train_on_batch(x, y)).all()


def test_a_model_that_counts_in_its_own_way_makes_what_it_counts_with_in_its_step():
    model, counts, y = of_two_outputs(own=True)
    counts.calls = 0
    batch = backend().example_batch(model, (np.ones((8, 3), "float32"), y))
    assert backend().trace(model, batch).graph.ops
    assert counts.calls == 2


def test_sparse_batch_is_refused_with_a_reason():
    model, (x, y) = keras_models.mlp()
    with pytest.raises(UnsupportedModelError, match="dense tensors"):
        BACKEND.trace(model, (tf.sparse.from_dense(x), y))


# ------------------------------------------------------------------ what oneDNN does with memory


def pooled():
    """Two convolutions added up, pooled, and classified per pixel."""
    inputs = keras.Input((16, 16, 4))
    x = keras.layers.Conv2D(4, 3, padding="same")(inputs)
    x = keras.layers.MaxPooling2D()(keras.layers.Add()([x, keras.layers.Conv2D(4, 1)(x)]))
    model = keras.Model(inputs, keras.layers.Conv2D(3, 1, activation="softmax")(x))
    model.compile("sgd", "sparse_categorical_crossentropy", jit_compile=False)
    return model, (np.zeros((8, 16, 16, 4), np.float32), np.zeros((8, 8, 8), np.int32))


@pytest.mark.skipif(bool(tf.config.list_physical_devices("GPU")), reason="oneDNN runs on the CPU")
def test_pooling_has_an_index_per_element_that_its_gradient_reads():
    graph = traced_model(pooled)[1].graph
    (forward,) = [op for op in graph.ops if op.kind == "MaxPool"]
    (gradient,) = [op for op in graph.ops if op.kind == "MaxPoolGrad"]
    output, index = forward.outputs
    assert graph.values[index].nbytes * 4 == graph.values[output].nbytes == 8 * 8 * 8 * 4 * 4
    assert graph.readers[index] == (gradient.id,)


def test_buffers_that_kernels_take_over():
    """The loss hands the logits' buffer to their gradient, not the labels'; a sum is formed in
    place of what is added, with the convolution that oneDNN fuses it with or alone."""
    graph = traced_model(pooled)[1].graph
    (loss,) = [op for op in graph.ops if op.kind == "SparseSoftmaxCrossEntropyWithLogits"]
    logits = max(loss.inputs, key=lambda v: graph.values[v].nbytes)
    assert loss.may_reuse == (logits,)
    (sum_,) = [op for op in graph.ops if re.search(r"/add(_\d+)*/Add$", op.name)]
    assert sum_.kind in ("_FusedConv2D", "AddV2")
    assert {graph.values[v].nbytes for v in sum_.may_reuse} == {
        graph.values[sum_.outputs[0]].nbytes
    }


def test_zeros_for_a_variable_that_went_through_a_loop_have_its_bytes():
    graph = traced_model(keras_models.lstm)[1].graph
    zeros = [op for op in graph.ops if op.kind == "Fill" and "while/zeros" in op.name]
    assert zeros
    assert all(graph.values[op.outputs[0]].shape is not None for op in zeros)


class Checks(keras.Sequential):
    """Its step checks the loss, and prints after that."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        tf.debugging.check_numerics(loss, "loss is bad")
        tf.print("checked")
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": loss}


def test_a_check_whose_result_nobody_reads_runs_once_and_what_follows_it_waits():
    def make():
        model = Checks([layers.Input((3,)), layers.Dense(1)])
        model.compile("sgd", "mse")
        return model, (np.ones((2, 3), "float32"), np.ones((2, 1), "float32"))

    ops = traced_model(make)[1].graph.ops
    (check,) = (op for op in ops if op.kind.startswith("CheckNumerics"))
    (printed,) = (op for op in ops if op.kind == "PrintV2")
    assert not check.recomputable
    assert check.id in printed.after


class Returns(keras.Sequential):
    """Its step writes a variable, returns it, and writes it again."""

    def train_step(self, data):
        if not hasattr(self, "total"):
            self.total = tf.Variable(tf.zeros((64, 64)), trainable=False)
        logs = super().train_step(data)
        self.total.assign_add(tf.ones((64, 64)))
        logs["total"] = tf.identity(self.total)
        self.total.assign(self.total * 0.5)
        return logs


def test_what_a_step_returns_is_read_before_it_is_overwritten():
    def make():
        model = Returns([layers.Input((3,)), layers.Dense(1)])
        model.compile("sgd", "mse")
        return model, (np.ones((2, 3), "float32"), np.ones((2, 1), "float32"))

    graph = traced_model(make)[1].graph
    (returned,) = (v for v in graph.outputs if graph.values[v].shape == (64, 64))
    read = graph.values[returned].producer
    (before,) = graph.ops[read].after
    assert graph.ops[before].kind == "AssignAddVariableOp"
    assert any(read in op.after and op.kind == "AssignVariableOp" for op in graph.ops)


def graphs_with_ops():
    gc.collect()
    return sum(isinstance(one, tf.Graph) and bool(one.get_operations()) for one in gc.get_objects())


def test_no_graph_stays_of_a_step_with_a_gradient_of_its_own():
    """TensorFlow registers such gradients for good, with what they close over."""

    @tf.custom_gradient
    def doubled(x):
        return 2 * x, lambda upstream: 2 * upstream

    inputs = keras.Input((4,))
    model = keras.Model(inputs, layers.Dense(1)(layers.Lambda(doubled)(layers.Dense(3)(inputs))))
    model.compile("sgd", "mse")
    batch = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")
    BACKEND.trace(model, batch)  # makes what Keras keeps
    before = graphs_with_ops()
    BACKEND.trace(model, batch)
    assert graphs_with_ops() == before
