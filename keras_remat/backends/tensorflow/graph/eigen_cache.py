"""Measures the size of the third cache that TensorFlow's own kernels assume.

Eigen asks the processor itself. AMD's processors report the cache of the whole package: 384 MiB
where the operating system reports 32 MiB, for the cores of a virtual machine. No function of
TensorFlow returns Eigen's number, but the gradient of a tiny 3-D kernel shows it
(``conv_grad_ops_3d.cc``): it gathers as many patches as fill the cache, and none if they have over
25 times the elements of its operands.
"""

from __future__ import annotations

from functools import cache
from itertools import count
from pathlib import Path

import tensorflow as tf

from keras_remat.backends.tensorflow.memory.measure import TensorFlowDevice, measure
from keras_remat.units import KIB

#: Gradients of 3-D convolutions gather no patches with over this many times the elements of image,
#: kernel and gradient.
MOST_PATCHES = 25
#: Channels of the tiny gradient, and the elements of one of its volumes: patches of one voxel,
#: gradient, and kernel. Its patches are a 31st part of the cache.
_CHANNELS, _VOLUME = 15, 31
#: How often a run's peak is measured: the input pipeline may take memory meanwhile.
_RUNS = 3
_ITEM_BYTES = 4
#: Binary logarithm of the most voxels to try: Eigen reads no cache above 512 MiB.
_MOST_DOUBLINGS = 16
_TOLD_BY_SYSTEM = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")


@cache
def third_cache_bytes() -> int:
    """Returns the bytes of the third cache as Eigen sees it, to 1 %; Linux's number where that
    cannot be measured."""
    with tf.init_scope():  # the caller may be building a graph, such as a loop's body
        return _seen_bytes(TensorFlowDevice())


def _seen_bytes(device: TensorFlowDevice) -> int:
    """Returns the bytes of the third cache, by the requests of gradients."""
    if not device.has_statistics:
        return _system_bytes()
    most = next(
        (n for n in (2**at for at in count()) if n >> _MOST_DOUBLINGS or _gathers(n, device)), 0
    )
    if most >> _MOST_DOUBLINGS:
        return _system_bytes()
    fewest = most // 2 + 1  # bounds of the fewest voxels whose gradient gathers patches
    while fewest < most:
        middle = (fewest + most) // 2
        fewest, most = (fewest, middle) if _gathers(middle, device) else (middle + 1, most)
    return (MOST_PATCHES + 1) * _elements(fewest) * _VOLUME * _ITEM_BYTES


def _elements(voxels: int) -> int:
    """Returns how many elements image, kernel and gradient have together."""
    return voxels * (1 + _CHANNELS) + _CHANNELS


def _gathers(voxels: int, device: TensorFlowDevice) -> bool:
    """Returns whether a kernel's gradient over ``voxels`` volumes of one voxel gathers patches."""
    with tf.device(device.name):
        images = tf.zeros((voxels, 1, 1, 1, 1))
        gradient = tf.zeros((voxels, 1, 1, 1, _CHANNELS))

    def run() -> tf.Tensor:
        return tf.raw_ops.Conv3DBackpropFilterV2(
            input=images, filter_sizes=[1, 1, 1, 1, _CHANNELS], out_backprop=gradient,
            strides=[1] * 5, padding="SAME",
        )  # fmt: skip

    taken = []
    for _ in range(_RUNS):
        before = device.in_use_bytes()
        taken.append(measure(run, device=device)[1].peak_bytes - before)
    # patches are 13 to 26 times as large; without them 512 bytes were taken
    return min(taken) > 4 * _ITEM_BYTES * _elements(voxels) + KIB


def _system_bytes() -> int:
    """Returns the bytes of the first core's third cache by Linux; 0 on other systems."""
    text = _TOLD_BY_SYSTEM.read_text().strip() if _TOLD_BY_SYSTEM.exists() else ""
    return int(text.removesuffix("K")) * KIB if text.endswith("K") else 0
