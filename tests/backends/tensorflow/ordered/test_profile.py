"""Profiles: estimates from shapes, and what a real recording shows."""

import tempfile
from types import SimpleNamespace

import keras
import keras_models
import numpy as np
import pytest
import tensorflow as tf
from recorded_trace import Trace, lowered_with, mlp_step, recorded, traced_of

from keras_remat.backends.tensorflow import backend
from keras_remat.backends.tensorflow.graph import kinds
from keras_remat.backends.tensorflow.graph.nodes import is_compiled
from keras_remat.backends.tensorflow.ordered.lower import LoweredStep
from keras_remat.backends.tensorflow.ordered.profile import (
    _flops,
    estimated_profile,
    measured_profile,
    multiply_adds,
)
from keras_remat.backends.tensorflow.profiler.recorder import Recorder, Recording
from keras_remat.core.graph import Op
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule

BACKEND = backend()


@pytest.fixture(scope="module")
def mlp():
    return mlp_step()


# ------------------------------------------------------------------ estimates


def test_matmuls_cost_twice_their_multiply_adds(mlp):
    traced = mlp[2]
    flops = [_flops(traced, op) for op in traced.graph.ops if op.kind in ("MatMul", "_FusedMatMul")]
    assert {round(f) for f in flops} == {2 * 32 * 16 * 64, 2 * 32 * 64}


def test_fused_matmul_s_bias_is_no_operand():
    node = tf.compat.v1.NodeDef(name="fused", op="_FusedMatMul", input=["a", "b", "bias"])
    shapes = {"a:0": (7, 5), "b:0": (5, 3), "bias:0": (3,), "fused:0": (7, 3)}
    op = Op(0, "fused", "_FusedMatMul", (), ())
    assert _flops(SimpleNamespace(handles={0: node}, tensor_shapes=shapes), op) == pytest.approx(
        2 * 7 * 5 * 3
    )
    assert (
        _flops(SimpleNamespace(handles={0: node}, tensor_shapes={**shapes, "a:0": None}), op) == 0.0
    )


@pytest.mark.parametrize("batch", [1, 5])
def test_convolutions_and_their_gradients_cost_twice_their_multiply_adds(batch):
    """Every element of the output takes kernel height x width x input channels multiply-adds, and
    so does either gradient."""
    inputs = keras.Input((12, 12, 4))
    x = keras.layers.Conv2D(8, 3, padding="same")(inputs)
    x = keras.layers.DepthwiseConv2D(3, padding="same")(x)
    x = keras.layers.Conv2D(2, 3, strides=2, padding="same")(x)
    model = keras.Model(inputs, keras.layers.GlobalAveragePooling2D()(x))
    model.compile("sgd", "mse")
    traced = traced_of(model, batch)
    wide, depthwise, strided = (
        2 * batch * 144 * 8 * 9 * 4,
        2 * batch * 144 * 8 * 9,
        2 * batch * 36 * 2 * 9 * 8,
    )
    flops = {}
    for op in traced.graph.ops:
        if op.kind in kinds.CONVOLUTIONS:
            # Grappler has fused the biases
            kind = op.kind.removeprefix("_Fused")
            flops.setdefault(kind, set()).add(round(_flops(traced, op)))
    assert flops == {
        "Conv2D": {wide, strided},
        "Conv2DBackpropFilter": {wide, strided},
        "Conv2DBackpropInput": {strided},
        "DepthwiseConv2dNative": {depthwise},
        "DepthwiseConv2dNativeBackpropInput": {depthwise},
        "DepthwiseConv2dNativeBackpropFilter": {depthwise},
    }


def test_convolutions_of_three_dimensions_count():
    inputs = keras.Input((4, 4, 4, 2))
    model = keras.Model(
        inputs, keras.layers.Flatten()(keras.layers.Conv3D(3, 2, padding="same")(inputs))
    )
    model.compile("sgd", "mse")
    traced = traced_of(model, 2)
    assert {
        _flops(traced, op) for op in traced.graph.ops if op.kind in ("Conv3D", "_FusedConv3D")
    } == {2 * 2 * 64 * 3 * 8 * 2}


@pytest.mark.parametrize(
    ("layout", "image", "result"),
    [(b"NHWC", (5, 12, 12, 4), (5, 12, 12, 8)), (b"NCHW", (5, 4, 12, 12), (5, 8, 12, 12))],
)
def test_convolutions_count_the_same_in_the_layout_of_a_gpu(layout, image, result):
    node = tf.compat.v1.NodeDef(op="Conv2D")
    node.attr["data_format"].s = layout
    assert multiply_adds(node, [image, (3, 3, 4, 8)], result) == 2 * 5 * 144 * 8 * 9 * 4


def test_estimate_has_every_op_no_workspace_and_its_source(mlp):
    traced = mlp[2]
    profile = estimated_profile(traced)
    assert len(profile.op_time_s) == len(traced.graph.ops)
    assert min(profile.op_time_s) > 0
    assert set(profile.op_workspace_bytes) == {0}
    assert (profile.source, profile.backend) == ("estimated", "tensorflow")
    assert profile.resident_bytes == traced.resident_bytes
    assert estimated_profile(traced, 10**9).resident_bytes == 10**9
    assert estimated_profile(traced, 0).resident_bytes == 0  # what an allocator says, counts


def test_larger_batches_are_estimated_longer():
    model, _ = keras_models.mlp(8, width=256, blocks=1, dropout=0)
    seconds = [sum(estimated_profile(traced_of(model, size)).op_time_s) for size in (8, 512, 4096)]
    assert seconds == sorted(set(seconds))
    assert seconds[2] > 3 * seconds[1]


# ------------------------------------------------------------------ a real recording


def test_recording_of_real_steps_sees_most_ops_and_their_workspace(mlp):
    model, batch, traced = mlp
    data = BACKEND.example_batch(model, batch)
    problem = Problem(traced.graph, estimated_profile(traced))
    run = LoweredStep(traced, problem, Schedule.store_all(traced.graph))
    run(data)
    recorder = Recorder()
    assert recorder.stop() == Recording()
    assert recorder.start()
    for _ in range(2):
        run(data)
    recording = recorder.stop()
    profile = measured_profile(run, recording, BACKEND.device.in_use_bytes())
    assert profile.source == "measured"
    seen = sum(a != b for a, b in zip(profile.op_time_s, problem.profile.op_time_s, strict=True))
    assert seen > 0.8 * len(traced.graph.needed)


@pytest.fixture(scope="module")
def grouped():
    """A step with a grouped convolution, which Keras has compiled by XLA on a CPU."""
    inputs = keras.Input((24, 24, 32))
    x = keras.layers.Conv2D(32, 7, padding="same", groups=32)(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.GlobalAveragePooling2D()(x)))
    model.compile("sgd", "mse")
    batch = (np.ones((8, 24, 24, 32), np.float32), np.ones((8, 1), np.float32))
    traced = traced_of(model, batch)
    compiled = [op.id for op in traced.graph.ops if is_compiled(traced.handles[op.id])]
    if not compiled:
        pytest.skip("this device has a kernel for them")
    return model, batch, traced, compiled


def test_what_xla_compiles_ends_before_what_reads_it(grouped):
    """The executor goes on from inside of a call, whose event then lasts into the next step's."""
    traced, compiled = grouped[2:]
    lowered = lowered_with(traced)
    graph, order, trace = traced.graph, lowered.schedule.order, Trace()
    reads = {
        op: min(order.index(r) for v in graph.ops[op].outputs for r in graph.readers[v])
        for op in compiled
    }
    for at, (op_id, names) in enumerate(zip(order, lowered.names, strict=True)):
        for name in names:
            if op_id in compiled:
                trace.event("ExecutorState::ProcessAsync::Start", at, 1e4, name=name)
            else:
                trace.event(f"{name}:{graph.ops[op_id].kind}", at, 0.5)
    first = compiled[0]
    trace.allocate("", order.index(first) + 0.1, 0xA, 5000)
    trace.free(order.index(first) + 0.2, 0xA)
    late = reads[first] + 0.6
    trace.allocate("", late, 0xB, 10**6)
    trace.free(late + 0.1, 0xB)
    profile = measured_profile(lowered, recorded(trace), 0)
    for op, reader in reads.items():
        assert profile.op_time_s[op] == pytest.approx((reader - order.index(op)) * 1e-6)
    scratch = estimated_profile(traced).op_workspace_bytes[first]
    assert profile.op_workspace_bytes[first] == max(5000, scratch)


def test_what_xla_compiles_in_a_step_of_its_own_is_seen(grouped):
    """Nothing says whose its scratch is."""
    model, batch, traced, compiled = grouped
    estimated = estimated_profile(traced)
    problem = Problem(traced.graph, estimated)
    run = BACKEND.lower(traced, problem, Schedule.store_all(traced.graph))
    given = BACKEND.example_batch(model, batch)
    run(given)
    recorder = Recorder()
    assert recorder.start()
    for _ in range(3):  # as in fit: on a busy machine, a call may have no event
        run(given)
    profile = measured_profile(run, recorder.stop(), None)
    assert all(profile.op_time_s[op] != estimated.op_time_s[op] for op in compiled)
    if BACKEND.device.has_statistics:
        image = 8 * 24 * 24 * 32 * 4
        most = max(profile.op_workspace_bytes[op] for op in compiled)
        assert most > image, "a gradient's patches"
        for op in compiled:
            known, seen = (p.op_workspace_bytes[op] for p in (estimated, profile))
            # an output that nobody reads is seen as scratch, in a chunk that is rounded up
            same = pytest.approx(seen, rel=0.01, abs=image + 256)
            assert known == same, "running it alone tells"


def test_the_users_profiler_session_is_left_alone(tmp_path):
    tf.profiler.experimental.start(str(tmp_path))
    try:
        recorder = Recorder()
        assert not recorder.start()
        assert recorder.stop() == Recording()
        tf.reduce_sum(tf.ones(8))
    finally:
        tf.profiler.experimental.stop()
    assert list(tmp_path.rglob("*.xplane.pb"))


def test_without_a_folder_to_write_to_nothing_is_recorded(monkeypatch, caplog):
    def full(**options):
        raise OSError("No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", full)
    recorder = Recorder()
    assert not recorder.start()
    assert recorder.stop() == Recording()
    assert "Nothing is recorded" in caplog.text


def test_session_that_the_user_stopped_gives_nothing(caplog):
    recorder = Recorder()
    assert recorder.start()
    tf.profiler.experimental.stop(save=False)
    assert recorder.stop() == Recording()
    assert "ended early" in caplog.text
    assert recorder.start(), "the next recording works"
    recorder.stop()
