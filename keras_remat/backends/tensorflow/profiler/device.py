"""Names the device whose memory counts.

A file of its own, though short: measuring, profiling and planning share it.
"""

from __future__ import annotations

import tensorflow as tf

from keras_remat.core.target import Target, live


def device_name() -> str:
    """Returns the first visible GPU's name, else the CPU's."""
    return "GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"


def on_gpu() -> bool:
    """Returns whether the device whose memory counts is a GPU."""
    return device_name().startswith("GPU")


def live_target() -> Target:
    """Returns the target of the device whose memory counts."""
    return live("gpu" if on_gpu() else "cpu", device_name())


def allocator_name() -> str:
    """Returns the name of the device's allocator in a recording; empty on a CPU, which has only
    one."""
    return device_name().replace(":", "_") if on_gpu() else ""
