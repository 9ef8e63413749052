"""Reads a recording: the times of kernels and steps, and every allocation.

On a CPU the executor's events ``"<node>:<type>"`` last as long as the kernel runs. On a GPU they
last as long as the launch. The kernels are on other planes (``/device:GPU:n``), under the kernel's
name, and ``tf_op`` names the op that launched them. An op costs the longer of the two: a small
kernel costs its launch. Reference: TensorFlow's ``executor.cc`` and ``cupti_collector.cc``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

#: Name of the event that lasts as long as a measured step.
MEASURED_STEP = "keras_remat/measured_step"

_DEVICE_PLANE, _STREAM_LINE = "/device:GPU:", "Stream"
_ALLOCATIONS = ("MemoryAllocation", "MemoryDeallocation")
#: Name of the executor's event of an asynchronous op, which may end after its kernel's call.
_ASYNCHRONOUS = "ExecutorState::ProcessAsync::Start"
#: What TensorFlow 2.18 writes where it has no text; newer ones leave the statistic out.
_NO_TEXT = "(null)"
_S_PER_PS = 1e-12


class NodeEvent(NamedTuple):
    """Holds one run of a graph's node, as the executor saw it.

    Attributes:
        node: name of the node.
        start_ps: absolute start in picoseconds.
        duration_ps: duration in picoseconds.
    """

    node: str
    start_ps: int
    duration_ps: int


def node_events(planes: Sequence[Any]) -> Iterator[NodeEvent]:
    """Yields the executor's events."""
    for plane in planes:
        if plane.name.startswith(_DEVICE_PLANE):
            continue
        for name, start, duration, _ in _events(plane):
            node, separator, _ = name.rpartition(":")
            if separator:
                yield NodeEvent(node, start, duration)


def asynchronous_events(planes: Sequence[Any]) -> Iterator[NodeEvent]:
    """Yields the calls of asynchronous ops: loops, called functions, functions compiled by XLA. On
    a CPU the compiled functions have run when their call ends."""
    for plane in planes:
        for name, start, duration, stats in _events(plane):
            if name == _ASYNCHRONOUS:
                yield NodeEvent(str(stats().get("name", "")), start, duration)


def kernel_times_s(planes: Sequence[Any]) -> dict[str, float]:
    """Returns node name → seconds of all kernels that it launched; empty where none were
    recorded."""
    seconds: dict[str, float] = defaultdict(float)
    for plane in planes:
        if not plane.name.startswith(_DEVICE_PLANE):
            continue
        # other lines of the plane repeat the kernels, grouped by op or by step
        for _, _, duration, stats in _events(plane, _STREAM_LINE):
            annotation = str(stats().get("tf_op") or "").rpartition("::")[2]
            node, separator, _ = annotation.rpartition(":")
            if separator:
                seconds[node] += duration * _S_PER_PS
    return dict(seconds)


def measured_step_s(planes: Sequence[Any]) -> float:
    """Returns the median seconds of the measured steps in a recording; 0 where it has none."""
    times = [
        duration * _S_PER_PS
        for plane in planes
        for name, _, duration, _ in _events(plane)
        if name == MEASURED_STEP
    ]
    return median(times) if times else 0.0


#: All allocations and deallocations in the order of time: start in picoseconds,
#: ``"MemoryAllocation"`` or ``"MemoryDeallocation"``, and the allocator's statistics.
Allocations = Sequence[tuple[int, str, dict[str, Any]]]


def allocation_events(planes: Sequence[Any], allocator: str = "") -> Allocations:
    """Returns the allocations and deallocations of a recording.

    Args:
        planes: planes of the recording.
        allocator: how the allocator's name begins; a process with a GPU has the host's, too.
    """
    events = (event for plane in planes for event in _events(plane))
    decoded = ((start, name, stats()) for name, start, _, stats in events if name in _ALLOCATIONS)
    return sorted(
        (e for e in decoded if str(e[2].get("allocator_name", "")).startswith(allocator)),
        key=lambda event: event[0],
    )


def _events(
    plane: Any, lines: str = ""
) -> Iterator[tuple[str, int, int, Callable[[], dict[str, Any]]]]:
    """Yields every event of a plane: name, absolute start and duration in picoseconds, and a
    function that decodes its statistics.

    Args:
        plane: plane of a recording.
        lines: only lines whose names begin with this are read.
    """
    names = {key: metadata.name for key, metadata in plane.event_metadata.items()}
    stat_names = {key: metadata.name for key, metadata in plane.stat_metadata.items()}

    def decode(event: Any) -> dict[str, Any]:
        decoded: dict[str, Any] = {}
        for stat in event.stats:
            which = stat.WhichOneof("value")
            value = getattr(stat, which) if which else None
            value = stat_names.get(value) if which == "ref_value" else value
            if value != _NO_TEXT:
                decoded[stat_names[stat.metadata_id]] = value
        return decoded

    for line in plane.lines:
        if not line.name.startswith(lines):
            continue
        for event in line.events:
            start = line.timestamp_ns * 1000 + event.offset_ps
            yield names[event.metadata_id], start, event.duration_ps, partial(decode, event)
