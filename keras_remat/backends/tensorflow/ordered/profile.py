"""Profiles of a traced step: estimated from shapes before anything has run, measured from real
training steps afterwards.

The measured profile reads TensorFlow's own profiler, which records two things this package needs:
how long every kernel ran (events ``"<node>:<type>"``) and every allocation with the op that made it
(``MemoryAllocation`` with ``region_type`` output or temp), so workspace is measured too. Training
goes on while it records. A profiler session that the user runs already is left alone.
"""

from __future__ import annotations

import logging
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import inf, prod
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import tensorflow as tf

from keras_remat.backends.tensorflow import private
from keras_remat.backends.tensorflow.graph import kinds
from keras_remat.backends.tensorflow.graph.trace import TensorFlowStep, tensor_key
from keras_remat.backends.tensorflow.ordered.lower import LoweredStep
from keras_remat.core.graph import Op
from keras_remat.core.profile import Profile

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

#: By how much an output's request may be off its bytes, and by what share of them.
_ALIGNMENT_BYTES, _PADDING = 256, 0.01

# Rates for estimates; only their ratio decides what is cheap to recompute.
_FLOPS_PER_S = 5e10
_BYTES_PER_S = 5e9
_LAUNCH_S = 2e-6


def device_name() -> str:
    """The device whose memory counts: the first visible GPU, else the CPU."""
    return "GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"


def estimated_profile(traced: TensorFlowStep, resident_bytes: int | None = None) -> Profile:
    """A profile from shapes alone: floating-point operations or bytes moved at fixed rates,
    whichever takes longer.

    Workspace is taken as none, but where it is known: how much a kernel wants depends on the
    device, and a guess that is too high would refuse what fits.

    Args:
        traced: the step.
        resident_bytes: bytes in use on the device between steps, if measured; never less than what
            the step's inputs need.
    """
    ops = traced.graph.ops
    resident = max(traced.resident_bytes, resident_bytes or 0)
    times, workspaces = (
        (_estimated_time_s(traced, op) for op in ops),
        (_known_workspace(traced, op) for op in ops),
    )
    return Profile(
        tuple(times), tuple(workspaces), resident, "estimated", device_name(), "tensorflow"
    )


def _known_workspace(traced: TensorFlowStep, op: Op) -> int:
    """Bytes that a kernel asks for whatever its device; the recorder does not see them while they
    are few."""
    return traced.graph.values[op.outputs[0]].nbytes if op.kind in kinds.SCRATCH else 0


def _estimated_time_s(traced: TensorFlowStep, op: Op) -> float:
    moved = sum(traced.graph.values[v].nbytes for v in (*op.inputs, *op.outputs))
    flops = _flops(traced, op) if op.kind in kinds.CONVOLUTIONS | kinds.MATMULS else 0.0
    return max(_LAUNCH_S, flops / _FLOPS_PER_S, moved / _BYTES_PER_S)


def _flops(traced: TensorFlowStep, op: Op) -> float:
    node = traced.handles[op.id]
    operands = [
        traced.tensor_shapes.get(tensor_key(i)) for i in node.input if not i.startswith("^")
    ]
    return multiply_adds(node, operands, traced.tensor_shapes.get(f"{node.name}:0"))


def multiply_adds(
    node: Any, operands: Sequence[tuple[int, ...] | None], result: tuple[int, ...] | None
) -> float:
    """Floating-point operations of a product or convolution, from the shapes of its operands and
    its result; 0 where one is unknown."""
    shapes = [shape for shape in (*operands, result) if shape is not None]
    if len(shapes) <= len(operands) or len(shapes) < 3:
        return 0.0
    if node.op in kinds.MATMULS:
        # (m·k)(k·n)(m·n) = (m·n·k)², batch dimensions aside
        return 2.0 * prod(float(prod(shape)) for shape in (*shapes[:2], shapes[-1])) ** 0.5
    # Every element of the kernel meets every position of the smaller image, which a stride leaves;
    # a gradient's sizes come as a vector.
    at = len(shapes) - 1 if "BackpropFilter" in node.op else 1
    kernel, channels = shapes[at], 1 if node.attr["data_format"].s.startswith(b"NC") else -1
    images = [shape for i, shape in enumerate(shapes) if i != at and len(shape) == len(kernel)]
    return (
        2.0
        * prod(kernel)
        * min((prod(image) // max(1, image[channels]) for image in images), default=0)
    )


class Recorder:
    """Measures a profile over real training steps.

    ``with``-free on purpose: training steps happen between :meth:`start` and :meth:`stop`, in
    Keras's loop.
    """

    def __init__(self) -> None:
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    @property
    def recording(self) -> bool:
        return self._directory is not None

    def start(self) -> bool:
        """Starts recording; returns ``False`` when the user's own profiler session is running,
        which is then left alone."""
        directory = tempfile.TemporaryDirectory(prefix="keras_remat_profile_")
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

    def stop(self) -> list[Any]:
        """Stops recording and returns the trace's planes; empty when nothing was recorded."""
        if self._directory is None:
            return []
        directory, self._directory = self._directory, None
        try:
            tf.profiler.experimental.stop()
            files = sorted(Path(directory.name).rglob("*.xplane.pb"))
            return [
                plane for file in files for plane in private.read_trace(file.read_bytes()).planes
            ]
        except tf.errors.UnavailableError as error:  # the user's own code has stopped the session
            logger.warning(
                "The profiler session ended early (%s); the estimated profile stays.", error.message
            )
            return []
        finally:
            directory.cleanup()


def measured_profile(
    lowered: LoweredStep, planes: list[Any], resident_bytes: int
) -> Profile | None:
    """The profile that a recording of ``lowered``'s steps shows, or ``None`` when it shows too few
    of its ops.

    Ops without an event (never seen to run for 98 % of the time they are expected to) keep the
    estimate.

    Args:
        lowered: the step that ran while recording.
        planes: what :meth:`Recorder.stop` returned.
        resident_bytes: bytes in use on the device between steps.
    """
    graph = lowered.traced.graph
    op_of = {
        name: op_id
        for names, op_id in zip(lowered.names, lowered.schedule.order, strict=True)
        for name in names
    }
    loops = {
        name: op_id for name, op_id in op_of.items() if graph.ops[op_id].kind in kinds.CONTROL_FLOW
    }
    part_of = {name: part for names in lowered.names for part, name in enumerate(names)}
    durations: dict[int, dict[int, list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )  # op id → its node → seconds
    inside: dict[int, float] = defaultdict(
        float
    )  # id of a loop or branch → seconds of all kernels that ran in it
    for plane in planes:
        for name, _, duration_ps, _ in _events(plane):
            node, separator, _ = name.rpartition(":")
            if separator and node in op_of:
                durations[op_of[node]][part_of[node]].append(duration_ps * 1e-12)
            elif separator and (op_id := _enclosing(node, loops)) is not None:
                inside[op_id] += duration_ps * 1e-12
    if len(durations) < max(1, len(graph.needed) // 2):
        return None
    runs = median(len(seconds) for parts in durations.values() for seconds in parts.values())
    for op_id, total_s in inside.items():
        durations[op_id] = {0: [total_s / runs]}
    base = estimated_profile(lowered.traced, resident_bytes)
    outputs = {op.id: [graph.values[v].nbytes for v in op.outputs] for op in graph.ops}
    workspace = _workspace(allocation_events(planes), op_of, loops, outputs, _ends(planes, op_of))
    times = [
        sum(map(median, durations[op.id].values())) if op.id in durations else base.op_time_s[op.id]
        for op in graph.ops
    ]
    workspaces = [max(workspace.get(op.id, 0), base.op_workspace_bytes[op.id]) for op in graph.ops]
    return Profile(
        tuple(times),
        tuple(workspaces),
        base.resident_bytes,
        "measured",
        device_name(),
        "tensorflow",
    )


def _events(plane: Any) -> Iterator[tuple[str, int, int, Callable[[], dict[str, Any]]]]:
    """Every event of a plane: name, absolute start and duration in picoseconds, and a function that
    decodes its statistics."""
    names = {key: metadata.name for key, metadata in plane.event_metadata.items()}
    stat_names = {key: metadata.name for key, metadata in plane.stat_metadata.items()}

    def decode(event: Any) -> dict[str, Any]:
        decoded: dict[str, Any] = {}
        for stat in event.stats:
            which = stat.WhichOneof("value")
            value = getattr(stat, which) if which else None
            decoded[stat_names[stat.metadata_id]] = (
                stat_names.get(value) if which == "ref_value" else value
            )
        return decoded

    for line in plane.lines:
        for event in line.events:
            start = line.timestamp_ns * 1000 + event.offset_ps
            yield names[event.metadata_id], start, event.duration_ps, partial(decode, event)


def allocation_events(planes: list[Any]) -> list[tuple[int, str, dict[str, Any]]]:
    """Every allocation and deallocation in the order of time: start in picoseconds,
    ``"MemoryAllocation"`` or ``"MemoryDeallocation"``, and what the allocator said about it."""
    names = ("MemoryAllocation", "MemoryDeallocation")
    events = (event for plane in planes for event in _events(plane))
    return sorted(
        ((start, name, stats()) for name, start, _, stats in events if name in names),
        key=lambda event: event[0],
    )


def _workspace(
    memory: list[tuple[int, str, dict[str, Any]]],
    op_of: dict[str, int],
    loops: dict[str, int],
    outputs: dict[int, list[int]],
    ends: dict[str, list[int]],
) -> dict[int, int]:
    """Op id → the most bytes it asked for at once that are none of its outputs.

    Kernels of oneDNN may have an output more than their op; and some kernels, those of reductions,
    ask for their output as if it were workspace: what is as large as an output and outlives the op
    is one.

    Args:
        memory: as :func:`allocation_events` returns it.
        op_of: a node's name → op id.
        loops: those of them that are loops or branches; all that is asked for inside is their
            workspace.
        outputs: op id → bytes of its outputs.
        ends: a node's name → when its runs ended, in picoseconds, ascending.
    """
    freed = _freed(memory)
    held: dict[int, int] = defaultdict(int)
    most: dict[int, int] = defaultdict(int)
    owner: dict[int, tuple[int, int]] = {}
    for start, name, stats in memory:
        address = stats.get("addr", 0)
        if name == "MemoryDeallocation":
            if address in owner:
                op_id, nbytes = owner.pop(address)
                held[op_id] -= nbytes
            continue
        node = str(stats.get("tf_op", ""))
        allocating = op_of[node] if node in op_of else _enclosing(node, loops)
        nbytes = int(
            stats.get("requested_bytes", 0)
        )  # the chunk is larger, by as much as the pool happens to be fragmented
        region = stats.get("region_type")
        if allocating is None:
            continue
        if node in op_of and any(
            abs(nbytes - n) < max(_ALIGNMENT_BYTES, _PADDING * n) for n in outputs[op_of[node]]
        ):
            end = next((end for end in ends.get(node, ()) if end >= start), start)
            if region == "output" or freed.get((address, start), inf) > end:
                continue
        elif region not in ("temp", "output"):
            continue
        owner[address] = (allocating, nbytes)
        held[allocating] += nbytes
        most[allocating] = max(most[allocating], held[allocating])
    return most


def _freed(memory: list[tuple[int, str, dict[str, Any]]]) -> dict[tuple[int, int], int]:
    """Address and time of every allocation → when it was given back."""
    given: dict[int, int] = {}
    freed: dict[tuple[int, int], int] = {}
    for at, name, stats in memory:
        address = stats.get("addr", 0)
        if name == "MemoryAllocation":
            given[address] = at
        elif address in given:
            freed[address, given.pop(address)] = at
    return freed


def _ends(planes: list[Any], op_of: dict[str, int]) -> dict[str, list[int]]:
    """Node name → when its runs ended, in picoseconds, ascending."""
    ends: dict[str, list[int]] = defaultdict(list)
    for plane in planes:
        for name, start, duration, _ in _events(plane):
            node, separator, _ = name.rpartition(":")
            if separator and node in op_of:
                ends[node].append(start + duration)
    return {node: sorted(times) for node, times in ends.items()}


def _enclosing(name: str, loops: dict[str, int]) -> int | None:
    """The loop or branch that a node was written out from: its name is in front."""
    at = name.find("/")
    while at >= 0:
        if name[:at] in loops:
            return loops[name[:at]]
        at = name.find("/", at + 1)
    return None
