"""A GPU's behaviour on a machine that has none.

:func:`gpu` makes this package, and nobody else, believe in ``GPU:0``. Its memory is that of the
CPU's allocator: in a process of its own with ``TF_CPU_ALLOCATOR_USE_BFC=1`` and
``TF_CPU_BFC_MEM_LIMIT_IN_MB`` every size counts and out of memory is real, as on a GPU; one large
tensor made and dropped leaves one region (:func:`one_region`). With ``layout=True`` Grappler gets
the devices of a GPU machine, so that a traced graph is a GPU's; such a graph does not run here.
:func:`device_plane` writes kernels as TensorFlow's profiler does.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import tensorflow as tf
from tensorflow.core.framework import kernel_def_pb2

from keras_remat.backends.tensorflow import private
from keras_remat.backends.tensorflow.profiler import device
from keras_remat.units import GIB, MIB

_GPU = SimpleNamespace(name="/device:GPU:0", device_type="GPU")


def limit_bytes() -> int:
    """What the stand-in's memory holds."""
    return int(os.environ.get("TF_CPU_BFC_MEM_LIMIT_IN_MB", 24 * 1024)) * MIB


@contextmanager
def gpu(*, layout: bool = False) -> Iterator[None]:
    """While it is open, this package finds one GPU.

    Args:
        layout: whether Grappler finds it, too.
    """
    listed, info, reset = (
        tf.config.list_logical_devices,
        tf.config.experimental.get_memory_info,
        tf.config.experimental.reset_memory_stats,
    )
    registered = private._registered_kernels

    def logical_devices(kind: str | None = None) -> list[object]:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        found = list(listed(kind))
        if not caller.startswith("keras_remat") or kind == "CPU":
            return found
        if not layout and caller == private.__name__:
            return found
        return [*found, _GPU]

    def kernels(kind: str, types: tuple[str, ...]) -> tuple[kernel_def_pb2.KernelDef, ...]:
        """This TensorFlow has no kernels for GPUs: those for CPUs stand in for them."""
        return registered(kind, types) + registered(kind, ("CPU",))

    with (
        mock.patch.object(tf.config, "list_logical_devices", logical_devices),
        mock.patch.object(
            tf.config.experimental, "get_memory_info", lambda name: info(_on_cpu(name))
        ),
        mock.patch.object(
            tf.config.experimental, "reset_memory_stats", lambda name: reset(_on_cpu(name))
        ),
        mock.patch.object(private, "device_memory_limit_bytes", return_value=limit_bytes()),
        mock.patch.object(private, "compute_capability", return_value=(8, 0)),
        mock.patch.object(private, "_registered_kernels", kernels),
        mock.patch.object(device, "allocator_name", return_value=""),
    ):
        yield


def one_region(nbytes: int = GIB) -> None:
    """Has BFC take one region, as it does on a GPU without memory growth."""
    tf.raw_ops.Empty(shape=[nbytes], dtype=tf.uint8)


def _on_cpu(name: str) -> str:
    return name.replace("GPU", "CPU")


def device_plane(kernels: dict[str, float], *, runs: int = 1):
    """A plane of a GPU with one kernel per run and op, one after the other.

    Args:
        kernels: ``"<node>:<type>"`` → its kernel's seconds.
        runs: of the step.
    """
    space = private.read_trace(b"")
    plane = space.planes.add(name="/device:GPU:0")
    plane.stat_metadata[1].name = "tf_op"
    stream = plane.lines.add(name="Stream #13(Compute)", timestamp_ns=0)
    derived = plane.lines.add(name="TensorFlow Ops", timestamp_ns=0)
    start_ps = 0
    for at, (op, seconds) in enumerate(list(kernels.items()) * runs, start=2):
        plane.event_metadata[at].name = "void cutlass::Kernel2<cutlass_80_tensorop>(Params)"
        plane.stat_metadata[at].name = op
        for line in (stream, derived):
            event = line.events.add(
                metadata_id=at, offset_ps=start_ps, duration_ps=int(seconds * 1e12)
            )
            event.stats.add(metadata_id=1, ref_value=at)
        start_ps += int(seconds * 1e12)
    return plane
