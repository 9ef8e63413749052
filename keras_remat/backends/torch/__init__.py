"""Records Keras's PyTorch step below autograd, plans it, and runs it as Python.

The trainer's step is planned op by op, and the plan runs as generated Python. Imports PyTorch and
Keras, never another framework, and no solver. A step runs op by op in the order of its plan, in
eager mode without autograd: the backward phase is part of the recording.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar
from weakref import WeakSet

import torch

from keras_remat.backends import batches
from keras_remat.backends.base import RunStep
from keras_remat.backends.example_batches import example_batch
from keras_remat.backends.installed import Installed, StepRunner
from keras_remat.backends.memory import SimulatedMemory
from keras_remat.backends.processes import Processes
from keras_remat.backends.torch import trace as tracing
from keras_remat.backends.torch.device import is_out_of_memory, live_device
from keras_remat.backends.torch.lower import LoweredStep
from keras_remat.backends.torch.profile import Recorder, estimated_profile
from keras_remat.backends.torch.rehearsal import compute_the_same
from keras_remat.backends.torch.sliced import StepSlicer
from keras_remat.backends.torch.swap import InstalledTrainFunction
from keras_remat.backends.torch.trace import TorchTracedStep, as_tensors
from keras_remat.backends.torch.variables import gradient_bytes, snapshot
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule, Usage
from keras_remat.core.simulate import simulate
from keras_remat.core.target import Target
from keras_remat.core.writing import Writing
from keras_remat.errors import UnsupportedModelError

Result = TypeVar("Result")


class TorchBackend:
    """Implements :class:`keras_remat.backends.base.Backend`."""

    name, compilation = "torch", "ordered"
    measures_op_times = True
    guesses_workspaces = False
    runs_slices = True
    auto_solver = "auto"
    batch_multiple = 1
    processes = Processes()

    def __init__(self) -> None:
        self.device = live_device()
        self.memory = SimulatedMemory()
        self._written: dict[int, torch.Tensor] = {}  # id → tensor steps write, not the model's
        self._lowered: WeakSet[LoweredStep] = WeakSet()
        self._changes = 0  # how often settings have changed

    def check(self, model: Any) -> str | None:
        tracing.check_supported(model)
        self.device.trains(model)
        if model.jit_compile:
            return "jit_compile=True: the rematerialized step runs op by op, without torch.compile."
        return None

    is_out_of_memory = staticmethod(is_out_of_memory)

    def estimated_profile(
        self, traced: TorchTracedStep, resident_bytes: int | None = None
    ) -> Profile:
        """Returns a profile from shapes alone. A plan's step first frees the gradients that Keras's
        own step has left on the weights, so they do not count as resident."""
        if resident_bytes is not None:
            left = gradient_bytes(traced.places.own, traced.device)
            resident_bytes = max(0, resident_bytes - left)
        return estimated_profile(traced, resident_bytes)

    def example_batch(self, model: Any, batch: Any) -> Any:
        self.device.trains(model)
        made = as_tensors(example_batch(model, batch))
        self.device.note_batch(made)
        return made

    def resized_spec(self, batch: Any, size: int) -> Any:
        def spec(shape: tuple[int, ...], leaf: Any) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.as_tensor(leaf).dtype, device="meta")

        return batches.resized_spec(batch, size, spec)

    def trace(self, model: Any, batch: Any, micro_batches: int = 1) -> TorchTracedStep:
        self.device.trains(model)
        has_only_shapes = any(getattr(leaf, "is_meta", False) for leaf in batches.leaves_of(batch))
        if not has_only_shapes:
            self.device.note_batch(batch)
        traced = tracing.trace(model, batch, micro_batches)
        traced = replace(traced, changes=self._changes)
        self._written |= {id(tensor): tensor for tensor in traced.program.written_constants}
        return replace(traced, slicer=StepSlicer(traced)) if micro_batches == 1 else traced

    def recorder(self) -> Recorder:
        return Recorder(self.device)

    def lower(
        self,
        traced: Any,
        problem: Problem,
        schedule: Schedule,
        writing: Writing | None = None,
    ) -> RunStep:
        gc.collect()  # Keras's own steps, and traces, leave batches in reference cycles
        lowered = LoweredStep(self._as_it_is_now(traced), schedule, self.device)
        self._lowered.add(lowered)
        added = simulate(problem, schedule).peak_bytes - problem.profile.resident_bytes
        self.device.expect(lowered, added)
        return lowered

    def record_anew(self) -> bool | None:
        """Records every step in use once more, after a setting that Python holds was changed.

        Returns:
            Whether one of them computes something else now; ``None`` if none is in use.

        Raises:
            UnsupportedModelError: a step cannot be recorded any more, or has another graph.
        """
        self._changes += 1
        others = []
        for lowered in list(self._lowered):
            before, now = lowered.traced, self._as_it_is_now(lowered.traced)
            lowered.replace(now)
            others.append(not compute_the_same(before.program.recording, now.program.recording))
        return any(others) if others else None

    def _as_it_is_now(self, traced: TorchTracedStep) -> TorchTracedStep:
        """Returns a step, recorded anew if a setting has changed since it was recorded."""
        if traced.changes == self._changes:
            return traced
        whole = traced.whole
        base: Any = traced if whole is None else whole.step
        now = self.trace(base.model, tracing.shapes_of_batch(base), base.micro_batches)
        if whole is not None:
            now = StepSlicer(now).sliced(whole.sliced.slicing)
        if now.graph.fingerprint != traced.graph.fingerprint:
            raise UnsupportedModelError(
                "What Python holds for the step was set, and the step computes in other ops since. "
                "What was planned for it does not hold."
            )
        return now

    def measure(self, run: Callable[[], Result], *, wait: bool = True) -> tuple[Result, Usage]:
        return self.device.measure(run, wait=wait)

    def snapshot(self, model: Any) -> Callable[[], None]:
        return snapshot(model, self._written.values())

    def install(self, model: Any, runner: StepRunner) -> Installed:
        self.device.trains(model)
        return InstalledTrainFunction(model, runner, self.device, self.record_anew)


def backend() -> TorchBackend:
    """Returns a backend for one model."""
    return TorchBackend()


def backends(model: Any, compilation: str, target: Target | None = None) -> list[TorchBackend]:
    """Returns the backends that can train a model on PyTorch.

    Raises:
        UnsupportedModelError: a compiled step was asked for, or a target was given.
    """
    if target is not None:
        raise UnsupportedModelError(
            f"Keras runs on PyTorch, whose step is planned on a device that is there, and not for "
            f"{target.name}. Set KERAS_BACKEND=jax for a model written in Keras's "
            "own ops. A plan belongs to the backend that it was made on; "
            "keras_remat.will_it_fit answers on either."
        )
    if compilation == "compiled":
        raise UnsupportedModelError(
            'compilation="compiled" needs a compiler that takes a whole step; on PyTorch every '
            "rematerialized step runs op by op."
        )
    return [TorchBackend()]
