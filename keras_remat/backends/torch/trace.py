"""Traces Keras's whole PyTorch train step as a graph, from forward phase to metrics.

``model.train_step(batch)`` (forward, loss, backward, optimizer, metrics) is called on stand-ins
that have shapes and no memory (:mod:`.recorder`); stand-ins also take the place of all variables.
So nothing is allocated, run or drawn, and the model is not touched. The recording becomes a graph
(:mod:`.program`).

Known limit: effects of a ``train_step`` in Python alone (a counter, a list that grows) happen once,
as inside a ``tf.function``.

One file, though a little long: what is checked before, during and after one recording.
"""

from __future__ import annotations

import pickle
import random
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import keras
import numpy as np
import torch

from keras_remat.backends import interrupts, keras_private
from keras_remat.backends.base import TracedStep
from keras_remat.backends.batches import check_dense, leaves_of, map_arrays
from keras_remat.backends.memory import MemoryModel
from keras_remat.backends.micro_batches import watched_micro_batches
from keras_remat.backends.torch import convolutions, generator_states, in_place, private
from keras_remat.backends.torch.accumulate import accumulated_train_step
from keras_remat.backends.torch.branches import Branches
from keras_remat.backends.torch.held import Settings, attributes_kept, optimizers_of
from keras_remat.backends.torch.program import Program
from keras_remat.backends.torch.recorder import Recorder, Recording, Ref, numbers_in
from keras_remat.backends.torch.rehearsal import check_next_step
from keras_remat.backends.torch.variables import (
    Places,
    gradient_bytes,
    places_of,
    training_mode,
)
from keras_remat.core.graph import FORWARD
from keras_remat.core.problem import Problem
from keras_remat.errors import UnsupportedModelError

_OWN_FOLDER = Path(__file__).parents[2]
_GRADIENT_OF_BEFORE = (
    "The step uses gradients that an earlier step has left on the weights. Call zero_grad() before "
    "backward(), as Keras's own step does."
)


@dataclass(frozen=True, eq=False, kw_only=True)
class TorchTracedStep(TracedStep):
    """Holds a traced Keras PyTorch train step.

    Args:
        program: the nodes of its graph.
        model: the model of the step.
        places: places of the tensors that it reads and writes.
        logs: what it returns, with a :class:`.recorder.Ref` or ``Scalar`` in the place of each
            computed value.
        micro_batches: number of micro-batches it trains the batch in.
        device: the device it runs on.
        data: the batch, as tensors without memory.
        changes: number of changed settings before it was recorded
            (:meth:`keras_remat.backends.torch.TorchBackend.record_anew`).
    """

    program: Program
    model: Any
    places: Places
    logs: Any
    micro_batches: int
    device: torch.device
    data: Any
    changes: int = 0

    def plain_peak_bytes(self, problem: Problem, memory: MemoryModel) -> int:
        """Returns the bytes Keras's own step needs: those that were alive when its calls were
        recorded, and those that kernels take for themselves. A functional model keeps the outputs
        of all its layers until its call ends; a rematerialized step does not. Gradients that an
        earlier step has left on the weights exist until the backward phase."""
        if self.whole is not None:
            return self.whole.step.plain_peak_bytes(self.whole.problem(problem), memory)
        alive = self.program.recording.plain_bytes(self.device)
        scratch, left = [0] * len(alive), gradient_bytes(self.places.own, self.device)
        for node in self.program.nodes:
            if node.call is not None:
                own = problem.profile.op_workspace_bytes[node.id]
                own += left if self.graph.ops[node.id].phase == FORWARD else 0
                scratch[node.call.at] = max(scratch[node.call.at], own)
        most = max((a + b for a, b in zip(alive, scratch, strict=True)), default=0)
        return problem.profile.resident_bytes + most

    def workspaces_towards(self, other: TracedStep, share: Fraction) -> Sequence[int]:
        """Returns the workspaces that convolutions are expected to take on a CPU. They differ from
        the traced ones because one thread takes other kernels from 16 samples on."""
        if self.device.type != "cpu" or not isinstance(other, TorchTracedStep):
            return ()
        mine, its = self.program.layouts, other.program.layouts
        return [
            convolutions.scratch_between(self.handles[n], mine, other.handles[n], its, share)
            for n in range(len(self.graph.ops))
        ]


def check_supported(model: Any) -> None:
    """Raises :class:`UnsupportedModelError` with the reason when the model's step cannot be
    rematerialized."""
    if not getattr(model, "compiled", False):
        raise UnsupportedModelError("The model is not compiled: call model.compile(...) first.")
    if model.optimizer is None and not optimizers_of(model):
        raise UnsupportedModelError(
            "The model has no optimizer: there is no train step to plan for."
        )
    if keras.distribution.distribution() is not None or _runs_in_several_processes():
        raise UnsupportedModelError(
            "The model trains on several devices. On PyTorch only the step of one can be planned."
        )
    if torch.is_autocast_enabled(private.device().type):
        raise UnsupportedModelError(
            "fit runs inside of torch.autocast, which keeps a cast of every weight until it ends, "
            "and so the weights of the first step. Leave it out, and use "
            'keras.config.set_dtype_policy("mixed_bfloat16"), or autocast in the model\'s call.'
        )
    for module in private.modules(model):
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedModelError(
                "A part of the model is TorchScript, whose parameters nothing can stand in for. "
                "Use the module that it was made of."
            )
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            raise UnsupportedModelError(
                "A part of the model is wrapped in DistributedDataParallel. On PyTorch only the "
                "step of one device can be planned: train the module itself."
            )


def _runs_in_several_processes() -> bool:
    distributed = torch.distributed
    return bool(
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


def as_tensors(batch: Any) -> Any:
    """Returns a batch with its arrays as tensors that share their memory; ``None`` stays."""
    return map_arrays(torch.as_tensor, batch)


@interrupts.put_off()
def trace(model: Any, batch: Any, micro_batches: int = 1) -> TorchTracedStep:
    """Traces ``model.train_step`` for one batch shape, without running or allocating anything.

    Args:
        model: a compiled Keras model on the PyTorch backend. Unbuilt parts (model, optimizer,
            metrics) are built as ``fit`` would.
        batch: ``(x, y[, sample_weight])`` of arrays or tensors, on the device ``"meta"`` where they
            are shapes alone.
        micro_batches: more than 1 trains the batch in micro-batches, see :mod:`.accumulate`.

    Raises:
        UnsupportedModelError: the step cannot be recorded, or not be split; the message names the
            line of Python where it is known.
    """
    check_supported(model)
    for leaf in leaves_of(batch):
        check_dense(leaf)
    batch = as_tensors(batch)
    _build(model, batch)
    _check_built(model)
    places, device = places_of(model), private.device()
    seeds = private.Seeds()
    recorder = Recorder(seeds)
    with recorder.fake_mode:
        stand_ins = [_stand_in(place.tensor) for place in places.own]
        data = map_arrays(_batch_stand_in, batch)
    step = model.train_step if micro_batches == 1 else accumulated_train_step(model, micro_batches)
    with (
        training_mode(model),
        attributes_kept(model),
        watched_micro_batches(model, micro_batches, private.without_modes) as differences,
        keras_private.seed_generator_in_place(),
        _no_draws_in_python(),
        _explained(),
    ):
        logs = _recorded(model, recorder, seeds, places, stand_ins, data, step)
    _check_updates(recorder.recording, stand_ins)
    results = dict.fromkeys(numbers_in(keras.tree.flatten(logs)))
    program = Program(recorder.recording, results, device)
    graph = program.graph(lambda node: in_place.reusable(program, node))
    return TorchTracedStep(
        graph,
        {node.id: node for node in program.nodes},
        program=program,
        model=model,
        places=places,
        logs=logs,
        micro_batches=micro_batches,
        device=device,
        data=data,
        differences=(*differences, *_of_other_kernels(model, device)),
    )


def shapes_of_batch(traced: TorchTracedStep) -> Any:
    """Returns tensors without content that a step can be traced with again, in the place of its
    batch."""

    def like(leaf: torch.Tensor) -> torch.Tensor:
        where = "meta" if leaf.device.type == "cpu" else leaf.device
        return torch.empty(tuple(leaf.shape), dtype=leaf.dtype, device=where)

    return map_arrays(like, traced.data)


def _of_other_kernels(model: Any, device: torch.device) -> Iterator[str]:
    """Yields the differences between the kernels that are recorded and those that Keras runs."""
    on_cpu = device.type == "cpu" and torch.backends.mkldnn.is_available()
    for module in private.modules(model):
        if on_cpu and isinstance(module, torch.nn.LSTM) and not module.proj_size:
            yield (
                "A torch.nn.LSTM runs op by op: on a CPU Keras's own step runs a kernel of "
                "oneDNN's, and numbers differ by rounding."
            )
            return


def _build(model: Any, batch: Any) -> None:
    try:
        keras_private.build(model, batch)
    except RuntimeError as error:  # it may have no call, and still all that its step needs
        if not optimizers_of(model):
            raise UnsupportedModelError(str(error)) from error


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor without memory like a variable's. It has the variable's hooks, and a
    gradient that no step may use."""
    made = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    if isinstance(tensor, torch.nn.Parameter):
        made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
    if tensor.requires_grad:
        made.grad = torch.empty_like(made)
        private.share_hooks(tensor, made)
    return made


def _batch_stand_in(leaf: torch.Tensor) -> torch.Tensor:
    """Returns a tensor without memory like one of a batch; ``fit`` gives tensors of the host."""
    where = torch.device("cpu") if leaf.device.type == "meta" else leaf.device
    return torch.empty(tuple(leaf.shape), dtype=leaf.dtype, device=where)


def _recorded(
    model: Any,
    recorder: Recorder,
    seeds: private.Seeds,
    places: Places,
    stand_ins: list[torch.Tensor],
    data: Any,
    step: Callable[[Any], Any],
) -> Any:
    """Runs a step on stand-ins and returns its result, with numbers for its tensors."""
    for tensor, place in zip(stand_ins, places.own, strict=True):
        recorder.add_input(tensor, place.tensor)
    for leaf in keras.tree.flatten(data):
        if leaf is not None:
            recorder.add_input(leaf)
    for tensor in stand_ins:
        if tensor.grad is not None:
            recorder.refuse(tensor.grad, _GRADIENT_OF_BEFORE)

    def numbered(leaf: Any) -> Any:
        if isinstance(leaf, (torch.SymFloat, torch.SymInt)):
            return recorder.scalar(leaf)
        return Ref(recorder.number(leaf)) if isinstance(leaf, torch.Tensor) else leaf

    with (
        places.replaced(stand_ins),
        private.recordable(seeds, Branches(recorder).cond),
        generator_states.recorded(recorder),
        torch.enable_grad(),
        recorder.fake_mode,
        recorder,
    ):
        settings, memory = Settings(model), list(map(private.storage_key, stand_ins))
        logs = keras.tree.map_structure(numbered, step(data))
        with torch.no_grad():
            recorder.write_late()
            places.write_back(stand_ins, memory)
        check_next_step(recorder, model, stand_ins, settings, lambda: step(data))
        return logs


def _check_built(model: Any) -> None:
    """Raises if the step would make variables when it is recorded, because they would hold
    stand-ins."""
    for optimizer in optimizers_of(model):
        if not optimizer.built:
            raise UnsupportedModelError(
                f"The optimizer {optimizer.name!r} has no variables yet, and the step would make "
                "them when it first runs. Call optimizer.build(variables) before fit, with the "
                "variables that it updates."
            )


def _check_updates(recording: Recording, stand_ins: list[torch.Tensor]) -> None:
    """Raises if a recorded step updates no weight. An optimizer of PyTorch's own holds the weights
    themselves, and finds no gradients on them while stand-ins are in their place."""
    layouts, of_own = recording.layouts, zip(recording.inputs, stand_ins, strict=False)
    weights = {layouts[number].storage for number, one in of_own if one.requires_grad}
    written = {layouts[number].storage for call in recording.calls for number in call.writes}
    if weights and not weights & written:
        raise UnsupportedModelError(
            "The step, as it was recorded, updates no weight. It may use an optimizer of "
            "torch.optim, which holds the weights themselves, or update them in some steps only, "
            "which a counter in Python tells. Use an optimizer of Keras in every step."
        )


@contextmanager
def _no_draws_in_python() -> Iterator[None]:
    """Raises if a step draws numbers by Python or NumPy, and puts their generators back.

    Every step of a plan would have the numbers that were drawn when it was recorded.

    Known limit: while other threads of Python run, which may load data and draw as well, nothing is
    looked at.
    """
    before = random.getstate(), np.random.get_state(legacy=False)
    try:
        yield
    finally:
        after = random.getstate(), np.random.get_state(legacy=False)
        has_drawn = not _other_threads() and pickle.dumps(before) != pickle.dumps(after)
        if has_drawn:
            random.setstate(before[0])
            np.random.set_state(before[1])
    if has_drawn:
        raise UnsupportedModelError(
            "The step draws random numbers by Python's random or by numpy.random. Such a step is "
            "another one for every batch. Use keras.random with a SeedGenerator, or torch.rand."
        )


def _other_threads() -> list[threading.Thread]:
    """Returns Python's other threads. This package's are left out, because they draw nothing, and
    so are autograd's own on a GPU, which are known as dummies."""
    return [
        one
        for one in threading.enumerate()
        if one is not threading.current_thread()
        and not one.name.startswith(("Dummy-", "keras_remat"))
    ]


@contextmanager
def _explained() -> Iterator[None]:
    """Raises :class:`UnsupportedModelError` with the line of Python, in the place of PyTorch's
    errors, if a step asks for the value of a tensor."""
    try:
        yield
    except private.ASKS_FOR_VALUES as error:
        raise UnsupportedModelError(
            "The step asks in Python for the value of a tensor, or makes one whose shape follows "
            f"from values{_line_of(error)}. Such a step is another one for every batch. Use "
            "keras.ops.where or keras.ops.cond."
        ) from error
    except UnsupportedModelError as error:
        line = _line_of(error)
        if not line or line in str(error):
            raise
        text = str(error)
        raise UnsupportedModelError(
            f"{text[:-1] if text.endswith('.') else text}{line}."
        ) from error
    except Exception as error:
        if any(text in str(error) for text in private.OF_TWO_DEVICES):
            raise UnsupportedModelError(
                f"The step joins tensors of two devices{_line_of(error)}, and Keras trains on "
                f"{private.device()}. Build all layers, and make all tensors, on that device."
            ) from error
        what = (str(error).strip().splitlines() or ["no message"])[0].rstrip(".")
        raise UnsupportedModelError(
            "The step cannot be recorded on tensors without memory"
            f"{_line_of(error)}. {type(error).__name__}: {what}."
        ) from error


def _line_of(error: BaseException) -> str:
    """Returns the line of Python that raised an error, as the end of a sentence. It is the
    innermost line of the user's own, else of Keras or another package; empty if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if not _is_in(f.filename, _folder(torch), _OWN_FOLDER)]
    own = [f for f in ours if not _is_in(f.filename, _folder(keras).parent)]
    for found in (own[-1:], ours[-1:]):
        for frame in found:
            return f" (line {frame.lineno} of {frame.filename}: {frame.line})"
    return ""


def _folder(package: Any) -> Path:
    return Path(package.__file__).parent


def _is_in(file: str, *folders: Path) -> bool:
    return any(Path(file).is_relative_to(folder) for folder in folders)
