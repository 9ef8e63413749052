"""What a device tells about itself, on fakes of one."""

from types import SimpleNamespace

import jax
import pytest

from keras_remat.backends.jax import measure
from keras_remat.cards.table import card
from keras_remat.core.target import live
from keras_remat.errors import UnsupportedModelError
from keras_remat.units import GIB

GPU = live("gpu", "a GPU")
OUT_OF_MEMORY = [
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8589934592 bytes.",
    "INTERNAL: Failed to allocate: CUDA_ERROR_OUT_OF_MEMORY: out of memory",
    "INTERNAL: CUBLAS_STATUS_ALLOC_FAILED",
    "INTERNAL: CUDNN_STATUS_ALLOC_FAILED in cudnnCreate",
    "NOT_FOUND: No algorithm worked!  Error messages: profiling failure",
]


@pytest.mark.parametrize("text", OUT_OF_MEMORY)
def test_every_face_of_out_of_memory_is_recognized(text):
    assert measure.is_out_of_memory(jax.errors.JaxRuntimeError(text))


def test_other_errors_are_not_out_of_memory():
    assert not measure.is_out_of_memory(jax.errors.JaxRuntimeError("INTERNAL: a kernel is broken"))
    assert not measure.is_out_of_memory(MemoryError("RESOURCE_EXHAUSTED: of the host"))


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    return monkeypatch


def test_a_gpu_whose_allocator_keeps_no_statistics_is_refused(on_gpu):
    on_gpu.setattr(measure, "device_statistic", lambda name: None)
    with pytest.raises(UnsupportedModelError, match="ALLOCATOR=platform"):
        measure.check_device(GPU)


def test_three_quarters_of_a_gpu_are_told_once_nobody_has_chosen(on_gpu):
    on_gpu.setattr(measure, "device_statistic", lambda name: 60 * GIB)
    remark = measure.check_device(GPU)
    assert "60 GiB" in remark
    assert "three quarters" in remark
    on_gpu.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    assert measure.check_device(GPU) is None


@pytest.mark.parametrize(
    ("platform", "version", "on_gpu", "capability"),
    [
        ("cuda", "7.5", True, (7, 5)),
        ("gpu", "9.0", True, (9, 0)),
        ("rocm", "gfx942", True, None),
        ("cpu", None, False, None),
    ],
)
def test_the_live_device_is_a_target(monkeypatch, platform, version, on_gpu, capability):
    device = SimpleNamespace(platform=platform, id=1, device_kind="a kind")
    if version is not None:
        device.compute_capability = version
    monkeypatch.setattr(measure, "first_device", lambda: device)
    target = measure.live_target()
    assert (target.on_gpu, target.capability) == (on_gpu, capability)
    assert target.is_live
    assert target.device == f"{platform}:1 a kind"


def test_a_cpu_is_taken_as_it_is():
    assert measure.check_device(measure.live_target()) is None
    assert measure.check_device(card("T4")) is None, "its memory is known"
