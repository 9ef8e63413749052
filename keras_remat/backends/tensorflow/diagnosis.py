"""Finds what TensorFlow can measure on this machine, for ``keras-remat doctor``."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_remat.backends.tensorflow import private
from keras_remat.backends.tensorflow.memory.measure import (
    WORKSPACE_ADVICE,
    TensorFlowDevice,
    measure,
)
from keras_remat.backends.tensorflow.ordered.profile import blindness
from keras_remat.backends.tensorflow.profiler import events
from keras_remat.backends.tensorflow.profiler.device import on_gpu
from keras_remat.backends.tensorflow.profiler.recorder import Recorder, Recording
from keras_remat.backends.versions import OLDEST_FOR_REPLICAS, sentence_for

_SIDE = 64
_ONEDNN_ADVICE = (
    "TensorFlow leaves oneDNN's kernels off on this CPU. TF_ENABLE_ONEDNN_OPTS=1 before it starts "
    "may make steps faster; every number changes a little."
)


def diagnosis() -> dict[str, Any]:
    """Returns the facts by name: about the device, its memory, its kernels and XLA."""
    device = TensorFlowDevice()
    timed, kernels = _kernels()
    compiles, xla = _xla()
    advice = [
        device.missing_statistics_advice(),
        WORKSPACE_ADVICE if on_gpu() else "" if private.onednn_is_on() else _ONEDNN_ADVICE,
        sentence_for("MirroredStrategy", OLDEST_FOR_REPLICAS),
    ]
    return {
        "device": device.name,
        "allocator": device.allocator,
        "statistics": device.has_statistics,
        "peaks": "peaks are measured" if device.has_statistics else "NO peak can be measured",
        "limit_bytes": device.total_bytes(),
        "limit_source": device.limit_source(),
        "in_use_bytes": device.in_use_bytes(),
        "kernels_timed": timed,
        "kernels": kernels,
        "xla": compiles,
        "xla_detail": xla,
        "advice": [line for line in advice if line],
    }


def _kernels() -> tuple[bool, str]:
    """Returns whether a recording has the times of ops, and a sentence about it."""
    step = tf.function(lambda x: tf.reduce_sum(tf.matmul(x, x)))
    x = tf.ones((_SIDE, _SIDE))
    step(x)
    recorder = Recorder()
    if not recorder.start():
        return False, "another profiler session is running"
    measure(lambda: step(x))
    recording: Recording = recorder.stop()
    reason = blindness(recording)
    if reason:
        return False, reason
    seen = any(True for _ in events.node_events(recording.planes))
    return seen, "timed by TensorFlow's profiler" if seen else "the profiler recorded nothing"


def _xla() -> tuple[bool, str]:
    """Returns whether XLA compiles for this device, and a sentence about it."""
    try:
        tf.function(lambda x: x + 1.0, jit_compile=True)(tf.ones(2))
    except (tf.errors.OpError, ValueError) as error:
        return False, str(error).strip().partition("\n")[0]
    return True, "compiles for this device"
