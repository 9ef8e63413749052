"""Computes the scratch of TensorFlow's own kernels on a CPU, without oneDNN, from shapes.

The gradients of 2-D and 3-D convolutions gather patches of several images into a matrix and
multiply with it. The number of images is a constant of the kernel, or the size of a cache, divided
by an image's bytes. Neither the batch size nor slices of the batch change it: for a batch of 4 the
matrix may have room for 64 images.

In the body of a loop TensorFlow would run several such gradients at once, each with its matrix, in
another order in every step. So :func:`order_bodies` puts them in order there. That costs no time,
since a kernel of that size uses all cores by itself.

Reference: ``conv_grad_filter_ops.cc``, ``conv_grad_input_ops.h`` and ``conv_grad_ops_3d.cc`` of
TensorFlow.
"""

from __future__ import annotations

from collections.abc import Sequence
from graphlib import TopologicalSorter
from itertools import chain, pairwise
from math import prod
from typing import Any

import tensorflow as tf

from keras_remat.backends.host import cores
from keras_remat.backends.tensorflow import private
from keras_remat.backends.tensorflow.graph import kinds
from keras_remat.backends.tensorflow.graph.eigen_cache import MOST_PATCHES, third_cache_bytes
from keras_remat.backends.tensorflow.graph.nodes import called_functions, node_of
from keras_remat.backends.tensorflow.profiler import device
from keras_remat.units import KIB, MIB

#: Constants of TensorFlow's gradients of 2-D convolutions. They gather patches of enough images
#: for a working set of the first size. The input's gradient goes image by image where a thread's
#: share of an image has at least the second size.
_WORKING_SET_BYTES, _LARGE_SHARE_BYTES = 30 * MIB, 256 * KIB

#: Kinds whose kernels gather patches, of images and of volumes.
_OF_IMAGES = frozenset({"Conv2DBackpropFilter", "Conv2DBackpropInput"})
_OF_VOLUMES = frozenset({"Conv3DBackpropFilterV2", "Conv3DBackpropInputV2"})
_GATHERING = _OF_IMAGES | _OF_VOLUMES

_Shape = Sequence[int] | None


def runs_own_kernels() -> bool:
    """Returns whether TensorFlow's own kernels run: on a CPU, without oneDNN."""
    return not device.on_gpu() and not private.onednn_is_on()


def own_scratch_bytes(node: Any, operands: Sequence[_Shape], result: _Shape) -> int:
    """Returns the bytes that TensorFlow's own kernel of a node requests beside its outputs; 0 where
    a shape is not known.

    Args:
        node: the ``NodeDef``.
        operands: shapes of the inputs.
        result: shape of the output.
    """
    if node.op in _GATHERING:
        # not from the bytes of an output: a value takes at least 256
        itemsize = int(tf.as_dtype(node.attr["T"].type).size)
        of_kind = _patches_bytes if node.op in _OF_IMAGES else _volume_patches_bytes
        return of_kind(node, operands, result, itemsize)
    if node.op == "MaxPoolGrad":  # an int64 per element of the pooled image: its source's index
        return 8 * prod(operands[1]) if operands[1] else 0
    return 0


def _patches_bytes(node: Any, operands: Sequence[_Shape], result: _Shape, itemsize: int) -> int:
    """Returns the bytes of the matrix of patches that a 2-D convolution's gradient gathers."""
    of_filter = node.op == "Conv2DBackpropFilter"
    kernel, gradient = result if of_filter else operands[1], operands[2]
    if not kernel or not gradient or set(node.attr["dilations"].list.i) - {1}:
        return 0
    positions, patch, channels = prod(gradient[1:3]), prod(kernel[:3]), kernel[3]
    image = itemsize * (positions * patch + positions * channels + patch * channels)
    images = -(-_WORKING_SET_BYTES // max(1, image))
    if not of_filter and (gradient[0] == 1 or image // _threads() >= _LARGE_SHARE_BYTES):
        images = 1
    return itemsize * images * positions * patch


def _volume_patches_bytes(
    node: Any, operands: Sequence[_Shape], result: _Shape, itemsize: int
) -> int:
    """Returns the bytes of the matrix of patches that a 3-D convolution's gradient gathers.

    It has patches of enough volumes for a product that fills the third cache, or of one volume for
    the input's gradient of a single volume. Where the matrix would be too large, Eigen's slower
    kernel runs, which requests little.
    """
    of_filter = node.op == "Conv3DBackpropFilterV2"
    first, second, gradient = operands
    image, kernel = (first, result) if of_filter else (result, second)
    if not image or not kernel or not gradient or not prod(gradient):
        return 0
    positions, patch, channels = prod(gradient[1:4]), prod(kernel[:4]), kernel[4]
    volumes = 1
    if of_filter or gradient[0] > 1:
        volume = positions * patch + positions * channels + patch * channels
        volumes = -(-(third_cache_bytes() // itemsize) // volume)
    patches = volumes * positions * patch
    if patches // (prod(image) + prod(kernel) + prod(gradient)) > MOST_PATCHES:
        return 0
    return itemsize * patches


def _threads() -> int:
    """Returns how many threads an op may use."""
    asked: Any = tf.config.threading.get_intra_op_parallelism_threads()
    return asked or cores()


def order_bodies(graph_def: Any) -> None:
    """Makes the ops that gather patches in a loop's or branch's body run one after another.

    It changes the graph in place and renames its functions. Results stay the same.

    Args:
        graph_def: a graph with its library.
    """
    if not runs_own_kernels():
        return
    calls = (node for node in private.all_nodes(graph_def) if node.op in kinds.CONTROL_FLOW)
    private.change_functions(graph_def, chain.from_iterable(map(called_functions, calls)), _order)


def _order(function: Any) -> bool:
    """Orders the ops that gather patches in one function, in place; returns whether there are
    several."""
    nodes = {node.name: node for node in function.node_def}
    if sum(node.op in _GATHERING for node in nodes.values()) < 2:
        return False
    sources = {name: [node_of(i) for i in node.input] for name, node in nodes.items()}
    order = [nodes[n] for n in TopologicalSorter(sources).static_order() if n in nodes]
    gathering = [node for node in order if node.op in _GATHERING]
    for before, node in pairwise(gathering):
        node.input.append(f"^{before.name}")
    return True


def gathering_functions(library: Any) -> frozenset[str]:
    """Returns the names of the functions of a graph's library that gather patches on this device.

    Args:
        library: the graph's ``FunctionDefLibrary``.
    """
    functions = library.function if runs_own_kernels() else ()
    return frozenset(
        function.signature.name
        for function in functions
        if any(node.op in _GATHERING for node in function.node_def)
    )
