"""Defines what every backend offers the layers above it: a traced step, and verbs that work on it.

Nothing here imports a framework. A backend is a module (``keras_remat.backends.tensorflow``,
``keras_remat.backends.jax``) with a function ``backend() -> Backend``; :func:`load_backend` picks
the one Keras runs on.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Protocol, TypeVar

from keras_remat.backends.installed import (
    Installed,
    StepRunner,
    check_train_function,
    original_of,
)
from keras_remat.backends.memory import DeviceMemory, MemoryModel
from keras_remat.backends.processes import Processes
from keras_remat.backends.versions import check_versions
from keras_remat.core.graph import Graph
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule, Usage
from keras_remat.core.slices import SlicedGraph, SliceRule, Slicing
from keras_remat.core.target import Target
from keras_remat.core.writing import Writing
from keras_remat.errors import UnsupportedModelError

Result = TypeVar("Result")
#: Runs one training step on a batch and returns what ``train_step`` returns.
RunStep = Callable[[Any], Any]

#: Frameworks whose steps can be swapped inside ``fit``.
BACKENDS = ("tensorflow", "jax", "torch")

#: How a rematerialized step may be asked to run.
COMPILATIONS = ("auto", "compiled", "ordered")


class Slicer(Protocol):
    """Rewrites one traced step so that some of its ops run in slices."""

    @property
    def granule_bytes(self) -> int:
        """Returns the bytes to whose multiples the sizes of slices are rounded up."""

    @property
    def rules(self) -> Mapping[int, SliceRule]:
        """Returns op id → its slice rule, for ops that may run in slices."""

    def sliced(self, slicing: Slicing) -> TracedStep:
        """Returns the same step with some ops in slices.

        Raises:
            InvalidProblemError: the ops cannot run in these slices.
        """


@dataclass(frozen=True)
class Whole:
    """Holds what a step in slices was made from.

    Args:
        step: the whole step.
        sliced: the rewrite of its graph.
        scratch: bytes of workspace of the whole step's ops, where known when the step was sliced.
    """

    step: TracedStep
    sliced: SlicedGraph
    scratch: tuple[int, ...] = ()

    def problem(self, problem: Problem) -> Problem:
        """Returns the problem of the whole step, from the costs of its slices.

        An op takes the sum of its parts' times. Its workspace is at least the known one. Where none
        is known, it is the number of parts times the largest part's, which is an upper bound.
        """
        graph, parts = self.step.graph, self.sliced.slicing.parts
        times, workspaces = [0.0] * len(graph.ops), [0] * len(graph.ops)
        for op_id, origin in enumerate(self.sliced.origins):
            if origin.role in ("whole", "part"):
                scratch = problem.profile.op_workspace_bytes[op_id]
                if origin.role == "part":
                    known = self.scratch[origin.source] if self.scratch else 0
                    scratch = max(scratch, known) if known else parts * scratch
                times[origin.source] += problem.profile.op_time_s[op_id]
                workspaces[origin.source] = max(workspaces[origin.source], scratch)
        profile = replace(
            problem.profile, op_time_s=tuple(times), op_workspace_bytes=tuple(workspaces)
        )
        return replace(problem, graph=graph, profile=profile)


@dataclass(frozen=True)
class TracedStep:
    """Holds one train step as a graph, with the framework's objects beside it.

    Args:
        graph: the ops and values of the step.
        handles: op id → the backend's object for running that op; only the backend looks inside.
        differences: differences from Keras's own step, in sentences for the user.
        slicer: rewrites the step with some ops in slices; ``None`` where that is not possible.
        whole: origin of a step in slices; ``None`` for a whole step.
    """

    graph: Graph
    handles: Mapping[int, Any]
    differences: tuple[str, ...] = field(default=(), kw_only=True)
    slicer: Slicer | None = field(default=None, kw_only=True, repr=False)
    whole: Whole | None = field(default=None, kw_only=True, repr=False)

    @property
    def slicing(self) -> Slicing | None:
        """Returns which ops of the whole step run in slices; ``None`` for a whole step."""
        return None if self.whole is None else self.whole.sliced.slicing

    @property
    def held_bytes(self) -> Sequence[int]:
        """Returns the bytes of every large constant that stays in use once the step has run; empty
        where none is known."""
        return ()

    def plain_peak_bytes(self, problem: Problem, memory: MemoryModel) -> int:
        """Returns the predicted peak of Keras's own step, resident bytes included. Backends whose
        traced step differs from Keras's override it."""
        return memory.peak_bytes(problem, Schedule.store_all(self.graph))

    def plain_unordered_bytes(self, problem: Problem, memory: MemoryModel) -> int:
        """Returns the highest peak of Keras's own step if it runs several ops at once, in no order,
        resident bytes included; 0 if it does not."""
        return 0

    def workspaces_towards(self, other: TracedStep, share: Fraction) -> Sequence[int]:
        """Returns the expected bytes of workspace of each op at a batch size between two traces,
        where a kernel runs only from some batch size on; empty where no such kernel is known.

        Args:
            other: the same ops, traced at a second batch size.
            share: position of the batch size, from 0 for this trace's to 1 for the other's.
        """
        return ()


class ProfileRecorder(Protocol):
    """Measures a profile over real training steps.

    Attributes:
        remark: why the op times of the last profile are estimates; empty where they are not.
    """

    remark: str

    def start(self) -> bool:
        """Starts; returns ``False`` if the user's own profiler session is running."""

    def stop(self, lowered: RunStep, resident_bytes: int | None) -> Profile | None:
        """Stops and returns the profile of ``lowered``'s ops, or ``None`` when too few were seen.

        Its ``source`` says whether the op times were measured. If not, they are estimates in
        proportion to the measured step.
        """


class Backend(Protocol):
    """Defines the five verbs (trace, profile, lower, measure, restore), and what they need.

    An instance belongs to one model and one ``fit``: its memory model remembers measured peaks.
    """

    name: str
    compilation: str
    """``"compiled"`` or ``"ordered"``: whether a step runs as one compiled program, or op by op."""
    measures_op_times: bool
    """Says whether a recorder measures op times; if not, recording steps cannot improve a plan."""
    guesses_workspaces: bool
    """Says whether the workspace expected before any op ran may be far too large, as for cuDNN's
    convolutions. Otherwise it follows from shapes, or is less."""
    runs_slices: bool
    """Says whether traced steps have a :class:`Slicer`."""
    auto_solver: str
    """Names the solver that ``"auto"`` stands for."""
    processes: Processes
    """Represents the processes that train the model together."""

    @property
    def batch_multiple(self) -> int:
        """Returns the number of devices that a batch is divided among. The batch size is a multiple
        of it."""

    @property
    def device(self) -> DeviceMemory:
        """Returns the statistics of the device's allocator."""

    @property
    def memory(self) -> MemoryModel:
        """Returns the model that predicts the device's peaks and learns from measured ones."""

    def check(self, model: Any) -> str | None:
        """Raises :class:`UnsupportedModelError` for a model that cannot be rematerialized; returns
        a remark for the log or ``None``."""

    def example_batch(self, model: Any, batch: Any) -> Any:
        """Returns ``batch`` (arrays, specs or a batch size) as an argument of ``train_step``."""

    def resized_spec(self, batch: Any, size: int) -> Any:
        """Returns specs, for :meth:`trace`, of a batch like ``batch`` with ``size`` samples;
        nothing is allocated.

        Raises:
            UnsupportedModelError: an array's first dimension is not the batch's.
        """

    def trace(self, model: Any, batch: Any, micro_batches: int = 1) -> TracedStep:
        """Traces the model's train step for batches of this shape.

        With micro-batches the step adds up their gradients. Tracing changes nothing, except that
        the first trace makes missing variables (of layers that are not built, an optimizer's
        slots).

        Raises:
            UnsupportedModelError: the step is not supported, or its batch cannot be split.
        """

    def estimated_profile(self, traced: TracedStep, resident_bytes: int | None = None) -> Profile:
        """Returns costs from shapes alone.

        Args:
            traced: the step.
            resident_bytes: bytes in use on the device between steps; ``None`` where unknown: then
                the bytes of the step's inputs.
        """

    def recorder(self) -> ProfileRecorder:
        """Returns a recorder for a measured profile."""

    def lower(
        self,
        traced: TracedStep,
        problem: Problem,
        schedule: Schedule,
        writing: Writing | None = None,
    ) -> RunStep:
        """Returns a step that runs ``schedule``.

        Args:
            traced: the step.
            problem: the step's graph and costs. Without a budget, a schedule that recomputes
                nothing may run in any order.
            schedule: a legal order.
            writing: how to write the schedule for XLA, where a plan says so; only a backend that
                cannot ask the compiler uses it.
        """

    def measure(self, run: Callable[[], Result], *, wait: bool = True) -> tuple[Result, Usage]:
        """Runs a function once and returns its result with its time and the allocator's peak.

        Args:
            run: the function to measure.
            wait: whether to wait until the result is computed. If not, the time means nothing, and
                the peak is known only where memory is allocated in the order of the calls.
        """

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Returns whether the framework raised ``error`` because the device had no memory left."""

    def snapshot(self, model: Any) -> Callable[[], None]:
        """Copies variables to the host and returns a function that puts them back: the model's, the
        optimizer's, the metrics', and all that the steps traced so far touch.

        Where the allocator fragments, they lie close together in its memory afterwards. After a
        step that ran out of memory, put them back while its error is being handled.
        """

    def install(self, model: Any, runner: StepRunner) -> Installed:
        """Makes Keras's train loop ask ``runner`` for every batch; ``model`` is inside ``fit``."""


@contextmanager
def preserved_state(backend: Backend, model: Any) -> Iterator[Callable[[], None]]:
    """Restores the model, and all variables that its traced step touches, at the end. It yields a
    function that restores them at once."""
    put_back = backend.snapshot(model)
    try:
        yield put_back
    finally:
        put_back()


def load_backend() -> Backend:
    """Returns the backend of the framework Keras runs on.

    Raises:
        UnsupportedModelError: Keras's framework has no backend, or a version is too old.
    """
    loaded: Backend = _framework().backend()
    return loaded


def load_backends(
    model: Any, compilation: str = "auto", target: Target | None = None
) -> list[Backend]:
    """Returns the backends that can train a model, the one to start with first.

    Args:
        model: a compiled model.
        compilation: one of :data:`COMPILATIONS`; ``"auto"`` follows the model.
        target: where steps would run; ``None`` is the live device. For another target steps are
            planned, but not run.

    Raises:
        UnsupportedModelError: Keras's framework has no backend, or its backend does not support the
            request, or a version is too old.
    """
    check_train_function(model, original_of(model.train_function))
    loaded: list[Backend] = _framework().backends(model, compilation, target)
    return loaded


def _framework() -> Any:
    import keras

    name = keras.backend.backend()
    if name not in BACKENDS:
        raise UnsupportedModelError(
            f"Keras runs on {name!r}; inside fit, rematerialization works on "
            f"{' and '.join(BACKENDS)}."
        )
    check_versions(name)
    return importlib.import_module(f"keras_remat.backends.{name}")
