"""What a recording says: how long every kernel ran, every allocation, how long the steps took.

On a CPU the executor's events ``"<node>:<type>"`` last as long as the kernel runs. On a GPU they
last as long as the launch; the kernels are on planes of their own (``/device:GPU:n``), under the
kernel's name, and say in ``tf_op`` which op launched them. An op costs the longer of the two: a
small kernel costs its launch. Reference: TensorFlow's ``executor.cc`` and ``cupti_collector.cc``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

#: Names the event that lasts as long as a step that is measured.
MEASURED_STEP = "keras_remat/measured_step"

_DEVICE_PLANE, _STREAM_LINE = "/device:GPU:", "Stream"
_ALLOCATIONS = ("MemoryAllocation", "MemoryDeallocation")
#: Names the executor's event of an op that may end later than its kernel's call does.
_ASYNCHRONOUS = "ExecutorState::ProcessAsync::Start"
#: What TensorFlow 2.18 writes where it has no text; newer ones leave the statistic out.
_NO_TEXT = "(null)"
_S_PER_PS = 1e-12


class NodeEvent(NamedTuple):
    """Tells of one run of a graph's node, as the executor saw it.

    Attributes:
        node: its name.
        start_ps: absolute, in picoseconds.
        duration_ps: in picoseconds.
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
    """Yields the calls of asynchronous ops: loops, called functions, what XLA has compiled. The
    last of these, on a CPU, have run when their call ends."""
    for plane in planes:
        for name, start, duration, stats in _events(plane):
            if name == _ASYNCHRONOUS:
                yield NodeEvent(str(stats().get("name", "")), start, duration)


def kernel_times_s(planes: Sequence[Any]) -> dict[str, float]:
    """Returns the seconds of all kernels that each node launched; empty where none were
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
    """Returns the median seconds of the recorded steps that were measured; 0 where none was."""
    times = [
        duration * _S_PER_PS
        for plane in planes
        for name, _, duration, _ in _events(plane)
        if name == MEASURED_STEP
    ]
    return median(times) if times else 0.0


#: Every allocation and deallocation in the order of time: start in picoseconds,
#: ``"MemoryAllocation"`` or ``"MemoryDeallocation"``, and what the allocator said about it.
Allocations = Sequence[tuple[int, str, dict[str, Any]]]


def allocation_events(planes: Sequence[Any], allocator: str = "") -> Allocations:
    """Returns what allocators were asked for, and given back.

    Args:
        planes: of a recording.
        allocator: how the allocator's name begins; a GPU's process has others, of the host.
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
        plane: of a recording.
        lines: how the names of the lines begin that are read.
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
