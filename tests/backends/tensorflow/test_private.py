"""What TensorFlow is asked in private: Grappler for this process's devices, placement, limits."""

from collections import Counter

import gpu_stand_in
import keras
import keras_models
import pytest
import tensorflow as tf
from tensorflow.python.grappler import cluster as grappler_cluster

from keras_remat.backends.tensorflow import backend, private
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.errors import UnsupportedModelError

BACKEND = backend()


def traced_of(model, batch):
    return BACKEND.trace(model, BACKEND.example_batch(model, batch))


# ------------------------------------------------------------------ Grappler


def test_grappler_starts_no_session(monkeypatch):
    """It is told which devices there are; a session would make them anew, on every card."""
    clusters = []
    real = grappler_cluster.Cluster

    def cluster(devices=None, **options):
        clusters.append([device.name for device in devices])
        return real(devices=devices, **options)

    monkeypatch.setattr(grappler_cluster, "Cluster", cluster)
    traced_of(*keras_models.mlp())
    assert clusters
    assert all(names == ["/job:localhost/replica:0/task:0/device:CPU:0"] for names in clusters)


def test_a_graph_that_grappler_refuses_is_one_that_cannot_be_planned(monkeypatch):
    """So it does with numbers in ``float8_e5m2``, which a model that is quantized to float8 has."""

    def refuse(*_, **__):
        raise tf.errors.UnimplementedError(None, None, "Converting f8E5M2 to DataType\n\twhen ...")

    monkeypatch.setattr(private.tf_optimizer, "OptimizeGraph", refuse)
    with pytest.raises(UnsupportedModelError, match=r"step: Converting f8E5M2 to DataType$"):
        traced_of(*keras_models.mlp())


def image_model(blocks=3):
    inputs = x = keras.Input((32, 32, 3))
    for _ in range(blocks):
        y = keras.layers.Conv2D(16, 3, padding="same", use_bias=False)(x)
        y = keras.layers.ReLU()(keras.layers.BatchNormalization()(y))
        x = y if x.shape[-1] != 16 else keras.layers.Add()([x, y])
    outputs = keras.layers.Dense(10)(keras.layers.GlobalAveragePooling2D()(x))
    model = keras.Model(inputs, outputs)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, jit_compile=False)
    return model


def transposes_of(graph):
    return Counter(op.kind for op in graph.ops)["Transpose"]


def test_kernels_for_every_device_keep_the_layout(monkeypatch):
    """Grappler turns images for a GPU's convolutions; where ops between them count as the CPU's, it
    turns them back and forth."""
    model = image_model()
    with gpu_stand_in.gpu(layout=True):
        known = traced_of(model, 16)
        convolutions = [node for node in known.nodes.values() if node.op == "Conv2D"]
        assert {node.attr["data_format"].s for node in convolutions} == {b"NCHW"}
        default = {
            kind
            for kind in {node.op for node in known.nodes.values()}
            if private.kernels.get_registered_kernels_for_op(kind).kernel
            and {"DEFAULT"}
            <= {k.device_type for k in private.kernels.get_registered_kernels_for_op(kind).kernel}
        }
        assert {"Shape", "ReadVariableOp"} & default
        monkeypatch.setattr(private, "_has_gpu_kernel", lambda kind: kind not in default)
        before = traced_of(model, 16)
    assert transposes_of(known.graph) < transposes_of(before.graph) / 2
    assert not {node.device for node in known.nodes.values()} - {""}


def test_limit_is_that_of_the_device_by_name():
    assert private.device_memory_limit_bytes("CPU:0") > 0
    assert private.device_memory_limit_bytes("/device:CPU:0") > 0
    with pytest.raises(LookupError, match="GPU:7"):
        private.device_memory_limit_bytes("GPU:7")


def test_lists_of_devices_are_freed(monkeypatch):
    """They are C's: Python does not free them."""
    alive, eager = set(), private.pywrap_tfe
    make, free = eager.TFE_ContextListDevices, eager.TF_DeleteDeviceList

    def made(handle):
        devices = make(handle)
        alive.add(id(devices))
        return devices

    def freed(devices):
        alive.remove(id(devices))
        free(devices)

    monkeypatch.setattr(eager, "TFE_ContextListDevices", made)
    monkeypatch.setattr(eager, "TF_DeleteDeviceList", freed)
    private.device_memory_limit_bytes("CPU:0")
    with pytest.raises(LookupError):
        private.device_memory_limit_bytes("GPU:7")
    assert not alive


# ------------------------------------------------------------------ placement


def test_ops_without_a_kernel_for_the_asked_device_run_elsewhere():
    """As TensorFlow's own functions have it by default."""

    def build(x):
        with tf.device("/device:GPU:0"):
            return [tf.strings.length(x)]

    function = private.build_function(build, [tf.TensorSpec([2], tf.string)])
    (lengths,) = private.call_verbatim(function, [tf.constant(["a", "bb"])])
    assert lengths.numpy().tolist() == [1, 2]


class OnTheCpu(keras.layers.Layer):
    """A layer whose author placed it."""

    def call(self, x):
        with tf.device("/device:CPU:0"):
            return tf.math.softplus(x, name="placed_by_hand")


def test_devices_that_the_user_wrote_stay_and_the_step_trains():
    inputs = keras.Input((8,))
    x = OnTheCpu()(keras.layers.Dense(16)(inputs))
    model = keras.Model(inputs, keras.layers.Dense(1)(x))
    model.compile("sgd", "mse", jit_compile=False)
    with gpu_stand_in.gpu(layout=True):
        traced = traced_of(model, 4)
    placed = {name: node.device for name, node in traced.nodes.items() if node.device}
    assert set(placed.values()) == {"/device:CPU:0"}
    assert any("Softplus" in traced.nodes[name].op for name in placed)
    traced = traced_of(model, 4)
    problem = Problem(traced.graph, BACKEND.estimated_profile(traced))
    step = BACKEND.lower(traced, problem, Schedule.store_all(traced.graph))
    logs = step((tf.ones((4, 8)), tf.ones((4, 1)), None))
    assert float(logs["loss"]) > 0


def test_a_convolution_in_bfloat16_becomes_no_op_without_that_type():
    """Where oneDNN has kernels for it, Grappler fuses such a one with its bias."""
    model, (x, y) = keras_models.mixed_precision(policy="mixed_bfloat16")
    loss = model.test_on_batch(x, y)[0]
    traced = traced_of(model, len(x))
    assert all(map(private.has_legal_types, traced.nodes.values()))
    problem = Problem(traced.graph, BACKEND.estimated_profile(traced))
    step = BACKEND.lower(traced, problem, Schedule.store_all(traced.graph))
    logs = step((tf.constant(x), tf.cast(y, tf.int32), None))
    assert float(logs["loss"]) == pytest.approx(loss, rel=0.2)


@pytest.mark.parametrize(
    ("kind", "dtype", "legal"),
    [
        ("_FusedConv2D", tf.bfloat16, False),
        ("_FusedConv2D", tf.float16, True),
        ("_FusedMatMul", tf.bfloat16, True),
        ("NoSuchOp", tf.bfloat16, True),
    ],
)
def test_types_that_an_op_has(kind, dtype, legal):
    assert private.has_legal_types(node(kind, dtype)) is legal


def node(kind, dtype=tf.float32, device=""):
    made = tf.compat.v1.NodeDef(name="n", op=kind, device=device)
    made.attr["T"].type = dtype.as_datatype_enum
    return made


@pytest.mark.parametrize(
    ("made", "stays"),
    [
        (node("MatMul"), False),
        (node("MatMul", device="/job:localhost/replica:0/task:0/device:CPU:0"), True),
        (node("MatMul", device="/device:cpu:0"), True),
        (node("Shape"), True),
        (node("AddV2", tf.int32), True),
        (node("AddV2"), False),
        (node("NoSuchOp"), False),
    ],
)
def test_what_stays_on_the_host_of_a_gpu(made, stays):
    with gpu_stand_in.gpu():
        assert private.stays_on_host(made) is stays


def test_what_has_no_kernel_for_a_gpu_stays_on_the_host(monkeypatch):
    monkeypatch.setattr(private, "_registered_kernels", lambda kind, types: ())
    assert private.stays_on_host(node("StringJoin"))
