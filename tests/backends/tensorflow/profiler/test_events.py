"""What is read out of a recording, on events written by hand."""

import gpu_stand_in
import pytest
from recorded_trace import Trace

from keras_remat.backends.tensorflow.profiler.events import (
    MEASURED_STEP,
    NodeEvent,
    allocation_events,
    kernel_times_s,
    measured_step_s,
    node_events,
)

PS_PER_US = 10**6


def trace(*events, offset_us=0):
    """A trace of events ``(name, start in microseconds, duration in microseconds)``."""
    written = Trace(offset_us)
    for event in events:
        written.event(*event)
    return written


# ------------------------------------------------------------------ nodes


def test_an_executor_s_event_is_a_node_and_its_type():
    plane = trace(("model/dense/MatMul:MatMul", 3, 7)).plane
    assert list(node_events([plane])) == [
        NodeEvent("model/dense/MatMul", 3 * PS_PER_US, 7 * PS_PER_US)
    ]


def test_what_has_no_type_is_no_node():
    plane = trace(("EagerExecute", 0, 9), ("MemoryAllocation", 1, 0), (MEASURED_STEP, 0, 9)).plane
    assert list(node_events([plane])) == []


def test_a_node_s_name_may_hold_colons():
    plane = trace(("while/body:0/add:AddV2", 0, 1)).plane
    assert [event.node for event in node_events([plane])] == ["while/body:0/add"]


def test_time_is_absolute_on_every_line():
    """Each line has a clock that starts at its own time."""
    planes = [trace(("a:A", 2, 1), offset_us=offset).plane for offset in (0, 500)]
    assert [event.start_ps for event in node_events(planes)] == [2 * PS_PER_US, 502 * PS_PER_US]


def test_all_lines_of_a_plane_are_read():
    written = trace(("a:A", 0, 1))
    thread = written.plane.lines.add(timestamp_ns=0, name="another thread")
    thread.events.add(metadata_id=1, offset_ps=5, duration_ps=7)
    assert [event.duration_ps for event in node_events([written.plane])] == [PS_PER_US, 7]


def test_a_gpu_s_planes_hold_no_nodes():
    """Their kernels have names of C++, with colons in them."""
    plane = trace(("void gemm::kernel", 0, 1)).plane
    assert list(node_events([plane]))
    plane.name = "/device:GPU:1"
    assert list(node_events([plane])) == []


# ------------------------------------------------------------------ kernels


def test_kernels_are_summed_by_the_node_that_launched_them():
    plane = gpu_stand_in.device_plane({"a/MatMul:MatMul": 0.5, "b/Relu:Relu": 0.25}, runs=3)
    assert kernel_times_s([plane]) == pytest.approx({"a/MatMul": 1.5, "b/Relu": 0.75})


def test_lines_that_repeat_the_kernels_do_not_count():
    plane = gpu_stand_in.device_plane({"a:A": 0.5})
    assert len(plane.lines) == 2
    assert kernel_times_s([plane]) == pytest.approx({"a": 0.5})
    plane.lines[1].name = "Stream #14(MemcpyD2D)"
    assert kernel_times_s([plane]) == pytest.approx({"a": 1.0}), "another stream does"


def test_an_annotation_may_say_more_than_the_op():
    """TensorFlow puts the function's name before it."""
    plane = gpu_stand_in.device_plane({"__inference_step::layer/MatMul:MatMul": 0.5})
    assert kernel_times_s([plane]) == pytest.approx({"layer/MatMul": 0.5})


def test_kernels_of_no_op_and_of_the_host_count_nowhere():
    nameless, host = (
        gpu_stand_in.device_plane({"memset": 1.0}),
        gpu_stand_in.device_plane({"a:A": 1.0}),
    )
    host.name = "/host:CPU"
    assert kernel_times_s([nameless, host]) == {}
    assert kernel_times_s([]) == {}


# ------------------------------------------------------------------ steps


def test_a_measured_step_takes_the_median():
    written = trace(*((MEASURED_STEP, 0, us) for us in (5, 1000, 3)), ("a:A", 0, 10**6))
    assert measured_step_s([written.plane]) == pytest.approx(5e-6)


def test_steps_on_all_planes_count():
    planes = [trace((MEASURED_STEP, 0, us)).plane for us in (2, 4)]
    assert measured_step_s(planes) == pytest.approx(3e-6)


def test_without_a_measured_step_there_is_no_time():
    assert measured_step_s([trace(("another step", 0, 5)).plane]) == 0.0


# ------------------------------------------------------------------ allocations


def test_allocations_come_in_the_order_of_time_whichever_plane_they_are_on():
    first, late = Trace(), Trace(offset_us=1000)
    first.allocate("op", 1002, 0xB, 90, region="output")
    first.event("a:A", 0, 1)
    late.free(1, 0xA)
    first.allocate("op", 999, 0xA, 100)
    found = allocation_events([late.plane, first.plane])
    assert [(at // PS_PER_US, name, said["addr"]) for at, name, said in found] == [
        (999, "MemoryAllocation", 0xA),
        (1001, "MemoryDeallocation", 0xA),
        (1002, "MemoryAllocation", 0xB),
    ]


def test_what_an_allocator_says_is_decoded():
    """Numbers are themselves; names stand elsewhere and are referred to."""
    written = Trace()
    written.allocate("layer/MatMul", 0, 0xA, 100)
    ((_, _, said),) = allocation_events([written.plane])
    assert said == {
        "tf_op": "layer/MatMul",
        "addr": 0xA,
        "requested_bytes": 100,
        "allocation_bytes": 868,
        "region_type": "temp",
    }


def test_a_statistic_without_a_value_is_none():
    written = Trace()
    written.free(0, 0xA)
    written.line.events[0].stats[0].ClearField("uint64_value")
    ((_, _, said),) = allocation_events([written.plane])
    assert said == {"addr": None}


def test_a_text_that_there_is_none_of_is_left_out():
    """TensorFlow 2.18 writes one of allocations that no op says it asks for."""
    written = Trace()
    written.event("MemoryAllocation", 0, tf_op="(null)", addr=0xA, region_type="(null)")
    ((_, _, said),) = allocation_events([written.plane])
    assert said == {"addr": 0xA}


def test_only_the_allocator_that_is_asked_for_counts():
    written = Trace()
    for at, name in enumerate(("GPU_0_bfc", "gpu_host_bfc", "GPU_1_bfc")):
        written.event("MemoryAllocation", at, addr=at, allocator_name=name)
    written.event("MemoryDeallocation", 9, addr=9)
    found = {
        name: [said["addr"] for _, _, said in allocation_events([written.plane], name)]
        for name in ("", "GPU_0", "GPU")
    }
    assert found == {"": [0, 1, 2, 9], "GPU_0": [0], "GPU": [0, 2]}
