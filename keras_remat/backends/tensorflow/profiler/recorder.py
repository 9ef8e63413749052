"""Records training steps with TensorFlow's own profiler.

Training goes on meanwhile. A profiler session that the user is running is left alone.
"""

from __future__ import annotations

import logging
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tensorflow as tf

from keras_remat.backends.tensorflow import private
from keras_remat.backends.tensorflow.profiler import device, events

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recording:
    """Holds the profiler's output.

    Attributes:
        planes: one per device and one for the host, as TensorFlow writes them (``XPlane``).
        errors: the profiler's errors, such as a missing privilege to record kernels.
    """

    planes: tuple[Any, ...] = ()
    errors: tuple[str, ...] = ()

    @cached_property
    def allocations(self) -> events.Allocations:
        """Returns the allocations and deallocations of the device's allocator."""
        return events.allocation_events(self.planes, device.allocator_name())


class Recorder:
    """Records real training steps.

    It is not a context manager: training steps run between :meth:`start` and :meth:`stop`, in
    Keras's loop.
    """

    def __init__(self) -> None:
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    def start(self) -> bool:
        """Starts recording; returns ``False`` where it cannot: the user's own profiler session is
        running, or there is no folder to write to."""
        try:
            directory = tempfile.TemporaryDirectory(
                prefix="keras_remat_profile_", ignore_cleanup_errors=True
            )
        except OSError as error:
            logger.warning("Nothing is recorded, as there is no temporary folder: %s", error)
            return False
        options = tf.profiler.experimental.ProfilerOptions(
            host_tracer_level=3, python_tracer_level=0, device_tracer_level=1
        )
        try:
            tf.profiler.experimental.start(directory.name, options)
        except tf.errors.AlreadyExistsError:
            directory.cleanup()
            return False
        self._directory = directory
        return True

    def stop(self) -> Recording:
        """Stops and returns the recording; empty where nothing was recorded."""
        if self._directory is None:
            return Recording()
        directory, self._directory = self._directory, None
        try:
            tf.profiler.experimental.stop()
            traces = [
                private.read_trace(file.read_bytes())
                for file in sorted(Path(directory.name).rglob("*.xplane.pb"))
            ]
            return Recording(
                tuple(plane for trace in traces for plane in trace.planes),
                tuple(error for trace in traces for error in trace.errors),
            )
        except (tf.errors.OpError, OSError) as error:
            # the user's own code has stopped the session, or the disk is full
            logger.warning(
                "The profiler session ended early (%s); the estimated profile stays.", error
            )
            return Recording()
        finally:
            directory.cleanup()
