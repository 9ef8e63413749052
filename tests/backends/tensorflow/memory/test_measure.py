"""What the device says: its peak, its bytes, its size."""

import gpu_stand_in
import pytest
import tensorflow as tf

from keras_remat.backends.memory import SimulatedMemory
from keras_remat.backends.tensorflow.memory import measure
from keras_remat.backends.tensorflow.ordered.backend import allocator_memory
from keras_remat.backends.tensorflow.profiler.device import device_name, on_gpu
from keras_remat.core.graph import Op
from keras_remat.units import GIB, MIB

pytestmark = pytest.mark.allocator


def test_peak_is_what_was_alive_during_the_step_and_not_before():
    def large():
        return tf.reduce_sum(tf.ones((16, MIB // 4)) + 1.0)

    _, first = measure.measure(large)
    held = measure.bytes_in_use()
    result, second = measure.measure(lambda: tf.reduce_sum(tf.ones((4, MIB // 4))))
    assert float(result) == MIB
    assert first.peak_bytes >= 16 * MIB
    assert held + 4 * MIB <= second.peak_bytes < held + 12 * MIB
    assert second.time_s > 0


def test_a_pool_keeps_what_it_once_handed_out(monkeypatch):
    """What the system calls used is left for tensors, where the pool holds it."""
    numbers = {"current": 30, "peak": 90}
    monkeypatch.setattr(measure, "_POOL_BYTES", {})
    monkeypatch.setattr(measure, "_memory_info", lambda name: numbers)
    monkeypatch.setattr(measure, "_reset_peak", lambda name: None)
    monkeypatch.setattr(measure, "host_memory_bytes", lambda held_bytes: 1000 + held_bytes)
    monkeypatch.setattr(measure, "device_name", lambda: "CPU:0")
    device = measure.TensorFlowDevice()
    measure.measure(lambda: None, device=device)
    numbers["peak"] = 40
    measure.measure(lambda: None, device=device)
    for pooled, expected in [("1", 1090), ("0", 1030)]:
        monkeypatch.setenv("TF_CPU_ALLOCATOR_USE_BFC", pooled)
        assert device.total_bytes() == expected


def test_results_that_are_no_tensors_come_back():
    result, usage = measure.measure(
        lambda: {"loss": tf.constant(2.0), "note": "done", "none": None}
    )
    assert (float(result["loss"]), result["note"], result["none"]) == (2.0, "done", None)
    assert usage.peak_bytes >= 0


def test_what_a_step_raises_passes_through():
    with pytest.raises(ZeroDivisionError):
        measure.measure(lambda: 1 // 0)


def test_bytes_in_use_count_a_held_tensor():
    before = measure.bytes_in_use()
    held = tf.ones((8, MIB // 4))
    assert measure.bytes_in_use() - before >= 8 * MIB
    del held
    assert measure.bytes_in_use() - before < 8 * MIB


@pytest.mark.parametrize("mib", [1, 3, 5, 7])
def test_the_chunk_of_a_request_is_known_before_it_is_made(mib):
    device = measure.TensorFlowDevice()
    before = measure.bytes_in_use()
    told = device.chunk_bytes(mib * MIB)
    assert measure.bytes_in_use() == before
    held = tf.raw_ops.Empty(shape=[mib * MIB], dtype=tf.uint8)
    assert measure.bytes_in_use() - before == told
    assert mib * MIB <= told < 2 * mib * MIB
    del held


def test_nothing_is_asked_for_that_the_device_does_not_have():
    device = measure.TensorFlowDevice()
    assert device.chunk_bytes(device.total_bytes() + 1) == device.total_bytes() + 1


def test_memory_is_at_most_the_machines():
    assert measure.TensorFlowDevice().total_bytes() > GIB // 4
    if not on_gpu():
        with open("/proc/meminfo") as file:
            total_kib = int(file.readline().split()[1])
        assert measure.TensorFlowDevice().total_bytes() <= total_kib * 1024


def test_missing_statistics_are_zeros_and_the_step_runs(monkeypatch):
    def refuse(device):
        raise ValueError(f"no statistics for {device}")

    monkeypatch.setattr(measure, "_counts", measure._counts.__wrapped__)  # it is asked anew
    monkeypatch.setattr(tf.config.experimental, "get_memory_info", refuse)
    monkeypatch.setattr(tf.config.experimental, "reset_memory_stats", refuse)
    device = measure.TensorFlowDevice()
    assert not device.has_statistics
    assert (device.in_use_bytes(), device.peak_bytes()) == (0, 0)
    result, usage = measure.measure(lambda: tf.constant(3.0))
    assert (float(result), usage.peak_bytes) == (3.0, 0)
    assert usage.time_s > 0
    assert "peaks are measured" in device.missing_statistics_advice()


def test_zeros_while_tensors_exist_are_no_statistics(monkeypatch):
    """What some runtimes of several workers report."""
    zeros = {"current": 0, "peak": 0}
    monkeypatch.setattr(tf.config.experimental, "get_memory_info", lambda device: zeros)
    assert not measure.TensorFlowDevice().has_statistics


def test_the_device_tells_what_it_has():
    device = measure.TensorFlowDevice()
    assert device.name == device_name()
    assert device.allocator in ("bfc", "onednn")
    assert device.has_statistics
    held = tf.ones((8, MIB // 4))
    assert device.in_use_bytes() >= 8 * MIB
    assert device.peak_bytes() >= device.in_use_bytes()
    assert device.missing_statistics_advice() == ""
    del held


def test_a_gpu_s_convolution_is_told_to_take_less_scratch():
    convolution = Op(0, "conv", "Conv2D", (), (0,))
    device = measure.TensorFlowDevice()
    assert bool(device.floor_advice(convolution)) is on_gpu()
    with gpu_stand_in.gpu():
        assert "TF_CUDNN_WORKSPACE_LIMIT_IN_MB" in device.floor_advice(convolution)
        assert device.floor_advice(Op(0, "relu", "Relu", (), (0,))) == ""


@pytest.mark.parametrize("at", [1, 3])
def test_what_a_thread_takes_meanwhile_is_not_taken_for_the_probe(monkeypatch, at):
    """Such as the input pipeline's, which prepares the next batch."""
    expected, read = measure.TensorFlowDevice().allocator, measure.bytes_in_use
    taken_mib = iter([0] * at)
    monkeypatch.setattr(measure, "bytes_in_use", lambda: read() + next(taken_mib, 3) * MIB)
    assert measure.TensorFlowDevice().allocator == expected


def test_cuda_s_own_allocator_is_remarked(monkeypatch):
    monkeypatch.setenv("TF_GPU_ALLOCATOR", "cuda_malloc_async")
    assert bool(measure.TensorFlowDevice().remark()) is on_gpu()
    with gpu_stand_in.gpu():
        device = measure.TensorFlowDevice()
        assert device.allocator == "cuda_malloc_async"
        assert "TF_GPU_ALLOCATOR=cuda_malloc_async" in str(device.remark())
        assert type(allocator_memory(device)) is SimulatedMemory


@pytest.mark.parametrize(
    ("forced", "asked", "grows"),
    [(None, False, False), (None, True, True), ("true", False, True), ("0", True, False)],
)
def test_a_gpu_s_pool_is_one_region_unless_it_grows(forced, asked, grows, monkeypatch):
    """TensorFlow obeys the environment before what the program asks for."""
    monkeypatch.delenv("TF_FORCE_GPU_ALLOW_GROWTH", raising=False)
    if forced is not None:
        monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", forced)
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: ["the card"])
    monkeypatch.setattr(tf.config.experimental, "get_memory_growth", lambda gpu: asked)
    with gpu_stand_in.gpu():
        device = measure.TensorFlowDevice()
        assert device.region_bytes() == (0 if grows else device.total_bytes())
        assert device.limit_source().endswith(f"memory growth {'on' if grows else 'off'}")


@pytest.mark.parametrize(
    ("use_bfc", "source"),
    [("1", "TF_CPU_BFC_MEM_LIMIT_IN_MB"), ("0", "what machine, container and address space")],
)
def test_a_cpu_s_pool_grows_up_to_a_limit_that_is_named(use_bfc, source, monkeypatch):
    monkeypatch.setattr(measure, "device_name", lambda: "CPU:0")
    monkeypatch.setenv("TF_CPU_ALLOCATOR_USE_BFC", use_bfc)
    monkeypatch.setenv("TF_CPU_BFC_MEM_LIMIT_IN_MB", "1")
    device = measure.TensorFlowDevice()
    assert device.region_bytes() == 0
    assert device.limit_source().startswith(source)


def test_gpus_of_a_strategy_count_by_the_one_that_has_least_left(monkeypatch):
    statistics = {"GPU:1": {"current": 5, "peak": 90}, "GPU:2": {"current": 7, "peak": 80}}
    limits = {"GPU:1": 100, "GPU:2": 95}
    monkeypatch.setattr(measure, "device_name", lambda: "GPU:0")
    monkeypatch.setattr(measure, "_memory_info", statistics.__getitem__)
    monkeypatch.setattr(measure.private, "device_memory_limit_bytes", limits.__getitem__)
    device = measure.TensorFlowDevice(["GPU:1", "GPU:2"])
    assert (device.in_use_bytes(), device.peak_bytes(), device.total_bytes()) == (7, 90, 95)


def test_logical_cpus_share_an_allocator(monkeypatch):
    monkeypatch.setattr(measure, "device_name", lambda: "CPU:0")
    monkeypatch.setattr(measure, "_memory_info", lambda name: {"current": 9, "peak": 30})
    whole = measure.TensorFlowDevice().total_bytes()
    device = measure.TensorFlowDevice(["CPU:0", "CPU:1"])
    assert (device.in_use_bytes(), device.peak_bytes()) == (5, 15)
    assert device.total_bytes() == pytest.approx(whole / 2, rel=0.2)
