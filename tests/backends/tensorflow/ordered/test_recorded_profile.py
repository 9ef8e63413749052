"""Profiles of recordings that are written by hand, on a CPU and on a GPU."""

import gpu_stand_in
import keras_models
import numpy as np
import pytest
from recorded_trace import (
    Trace,
    full_trace,
    kernels_of,
    lowered_with,
    mlp_step,
    recorded,
    traced_of,
)

from keras_remat.backends.tensorflow import backend, private
from keras_remat.backends.tensorflow.graph import kinds
from keras_remat.backends.tensorflow.graph.trace import trace
from keras_remat.backends.tensorflow.ordered.profile import (
    blindness,
    estimated_profile,
    measured_profile,
)
from keras_remat.backends.tensorflow.profiler import device
from keras_remat.backends.tensorflow.profiler.events import MEASURED_STEP
from keras_remat.core.schedule import Schedule

BACKEND = backend()


@pytest.fixture(scope="module")
def mlp():
    return mlp_step()


@pytest.fixture(scope="module")
def convnet():
    """A step with convolutions."""
    return traced_of(keras_models.convnet()[0], 8)


@pytest.fixture(scope="module")
def recurrent():
    """A step with a loop, and with every op in it, however small."""
    model, batch = keras_models.lstm()
    return trace(model, BACKEND.example_batch(model, batch), smallest_bytes=0)


# ------------------------------------------------------------------ events written by hand


def test_times_are_the_median_of_an_ops_runs_and_copies(mlp):
    traced = mlp[2]
    order = Schedule.store_all(traced.graph).order
    again = next(i for i in order if traced.graph.ops[i].recomputable)
    lowered = lowered_with(traced, (*order, again))
    trace = full_trace(lowered)
    trace.event(f"{traced.graph.ops[again].name}:Kind", 5000, 100)
    trace.event(f"{traced.graph.ops[again].name}:Kind", 6000, 50)
    trace.event("somebody else's:Kind", 7000, 10**6)
    trace.event("no separator", 8000, 10**6)
    profile = measured_profile(lowered, recorded(trace), 123)
    assert profile.op_time_s[again] == pytest.approx(np.median([7, 7, 50, 100]) * 1e-6)
    others = {t for i, t in enumerate(profile.op_time_s) if i != again and i in order}
    assert sorted(others) == pytest.approx([7e-6])
    assert profile.source == "measured"
    assert profile.resident_bytes == 123


def test_time_of_an_op_of_two_nodes_is_the_sum_of_theirs(convnet):
    traced, lowered = convnet, lowered_with(convnet)
    trace = full_trace(lowered, duration_us=7)
    (kernel, bias), *_ = (names for names in lowered.names if len(names) == 2)
    without = measured_profile(lowered, recorded(trace), 0).op_time_s[traced.op_id[kernel]]
    trace.event(f"{bias}:BiasAddGrad", 5000, 4)
    profile = measured_profile(lowered, recorded(trace), 0)
    assert traced.op_id[bias] == traced.op_id[kernel]
    assert without == pytest.approx(7e-6)
    assert profile.op_time_s[traced.op_id[kernel]] == pytest.approx(11e-6)


def test_scratch_of_a_cross_entropy_is_known_without_a_recording():
    """As large as the losses it computes."""
    model, batch = keras_models.segmenter()
    traced = BACKEND.trace(model, BACKEND.example_batch(model, batch))
    profile = estimated_profile(traced)
    (op,) = (op for op in traced.graph.ops if op.kind == "SparseSoftmaxCrossEntropyWithLogits")
    assert (
        profile.op_workspace_bytes[op.id]
        == traced.graph.values[op.outputs[0]].nbytes
        == 4 * batch[1].size
    )
    others = [bytes_ for at, bytes_ in enumerate(profile.op_workspace_bytes) if at != op.id]
    assert private.onednn_is_on() == (sum(others) == 0)


def test_workspace_is_the_most_temporary_bytes_held_at_once(mlp):
    traced = mlp[2]
    lowered = lowered_with(traced)
    (first,), (second,), (third,) = lowered.names[:3]
    trace = full_trace(lowered)
    trace.allocate(first, 1, 0xA, 100)
    trace.allocate(first, 2, 0xB, 30)
    trace.free(3, 0xA)
    trace.allocate(first, 4, 0xA, 50)  # the address again: 30 + 50 now, less than 130 before
    trace.free(5, 0xA)
    trace.free(6, 0xB)
    own = [
        traced.graph.values[v].nbytes for v in traced.graph.ops[lowered.schedule.order[1]].outputs
    ]
    for at, nbytes in enumerate(
        [*own, 10**6]
    ):  # and one more that no op has, as oneDNN's kernels do
        trace.allocate(second, 7, 0xC0 + at, nbytes, region="output")
    trace.allocate("nobody", 9, 0xE, 10**9)
    trace.free(10, 0xF)
    trace.free(21, 0xAA)
    trace.allocate(third, 20, 0xAA, 70)  # written out of order
    trace.allocate(third, 22, 0xAA, 71)
    profile = measured_profile(lowered, recorded(trace), 0)
    ids = lowered.schedule.order[:3]
    assert [profile.op_workspace_bytes[i] for i in ids] == [130, 10**6, 71]
    assert sum(profile.op_workspace_bytes) == 130 + 10**6 + 71


@pytest.mark.parametrize(("freed_at", "workspace"), [(5, 4096), (60, 0)])
def test_output_that_a_kernel_asks_for_as_workspace_outlives_it(mlp, freed_at, workspace):
    """A reduction's; what is as large and goes back while the op runs is workspace."""
    traced = mlp[2]
    lowered = lowered_with(traced)
    sizes = [
        [traced.graph.values[v].nbytes for v in traced.graph.ops[i].outputs]
        for i in lowered.schedule.order
    ]
    at = next(at for at, nbytes in enumerate(sizes) if nbytes == [4096])
    trace = full_trace(lowered)
    trace.event(f"{lowered.names[at][0]}:Kind", 2, 10)
    trace.allocate(lowered.names[at][0], 3, 0xA, 4096)
    trace.free(freed_at, 0xA)
    profile = measured_profile(lowered, recorded(trace), 0)
    assert profile.op_workspace_bytes[lowered.schedule.order[at]] == workspace


def test_what_runs_inside_a_loop_is_the_loops():
    """Two recorded steps, four kernels of 5 microseconds: 10 a step; and all that is held at
    once beside its outputs."""
    model, batch = keras_models.lstm()
    traced = BACKEND.trace(model, BACKEND.example_batch(model, batch))
    lowered = lowered_with(traced)
    loop = next(op for op in traced.graph.ops if op.kind in kinds.CONTROL_FLOW)
    name = lowered.names[lowered.schedule.order.index(loop.id)][0]
    outputs = sum(traced.graph.values[v].nbytes for v in loop.outputs)
    assert outputs > 0
    trace = Trace()
    for at, names in enumerate(lowered.names):
        for step in range(2):
            if names != (name,):
                trace.event(f"{names[0]}:Kind", 10 * at + 10**6 * step, 3)
    for at in range(4):
        trace.event(f"{name}/body/_7/cell/MatMul:MatMul", 5 * 10**6 + 10 * at, 5)
        trace.allocate(
            f"{name}/body/_7/cell/MatMul", 5 * 10**6 + 10 * at, 0xA0 + at, outputs, region="output"
        )
    profile = measured_profile(lowered, recorded(trace), 0)
    assert profile.op_time_s[loop.id] == pytest.approx(10e-6)
    assert profile.op_workspace_bytes[loop.id] == 3 * outputs


@pytest.mark.parametrize("freed", [-0.5, 0.5, 10**6], ids=["unread", "read", "in the next step"])
def test_what_a_loop_holds_beyond_its_outputs_is_workspace(freed, recurrent):
    """Lists that nobody reads are given back before the loop's outputs are read."""
    graph, lowered = recurrent.graph, lowered_with(recurrent)
    loop = next(op for op in graph.ops if "While" in op.kind and op.phase == "forward")
    outputs = [graph.values[v] for v in loop.outputs]
    assert any(value.nbytes and value.dtype == "variant" for value in outputs)
    at_of = {op_id: at for at, op_id in enumerate(lowered.schedule.order)}
    read = min(at_of[i] for v in loop.outputs for i in graph.readers[v] if i in at_of)
    recording = full_trace(lowered)
    for step in range(2):
        began, later = 10 * at_of[loop.id] + 10**5 * step, 10 * read + 10**5 * step
        recording.event(f"{lowered.names[read][0]}:Kind", later, 3)
        name = f"{lowered.names[at_of[loop.id]][0]}/cell/MatMul"
        held = [(sum(value.nbytes for value in outputs), later + 10 * freed), (5000, later - 5)]
        for at, (nbytes, until) in enumerate(held):
            recording.allocate(name, began, 2 * step + at + 1, nbytes, region="output")
            recording.free(until, 2 * step + at + 1)
    profile = measured_profile(lowered, recorded(recording), 0)
    assert profile.op_workspace_bytes[loop.id] == 5000


def test_too_few_ops_seen_is_no_profile_and_missing_ones_keep_the_estimate(mlp):
    traced = mlp[2]
    lowered = lowered_with(traced)
    half = len(traced.graph.needed) // 2
    trace, estimate = Trace(), estimated_profile(traced)
    for at, (name,) in enumerate(lowered.names[: half - 1]):
        trace.event(f"{name}:Kind", at, 3)
    assert measured_profile(lowered, recorded(trace), 0) is None
    trace.event(f"{lowered.names[half - 1][0]}:Kind", 500, 3)
    profile = measured_profile(lowered, recorded(trace), 0)
    order = lowered.schedule.order
    assert [profile.op_time_s[i] for i in order[:half]] == [pytest.approx(3e-6)] * half
    assert [profile.op_time_s[i] for i in order[half:]] == [
        estimate.op_time_s[i] for i in order[half:]
    ]


# ------------------------------------------------------------------ a GPU


def test_kernels_decide_what_an_op_costs_on_a_gpu(mlp):
    """Launches take 7 microseconds; kernels a second, but for the first, which is a small one."""
    lowered = lowered_with(mlp[2])
    plane = kernels_of(lowered, lambda at: 1.0 if at else 1e-6, runs=3)
    with gpu_stand_in.gpu():
        launches = Trace()
        for run in range(3):
            for at, (name, *_) in enumerate(lowered.names):
                launches.event(f"{name}:Kind", 10 * at + 10**6 * run, 7)
        profile = measured_profile(lowered, recorded(launches, kernels=[plane]), 0)
    order = lowered.schedule.order
    assert profile.op_time_s[order[0]] == pytest.approx(7e-6)
    assert [profile.op_time_s[i] for i in order[1:]] == pytest.approx([1.0] * (len(order) - 1))
    assert (profile.source, profile.device) == ("measured", "GPU:0")


def test_times_on_a_gpu_sum_to_the_measured_step(mlp):
    """Launches and kernels overlap."""
    lowered = lowered_with(mlp[2])
    trace = full_trace(lowered)
    for run, seconds in enumerate((0.02, 0.01, 0.5)):
        trace.event(MEASURED_STEP, 10**6 * run, seconds * 1e6)
    with gpu_stand_in.gpu():
        profile = measured_profile(
            lowered, recorded(trace, kernels=[kernels_of(lowered, lambda at: 0.1 * (at + 1))]), 0
        )
    order = lowered.schedule.order
    assert sum(profile.op_time_s[i] for i in order) == pytest.approx(0.02)
    assert profile.op_time_s[order[9]] == pytest.approx(10 * profile.op_time_s[order[0]])


def test_kernels_of_a_repeated_op_are_those_of_one_run(mlp):
    traced = mlp[2]
    order = Schedule.store_all(traced.graph).order
    again = next(i for i in order if traced.graph.ops[i].recomputable)
    lowered = lowered_with(traced, (*order, again))
    with gpu_stand_in.gpu():
        profile = measured_profile(
            lowered,
            recorded(full_trace(lowered), kernels=[kernels_of(lowered, lambda at: 1.0)]),
            0,
        )
    assert profile.op_time_s[again] == pytest.approx(1.0)


def test_without_kernels_the_split_is_estimated_and_the_sum_measured(mlp):
    lowered = lowered_with(mlp[2])
    trace = full_trace(lowered)
    trace.event(MEASURED_STEP, 0, 5e5)
    refusal = "CUPTI_ERROR_INSUFFICIENT_PRIVILEGES"
    with gpu_stand_in.gpu():
        recording = recorded(trace, errors=[refusal])
        profile = measured_profile(lowered, recording, 0)
        estimate = estimated_profile(mlp[2])
        assert refusal in blindness(recording)
        assert "NVreg_RestrictProfilingToAdminUsers" in blindness(recording)
        assert blindness(recorded(trace, kernels=[kernels_of(lowered, lambda at: 1.0)])) == ""
    assert profile.source == "estimated"
    order = lowered.schedule.order
    assert sum(profile.op_time_s[i] for i in order) == pytest.approx(0.5)
    ratios = [a / b for a, b in zip(profile.op_time_s, estimate.op_time_s, strict=True)]
    assert ratios == pytest.approx([ratios[0]] * len(ratios))
    assert blindness(recording) == "", "a CPU has no kernels of its own"


def test_only_the_device_s_own_allocator_counts(mlp, monkeypatch):
    lowered = lowered_with(mlp[2])
    (first,) = lowered.names[0]
    trace = full_trace(lowered)
    for allocator, address, nbytes in (("GPU_0_bfc", 0xA, 1000), ("gpu_host_bfc", 0xB, 10**6)):
        trace.event(
            "MemoryAllocation",
            1,
            tf_op=first,
            addr=address,
            requested_bytes=nbytes,
            region_type="temp",
            allocator_name=allocator,
        )
    with gpu_stand_in.gpu():
        monkeypatch.setattr(device, "allocator_name", lambda: "GPU_0")
        profile = measured_profile(lowered, recorded(trace), 0)
    assert profile.op_workspace_bytes[lowered.schedule.order[0]] == 1000


def test_estimates_on_a_gpu_have_its_rates_and_room_for_convolutions(convnet, monkeypatch):
    traced = convnet
    on_cpu = estimated_profile(traced)
    convolutions = [op for op in traced.graph.ops if op.kind in kinds.CONVOLUTIONS]
    with gpu_stand_in.gpu():
        profile = estimated_profile(traced)
        monkeypatch.setenv("TF_CUDNN_WORKSPACE_LIMIT_IN_MB", "0")
        limited = estimated_profile(traced)
    for op in convolutions:
        moved = sum(traced.graph.values[v].nbytes for v in (*op.inputs, *op.outputs))
        assert profile.op_workspace_bytes[op.id] == moved
    assert convolutions
    assert {limited.op_workspace_bytes[op.id] for op in convolutions} == {0}
    assert max(profile.op_time_s) < max(on_cpu.op_time_s)


def test_measured_workspace_replaces_the_guess(convnet):
    traced, lowered = convnet, lowered_with(convnet)
    trace = full_trace(lowered)
    (first, *_) = lowered.names[0]
    with gpu_stand_in.gpu():
        blind = measured_profile(lowered, recorded(trace), 0)
        assert blind.op_workspace_bytes == estimated_profile(traced).op_workspace_bytes
        trace.allocate(first, 1, 0xA, 640)
        profile = measured_profile(lowered, recorded(trace), 0)
    assert profile.op_workspace_bytes[lowered.schedule.order[0]] == 640
    assert all(
        profile.op_workspace_bytes[op.id] == 0
        for op in traced.graph.ops
        if op.kind in kinds.CONVOLUTIONS
    )
