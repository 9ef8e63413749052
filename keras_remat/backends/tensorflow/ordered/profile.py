"""Profiles a traced step: estimates it from shapes, then measures it in real training steps.

The measured profile reads a recording of TensorFlow's own profiler (:mod:`..profiler`). It contains
how long every op ran, and every allocation with the op that made it, so workspace is measured too.

On a GPU the profiler may see no kernels, because a privilege is missing. Then op times stay
estimates, in proportion to the measured step; :func:`blindness` says why.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from math import fsum, inf, prod
from operator import attrgetter
from statistics import median
from typing import Any

from keras_remat.backends.tensorflow.graph import kinds
from keras_remat.backends.tensorflow.graph.nodes import data_inputs, is_compiled, tensor_key
from keras_remat.backends.tensorflow.graph.step import TensorFlowStep
from keras_remat.backends.tensorflow.ordered.lower import LoweredStep
from keras_remat.backends.tensorflow.ordered.scratch import estimated_workspace, known_workspace
from keras_remat.backends.tensorflow.profiler import device, events
from keras_remat.backends.tensorflow.profiler.recorder import Recording
from keras_remat.backends.xla.kernel_costs import kernel_time_s, scaled
from keras_remat.core.graph import Op
from keras_remat.core.profile import Profile
from keras_remat.core.target import GPU_RATES

#: How much the request for an output may differ from its bytes: in bytes, or as a share of them.
_ALIGNMENT_BYTES, _PADDING = 256, 0.01

# Rates of a CPU for estimates; only their ratio decides what is cheap to recompute.
_FLOPS_PER_S = 5e10
_BYTES_PER_S = 5e9
_LAUNCH_S = 2e-6
_START = attrgetter("start_ps")


def estimated_profile(traced: TensorFlowStep, resident_bytes: int | None = None) -> Profile:
    """Returns a profile from shapes alone.

    An op takes its floating-point operations or its bytes moved at fixed rates, whichever is
    longer. Workspace is estimated by :mod:`.scratch`.

    Args:
        traced: the step.
        resident_bytes: bytes in use on the device between steps; ``None`` where the allocator keeps
            no statistics: then the bytes of the step's inputs.
    """
    ops, on_gpu = traced.graph.ops, device.on_gpu()
    return Profile(
        tuple(_estimated_time_s(traced, op, on_gpu) for op in ops),
        tuple(estimated_workspace(traced, op) for op in ops),
        traced.resident_bytes if resident_bytes is None else resident_bytes,
        "estimated",
        device.device_name(),
        "tensorflow",
    )


def _estimated_time_s(traced: TensorFlowStep, op: Op, on_gpu: bool) -> float:
    moved = sum(traced.graph.values[v].nbytes for v in (*op.inputs, *op.outputs))
    flops = _flops(traced, op) if op.kind in kinds.CONVOLUTIONS | kinds.MATMULS else 0.0
    if on_gpu:
        return kernel_time_s(flops, moved, GPU_RATES)
    return max(_LAUNCH_S, flops / _FLOPS_PER_S, moved / _BYTES_PER_S)


def _flops(traced: TensorFlowStep, op: Op) -> float:
    node = traced.handles[op.id]
    operands = [traced.tensor_shapes.get(tensor_key(i)) for i in data_inputs(node)]
    return multiply_adds(node, operands, traced.tensor_shapes.get(f"{node.name}:0"))


def multiply_adds(
    node: Any, operands: Sequence[tuple[int, ...] | None], result: tuple[int, ...] | None
) -> float:
    """Counts the floating-point operations of a product or convolution, from the shapes of its
    operands and its result; 0 where one is unknown."""
    shapes = [shape for shape in (*operands, result) if shape is not None]
    if len(shapes) <= len(operands) or len(shapes) < 3:
        return 0.0
    if node.op in kinds.MATMULS:
        # (m·k)(k·n)(m·n) = (m·n·k)², batch dimensions aside
        return 2.0 * prod(float(prod(shape)) for shape in (*shapes[:2], shapes[-1])) ** 0.5
    # Every element of the kernel meets every position of the smaller image (with a stride, one
    # image is smaller). A gradient op gets the sizes of its result as a vector, not as a tensor.
    at = len(shapes) - 1 if "BackpropFilter" in node.op else 1
    kernel, channels = shapes[at], 1 if node.attr["data_format"].s.startswith(b"NC") else -1
    images = [shape for i, shape in enumerate(shapes) if i != at and len(shape) == len(kernel)]
    return (
        2.0
        * prod(kernel)
        * min((prod(image) // max(1, image[channels]) for image in images), default=0)
    )


def blindness(recording: Recording) -> str:
    """Returns why a recording of GPU steps shows no kernels; empty where it does, and on a CPU."""
    if not device.on_gpu() or events.kernel_times_s(recording.planes):
        return ""
    said = "; ".join(recording.errors) or "it recorded no kernels and no error"
    return (
        f"The profiler cannot time kernels on {device.device_name()} ({said}), so op times are "
        "estimates in proportion to the measured step. NVIDIA's driver lets only administrators "
        "profile unless NVreg_RestrictProfilingToAdminUsers=0."
    )


def measured_profile(
    lowered: LoweredStep, recording: Recording, resident_bytes: int | None
) -> Profile | None:
    """Returns the profile measured in a recording of ``lowered``'s steps; ``None`` if it shows
    fewer than half of the ops.

    Ops without an event keep the estimate. On a GPU an op costs its kernels or its launch,
    whichever is longer, and all times are scaled so that the schedule takes as long as the measured
    steps; without kernels the profile's source is ``"estimated"``.

    Args:
        lowered: the step that ran while recording.
        recording: what :meth:`.recorder.Recorder.stop` returned.
        resident_bytes: bytes in use on the device between steps.
    """
    traced, planes, on_gpu = lowered.traced, recording.planes, device.on_gpu()
    graph = traced.graph
    nodes = _Nodes(lowered, planes)
    durations = _durations(nodes)
    if len(durations) < max(1, len(graph.needed) // 2):
        return None
    base = estimated_profile(traced, resident_bytes)
    times = [
        sum(map(median, durations[op.id].values())) if op.id in durations else base.op_time_s[op.id]
        for op in graph.ops
    ]
    kernels = _kernel_times(nodes, durations) if on_gpu else {}
    if kernels:
        times = [max(launch, kernels.get(op_id, 0.0)) for op_id, launch in enumerate(times)]
    elif on_gpu:
        times = list(base.op_time_s)
    profile = replace(base, op_time_s=tuple(times))
    if recording.allocations:
        workspace = _workspace(nodes, recording.allocations)
        asked = (max(workspace.get(op.id, 0), known_workspace(traced, op)) for op in graph.ops)
        profile = replace(profile, op_workspace_bytes=tuple(asked))
    if kernels or not on_gpu:
        profile = replace(profile, source="measured")
    step_s = events.measured_step_s(planes) if on_gpu else 0.0
    if step_s and fsum(times[i] for i in lowered.schedule.order):
        return scaled(profile, lowered.schedule, step_s)
    return profile


class _Nodes:
    """Finds the op that each node of a lowered step belongs to, and when it ran.

    Attributes:
        lowered: the step.
        planes: planes of its recording.
        op_of: name of a node → op id.
        loops: name of a node that is a loop or branch → op id.
        compiled: names of nodes that call a function compiled by XLA. They have no event like those
            of other ops, and their allocations do not name an op.
    """

    def __init__(self, lowered: LoweredStep, planes: Sequence[Any]):
        self.lowered, self.graph, self.planes = lowered, lowered.traced.graph, planes
        self.op_of = {
            name: op_id
            for names, op_id in zip(lowered.names, lowered.schedule.order, strict=True)
            for name in names
        }
        self.loops = {
            name: op_id
            for name, op_id in self.op_of.items()
            if self.graph.ops[op_id].kind in kinds.CONTROL_FLOW
        }
        handles = lowered.traced.handles
        self.compiled = {name for name, op_id in self.op_of.items() if is_compiled(handles[op_id])}

    def runs(self) -> Iterator[events.NodeEvent]:
        """Yields all runs of nodes, compiled calls last."""
        yield from events.node_events(self.planes)
        yield from self.compiled_calls

    @cached_property
    def compiled_calls(self) -> Sequence[events.NodeEvent]:
        """Returns the runs of compiled calls, in the order of time.

        The executor may continue with other ops from inside a call, so that the call's event lasts
        into the next step. So a run ends at the latest when a reader of its outputs begins.
        """
        if not self.compiled:
            return ()
        calls = sorted(
            (e for e in events.asynchronous_events(self.planes) if e.node in self.compiled),
            key=_START,
        )
        runs = chain(events.node_events(self.planes), calls)
        begun = self.read_at({self.op_of[name] for name in self.compiled}, runs)
        result = []
        for call in calls:
            starts, end = begun.get(self.op_of[call.node], ()), call.start_ps + call.duration_ps
            read = int(_first_from(starts, call.start_ps, end))
            result.append(call._replace(duration_ps=min(end, read) - call.start_ps))
        return result

    def read_at(
        self, op_ids: Iterable[int], runs: Iterable[events.NodeEvent]
    ) -> dict[int, Sequence[int]]:
        """Returns op id → when nodes that read its outputs began, in picoseconds, ascending."""
        made_by: dict[int, list[int]] = defaultdict(list)  # reader → ops whose outputs it reads
        for op_id in op_ids:
            for reader in {r for v in self.graph.ops[op_id].outputs for r in self.graph.readers[v]}:
                made_by[reader].append(op_id)
        times: dict[int, list[int]] = defaultdict(list)
        for node, start, _ in runs if made_by else ():
            reader_id = self.op(node)
            for op_id in () if reader_id is None else made_by.get(reader_id, ()):
                times[op_id].append(start)
        return {op_id: sorted(starts) for op_id, starts in times.items()}

    def op(self, name: str) -> int | None:
        """Returns the op of a node. A node inside a loop or branch, whose name begins with the
        loop's, belongs to the loop. ``None`` for any other node."""
        if name in self.op_of:
            return self.op_of[name]
        at = name.find("/")
        while at >= 0:
            if name[:at] in self.loops:
                return self.loops[name[:at]]
            at = name.find("/", at + 1)
        return None


def _durations(nodes: _Nodes) -> dict[int, dict[int, list[float]]]:
    """Returns op id → part (position of the node in the op) → seconds of its runs, as the executor
    saw them."""
    part_of = {name: part for names in nodes.lowered.names for part, name in enumerate(names)}
    durations: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    inside: dict[int, float] = defaultdict(float)  # loop or branch → seconds of all nodes in it
    for node, _, duration_ps in nodes.runs():
        op_id = nodes.op(node)
        if op_id is not None and node in part_of:
            durations[op_id][part_of[node]].append(duration_ps * 1e-12)
        elif op_id is not None:
            inside[op_id] += duration_ps * 1e-12
    if durations:
        runs = _runs(durations)
        for op_id, total_s in inside.items():
            durations[op_id] = {0: [total_s / runs]}
    return durations


def _runs(durations: dict[int, dict[int, list[float]]]) -> float:
    """Returns how often a node of the step ran, as a median."""
    return median(len(seconds) for parts in durations.values() for seconds in parts.values())


def _kernel_times(nodes: _Nodes, durations: dict[int, dict[int, list[float]]]) -> dict[int, float]:
    """Returns op id → seconds of the kernels of one run; empty where no kernels were seen."""
    totals: dict[int, float] = defaultdict(float)
    for node, seconds in events.kernel_times_s(nodes.planes).items():
        op_id = nodes.op(node)
        if op_id is not None:
            totals[op_id] += seconds
    copies = {op_id: 1 + extra for op_id, extra in nodes.lowered.schedule.recomputed.items()}
    runs = _runs(durations)
    result = {}
    for op_id, total_s in totals.items():
        counted = [len(seconds) for seconds in durations.get(op_id, {}).values()]
        # for a loop only the sum is known
        ran = max(counted) if counted and op_id not in nodes.loops.values() else 0
        result[op_id] = total_s / (ran or runs * copies.get(op_id, 1))
    return result


def _workspace(nodes: _Nodes, memory: events.Allocations) -> dict[int, int]:
    """Returns op id → the most bytes of workspace it held at once, without its outputs.

    Requests count as follows:

    * Some kernels, such as reductions, request their output as if it were workspace: a request as
      large as an output that outlives the op is an output. oneDNN's kernels may have one output
      more than their op: it counts as workspace.
    * A request that outlives an op that makes a list is in its lists.
    * The workspace of a loop or branch is the most bytes it holds at once, less its outputs: lists
      that nobody reads are freed before the loop ends.
    * Requests without an op's name belong to the compiled call that runs at that time.

    Args:
        nodes: nodes of the step; every request inside a loop or branch is the loop's.
        memory: from :func:`.events.allocation_events`.
    """
    freed, ends, graph = _freed(memory), _ends(nodes), nodes.graph
    loop_of = {op_id: name for name, op_id in nodes.loops.items()}
    outputs = {op.id: [graph.values[v].nbytes for v in op.outputs] for op in graph.ops}
    makes_lists = {v.producer for v in graph.values if v.dtype == "variant" and v.nbytes}
    held: dict[tuple[int, float], int] = defaultdict(int)  # (op, end of a loop's run) → bytes
    most: dict[int, int] = defaultdict(int)
    owner: dict[int, tuple[tuple[int, float], int]] = {}
    for start, name, stats in memory:
        address = stats.get("addr", 0)
        if name == "MemoryDeallocation":
            if address in owner:
                run, nbytes = owner.pop(address)
                held[run] -= nbytes
            continue
        node, region = str(stats.get("tf_op", "")), stats.get("region_type")
        if not node:
            node, region = _called(nodes.compiled_calls, start), "temp"
        allocating = nodes.op(node)
        nbytes = int(
            stats.get("requested_bytes", 0)
        )  # not the chunk's bytes, which depend on how fragmented the pool is
        if allocating is None or region not in ("temp", "output"):
            continue
        run = allocating, 0.0
        if allocating in loop_of:
            run = allocating, _first_from(ends.get(loop_of[allocating], ()), start, inf)
        else:
            outlives = freed.get((address, start), inf) > _first_from(
                ends.get(node, ()), start, start
            )
            is_output = any(
                abs(nbytes - n) < max(_ALIGNMENT_BYTES, _PADDING * n) for n in outputs[allocating]
            )
            if is_output and (region == "output" or outlives):
                continue
            if outlives and allocating in makes_lists:
                continue
        owner[address] = run, nbytes
        held[run] += nbytes
        most[allocating] = max(most[allocating], held[run])
    return most | {op_id: max(0, most[op_id] - sum(outputs[op_id])) for op_id in loop_of}


def _called(calls: Sequence[events.NodeEvent], at: int) -> str:
    """Returns the node of the newest call, if it was running at time ``at``; else ``""``."""
    call = calls[begun - 1] if (begun := bisect_right(calls, at, key=_START)) else None
    return call.node if call and at <= call.start_ps + call.duration_ps else ""


def _freed(memory: events.Allocations) -> dict[tuple[int, int], int]:
    """Returns address and time of every allocation → when it was freed."""
    given: dict[int, int] = {}
    freed: dict[tuple[int, int], int] = {}
    for at, name, stats in memory:
        address = stats.get("addr", 0)
        if name == "MemoryAllocation":
            given[address] = at
        elif address in given:
            freed[address, given.pop(address)] = at
    return freed


def _ends(nodes: _Nodes) -> dict[str, Sequence[int]]:
    """Returns node name → when its runs ended, in picoseconds, ascending. A loop has no event of
    its own: its runs end when readers of its outputs begin."""
    ends: dict[str, list[int]] = defaultdict(list)
    for node, start, duration in nodes.runs():
        if node in nodes.op_of and node not in nodes.loops:
            ends[node].append(start + duration)
    read_at = nodes.read_at(nodes.loops.values(), nodes.runs())
    loops = {name: read_at[op_id] for name, op_id in nodes.loops.items() if op_id in read_at}
    return {node: sorted(times) for node, times in ends.items()} | loops


def _first_from(times: Sequence[int], start: int, otherwise: float) -> float:
    """Returns the first of ascending times that is not before ``start``; else ``otherwise``."""
    at = bisect_left(times, start)
    return times[at] if at < len(times) else otherwise
