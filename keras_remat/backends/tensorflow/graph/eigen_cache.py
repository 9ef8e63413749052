"""The size of the third cache that TensorFlow's own kernels reckon with.

Eigen asks the processor itself. On AMD's processors that is the cache of the whole package: 384 MiB
where the operating system says 32 MiB, of the cores that a virtual machine has. No function of
TensorFlow tells it, but a gradient of a tiny 3-D kernel does (``conv_grad_ops_3d.cc``): it gathers
as many patches as fill the cache, and none where those have over 25 times the elements of its
operands.
"""

from __future__ import annotations

from functools import cache
from itertools import count
from pathlib import Path

import tensorflow as tf

from keras_remat.backends.tensorflow.memory.measure import TensorFlowDevice, measure
from keras_remat.units import KIB

#: Gradients of 3-D convolutions leave out patches that have over so many times the elements of
#: image, kernel and gradient.
MOST_PATCHES = 25
#: Channels of the tiny gradient, and the elements of one of its volumes: patches of one voxel,
#: gradient, and kernel. Its patches are a 31st part of the cache.
_CHANNELS, _VOLUME = 15, 31
#: So often a run is asked for its peak: the input pipeline may take memory in between.
_RUNS = 3
_ITEM_BYTES = 4
#: Up to so many voxels: Eigen reads no cache above 512 MiB.
_MOST_DOUBLINGS = 16
_TOLD_BY_SYSTEM = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")


@cache
def third_cache_bytes() -> int:
    """Returns the bytes of the third cache as Eigen sees it, off by 1 % at most; what Linux says
    where that cannot be seen."""
    with tf.init_scope():  # a graph may be under construction: a loop's body is looked at in one
        return _seen_bytes(TensorFlowDevice())


def _seen_bytes(device: TensorFlowDevice) -> int:
    """Returns the bytes of the third cache by what gradients ask for."""
    if not device.has_statistics:
        return _system_bytes()
    most = next(
        (n for n in (2**at for at in count()) if n >> _MOST_DOUBLINGS or _gathers(n, device)), 0
    )
    if most >> _MOST_DOUBLINGS:
        return _system_bytes()
    fewest = most // 2 + 1  # the fewest voxels whose gradient gathers patches are not fewer
    while fewest < most:
        middle = (fewest + most) // 2
        fewest, most = (fewest, middle) if _gathers(middle, device) else (middle + 1, most)
    return (MOST_PATCHES + 1) * _elements(fewest) * _VOLUME * _ITEM_BYTES


def _elements(voxels: int) -> int:
    """Returns the elements of image, kernel and gradient."""
    return voxels * (1 + _CHANNELS) + _CHANNELS


def _gathers(voxels: int, device: TensorFlowDevice) -> bool:
    """Returns whether the gradient of a kernel gathers patches, of so many volumes of one voxel."""
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
    """Returns what Linux says of the first core; 0 elsewhere."""
    text = _TOLD_BY_SYSTEM.read_text().strip() if _TOLD_BY_SYSTEM.exists() else ""
    return int(text.removesuffix("K")) * KIB if text.endswith("K") else 0
