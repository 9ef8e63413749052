"""A CPU whose allocator keeps no statistics is asked for one that does, in time or too late."""

import os

import own_process
import pytest

import keras_remat
from keras_remat.units import MIB

_MEASURE = """
import json
import tensorflow as tf
import keras_remat
from keras_remat.backends.tensorflow import private
from keras_remat.backends.tensorflow.memory.measure import TensorFlowDevice, measure
{before}
made = private.has_made_devices()
enabled = keras_remat.enable_cpu_memory_stats()
made_by_asking = private.has_made_devices() and not made
device = TensorFlowDevice()
peak = measure(lambda: tf.reduce_sum(tf.ones([2**22]) + 1.0))[1].peak_bytes
print(json.dumps(dict(
    enabled=enabled, made_by_asking=made_by_asking, peak=peak, allocator=device.allocator,
    statistics=device.has_statistics, in_use=device.in_use_bytes(), total=device.total_bytes(),
    advice=device.missing_statistics_advice(),
)))
"""


def run(code, **environment):
    """Runs code in a process of its own and returns the JSON it prints last."""
    inherited = own_process.environment(**environment)
    told = {k: v for k, v in inherited.items() if k in environment or not k.startswith("TF_CPU_")}
    return own_process.came_of("-c", code, env=told)


def test_without_onednn_the_peak_is_measured_after_asking_up_to_the_allocator_s_limit():
    limited = {"TF_ENABLE_ONEDNN_OPTS": "0", "TF_CPU_BFC_MEM_LIMIT_IN_MB": "100"}
    found = run(_MEASURE.format(before=""), **limited)
    assert found["enabled"]
    assert not found["made_by_asking"]
    assert found["statistics"]
    assert found["allocator"] == "bfc"
    assert 32 * MIB <= found["peak"] < 40 * MIB
    assert found["total"] == 100 * MIB
    assert found["advice"] == ""


def test_after_the_first_tensor_it_is_too_late_and_nothing_is_raised():
    found = run(_MEASURE.format(before="tf.zeros(1)"), TF_ENABLE_ONEDNN_OPTS="0")
    assert not found["enabled"]
    assert not found["statistics"]
    assert (found["peak"], found["in_use"], found["allocator"]) == (0, 0, "unknown")
    assert "keras_remat.enable_cpu_memory_stats()" in found["advice"]


@pytest.fixture
def untouched(monkeypatch):
    """A process that has made no device yet, on a CPU without oneDNN and without a GPU."""
    import tensorflow as tf

    from keras_remat.backends.tensorflow import private

    environment = {k: v for k, v in os.environ.items() if not k.startswith("TF_CPU_")}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(private, "has_made_devices", lambda: False)
    monkeypatch.setattr(private, "onednn_is_on", lambda: False)
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [])
    return environment


def test_users_own_choice_stays(untouched):
    untouched["TF_CPU_ALLOCATOR_USE_BFC"] = "0"
    assert not keras_remat.enable_cpu_memory_stats()
    assert untouched["TF_CPU_ALLOCATOR_USE_BFC"] == "0"


def test_nothing_is_set_where_onednn_keeps_statistics(untouched, monkeypatch):
    from keras_remat.backends.tensorflow import private

    monkeypatch.setattr(private, "onednn_is_on", lambda: True)
    before = dict(untouched)
    assert keras_remat.enable_cpu_memory_stats()
    assert untouched == before


def test_nothing_is_set_on_a_gpu(untouched, monkeypatch):
    import tensorflow as tf

    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: ["the card"])
    before = dict(untouched)
    assert keras_remat.enable_cpu_memory_stats()
    assert untouched == before


@pytest.mark.parametrize(("machine_gib", "limit_mib"), [(8, None), (256, "262144")])
def test_large_machine_is_not_cut_to_the_allocator_s_default(
    untouched, monkeypatch, machine_gib, limit_mib
):
    from keras_remat.backends.tensorflow.memory import measure

    monkeypatch.setattr(measure, "machine_bytes", lambda: machine_gib * 2**30)
    assert keras_remat.enable_cpu_memory_stats()
    assert untouched["TF_CPU_ALLOCATOR_USE_BFC"] == "1"
    assert untouched.get("TF_CPU_BFC_MEM_LIMIT_IN_MB") == limit_mib
