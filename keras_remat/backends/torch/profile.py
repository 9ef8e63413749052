"""Estimates the profile of a traced step from shapes, and measures it in real steps.

A measured profile times every op by itself: on a CPU by the clock, on a GPU by CUDA events. On a
CPU the profiler's memory events show what a kernel allocates for itself. On a GPU the allocator's
peak inside every op shows it, in a step of its own.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable
from itertools import pairwise, starmap
from statistics import median
from typing import Any

import torch
from torch.utils import flop_counter
from torch.utils._pytree import tree_map_only

from keras_remat.backends.torch import convolutions, private
from keras_remat.backends.torch.device import CpuDevice, CudaDevice
from keras_remat.backends.torch.lower import LoweredStep
from keras_remat.backends.torch.program import Node
from keras_remat.backends.torch.recorder import Ref
from keras_remat.backends.torch.trace import TorchTracedStep
from keras_remat.core.graph import Op
from keras_remat.core.profile import Profile
from keras_remat.core.target import CPU_RATES, GPU_RATES

aten = torch.ops.aten
#: Seconds of an op's time that are Python's, on either device.
_OVERHEAD_S = 3e-6
_NS = 1e-9


def estimated_profile(traced: TorchTracedStep, resident_bytes: int | None = None) -> Profile:
    """Returns a profile from shapes alone.

    An op takes the longer of its arithmetic and its bytes moved, at fixed rates. Its workspace is
    that of a CPU's copies for convolutions; other workspace is not expected.

    Args:
        traced: the step.
        resident_bytes: bytes in use on the device between steps; ``None`` stands for the bytes of
            the step's inputs.
    """
    return Profile(
        tuple(_estimated_time_s(traced, op) for op in traced.graph.ops),
        tuple(_scratch_bytes(traced, op) for op in traced.graph.ops),
        traced.graph.input_bytes if resident_bytes is None else resident_bytes,
        "estimated",
        str(traced.device),
        "torch",
    )


def _estimated_time_s(traced: TorchTracedStep, op: Op) -> float:
    rates = GPU_RATES if traced.device.type == "cuda" else CPU_RATES
    moved = sum(traced.graph.values[v].nbytes for v in (*op.inputs, *op.outputs))
    flops = _flops(traced, traced.handles[op.id])
    return _OVERHEAD_S + max(flops * rates.seconds_per_flop, moved * rates.seconds_per_byte)


def _scratch_bytes(traced: TorchTracedStep, op: Op) -> int:
    if traced.device.type != "cpu":
        return 0
    return convolutions.scratch_bytes(traced.handles[op.id], traced.program.layouts)


def _flops(traced: TorchTracedStep, node: Node) -> float:
    """Returns the FLOPs of a product or convolution; 0 for other ops."""
    if node.call is None:
        return 0.0
    count = flop_counter.flop_registry.get(node.call.operator.overloadpacket)
    if count is None:
        return 0.0
    layouts, call, meta = traced.program.layouts, node.call, torch.device("meta")
    args, kwargs = tree_map_only(
        Ref, lambda ref: layouts[ref.number].tensor(meta), (call.args, call.kwargs)
    )
    made = tuple(None if n is None else layouts[n].tensor(meta) for n in call.outputs)
    return float(count(*args, **kwargs, out_val=made[0] if len(made) == 1 else made))


class Recorder:
    """Measures a profile over real training steps; see
    :class:`keras_remat.backends.base.ProfileRecorder`.

    Args:
        device: the device whose steps are recorded.
    """

    remark = ""

    def __init__(self, device: CpuDevice | CudaDevice):
        self._device = device
        self._steps: list[list[Any]] = []  # of every step: when each op began
        self._bytes: list[tuple[int, int]] = []  # of a GPU's first step: see _event

    def start(self) -> bool:
        """Starts; returns ``False`` while another profiler session is under way."""
        if private.profiler_runs():
            return False
        self._steps, self._bytes = [], []
        if isinstance(self._device, CpuDevice):
            self._device.recorded = []
            self._device.probe = self._clock
        else:
            self._device.probe = self._event
        return True

    def stop(self, lowered: Any, resident_bytes: int | None) -> Profile | None:
        """Stops and returns the profile of ``lowered``'s ops; ``None`` if no step of it was
        recorded."""
        self._device.probe = None
        if not isinstance(lowered, LoweredStep):
            raise TypeError(f"a recording is of a schedule, not of {type(lowered).__name__}")
        length = len(lowered.schedule.order)
        steps = [step for step in self._steps if len(step) == length]
        if not steps:
            return None
        traced = lowered.traced
        estimated = estimated_profile(traced, resident_bytes)
        if isinstance(self._device, CpuDevice):
            spans = [_spans(step, lambda a, b: _NS * (b - a)) for step in steps]
            scratch = self._cpu_scratch(lowered)
        else:
            torch.cuda.synchronize()
            timed = steps[1:] or steps
            spans = [_spans(step, lambda a, b: 1e-3 * a.elapsed_time(b)) for step in timed]
            scratch = self._cuda_scratch(lowered)
        times = list(estimated.op_time_s)
        seen: dict[int, list[float]] = {}
        for position, op_id in enumerate(lowered.schedule.order):
            seen.setdefault(op_id, []).extend(step[position] for step in spans)
        for op_id, measured in seen.items():
            times[op_id] = max(0.0, median(measured))
        return Profile(
            tuple(times),
            tuple(scratch),
            estimated.resident_bytes,
            "measured",
            self._device.name,
            "torch",
        )

    # ---------------------------------------------------------------- a CPU

    def _clock(self, position: int) -> None:
        if position == 0:
            self._steps.append([])
        self._steps[-1].append(time.time_ns())

    def _cpu_scratch(self, lowered: LoweredStep) -> list[int]:
        """Returns the most bytes that every op allocated in one step beyond its outputs."""
        assert isinstance(self._device, CpuDevice)
        scratch = [0] * len(lowered.traced.graph.ops)
        for step, events in zip(self._steps, self._device.recorded, strict=False):
            if len(step) == len(lowered.schedule.order):
                for op_id, nbytes in _scratch(lowered, step, events):
                    scratch[op_id] = max(scratch[op_id], nbytes)
        self._device.recorded = []
        return scratch

    # ---------------------------------------------------------------- a GPU

    def _event(self, position: int) -> None:
        """Notes the time; in the first step also the peak of the op before, and the bytes in use.
        That takes longer than many an op, so the first step's times count if there is no other."""
        if position == 0:
            self._steps.append([])
        if len(self._steps) == 1:
            self._bytes.append((private.cuda_peak_bytes(), private.cuda_in_use_bytes()))
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._steps[-1].append(event)

    def _cuda_scratch(self, lowered: LoweredStep) -> list[int]:
        """Returns the most bytes that the allocator handed out inside every op beyond its
        outputs."""
        scratch, graph = [0] * len(lowered.traced.graph.ops), lowered.traced.graph
        # the last op's peak is not known
        for op_id, noted in zip(lowered.schedule.order, pairwise(self._bytes), strict=False):
            (_, before), (peak, _) = noted
            own = sum(graph.values[v].nbytes for v in graph.ops[op_id].outputs)
            scratch[op_id] = max(scratch[op_id], peak - before - own)
        return scratch


def _spans(step: list[Any], between_s: Callable[[Any, Any], float]) -> list[float]:
    """Returns the seconds between the beginnings of ops; the last op gets a fixed time."""
    return [*starmap(between_s, pairwise(step)), _OVERHEAD_S]


def _scratch(
    lowered: LoweredStep, began_ns: list[int], events: list[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Returns op ids, each with the most bytes that the op took beyond its outputs."""
    graph, order = lowered.traced.graph, lowered.schedule.order
    most: dict[int, tuple[int, int]] = {}  # position → bytes before it, the most in it
    level = 0
    for at, nbytes in events:
        position = bisect_right(began_ns, at) - 1
        before, highest = most.get(position, (level, level))
        level += nbytes
        most[position] = before, max(highest, level)
    found = []
    for position, (before, highest) in most.items():
        if position >= 0:
            op = graph.ops[order[position]]
            own = sum(graph.values[v].nbytes for v in op.outputs)
            found.append((op.id, max(0, highest - before - own)))
    return found
