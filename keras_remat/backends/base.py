"""What every backend hands to the layers above it: one traced step, and the verbs that work on it.

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
        """Returns the bytes that sizes of slices are rounded up to a multiple of."""

    @property
    def rules(self) -> Mapping[int, SliceRule]:
        """Returns op id → how it may run in slices, of the ops that may."""

    def sliced(self, slicing: Slicing) -> TracedStep:
        """Returns the same step with some ops in slices.

        Raises:
            InvalidProblemError: they cannot run so.
        """


@dataclass(frozen=True)
class Whole:
    """Says what a step in slices was made from.

    Args:
        step: the whole step.
        sliced: the rewrite of its graph.
        scratch: workspace of the whole ops, as far as it was known when they were put into slices.
    """

    step: TracedStep
    sliced: SlicedGraph
    scratch: tuple[int, ...] = ()

    def problem(self, problem: Problem) -> Problem:
        """Returns what the whole step costs by what its slices do: the sum of the parts' times, and
        the workspace that is known; else so many times theirs as there are parts, at most."""
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
        graph: what the step computes.
        handles: op id → what the backend needs to run that op; nothing outside the backend looks
            inside.
        differences: what differs from Keras's own step, in sentences for the user.
        slicer: rewrites the step with some ops in slices; ``None`` where nobody does.
        whole: what a step in slices was made from; ``None`` for a whole step.
    """

    graph: Graph
    handles: Mapping[int, Any]
    differences: tuple[str, ...] = field(default=(), kw_only=True)
    slicer: Slicer | None = field(default=None, kw_only=True, repr=False)
    whole: Whole | None = field(default=None, kw_only=True, repr=False)

    @property
    def slicing(self) -> Slicing | None:
        """Returns which ops of the whole step run in slices; ``None`` where this one is whole."""
        return None if self.whole is None else self.whole.sliced.slicing

    @property
    def held_bytes(self) -> Sequence[int]:
        """Returns the bytes of every large constant that stays in use once the step has run; empty
        where nobody knows of one."""
        return ()

    def plain_peak_bytes(self, problem: Problem, memory: MemoryModel) -> int:
        """Returns what Keras's own step is predicted to need, resident bytes included; a backend
        whose traced step differs from Keras's own has a rule of its own."""
        return memory.peak_bytes(problem, Schedule.store_all(self.graph))

    def plain_unordered_bytes(self, problem: Problem, memory: MemoryModel) -> int:
        """Returns the most that Keras's own step takes where it runs several ops at once, in no
        order, resident bytes included; 0 where it does not."""
        return 0

    def workspaces_towards(self, other: TracedStep, share: Fraction) -> Sequence[int]:
        """Returns the workspace that each op is expected to ask for at another batch size, where
        kernels begin at one: nothing where nobody knows of such.

        Args:
            other: the same ops, traced at a second batch size.
            share: where the size is, from 0 for this trace's to 1 for the other's.
        """
        return ()


class ProfileRecorder(Protocol):
    """Measures a profile over real training steps.

    Attributes:
        remark: why the op times of the last profile are estimates; empty where nothing is to tell.
    """

    remark: str

    def start(self) -> bool:
        """Starts; ``False`` when it cannot, because the user's own profiler session is running."""

    def stop(self, lowered: RunStep, resident_bytes: int | None) -> Profile | None:
        """Stops and returns the profile of ``lowered``'s ops, or ``None`` when too few were seen.
        Its ``source`` says whether the op times were measured; where they cannot be, they are
        estimates in proportion to the measured step."""


class Backend(Protocol):
    """Knows the five verbs (trace, profile, lower, measure, restore), and what they need.

    An instance belongs to one model and one ``fit``: its memory model remembers what it saw.
    """

    name: str
    compilation: str
    """``"compiled"`` or ``"ordered"``: whether a step runs as one compiled program, or op by op."""
    measures_op_times: bool
    """Says whether a recorder tells op times; where it does not, recording steps cannot make a plan
    better."""
    guesses_workspaces: bool
    """Says whether what ops are expected to ask for, before any ran, may be far too much, as what
    cuDNN's convolutions may. Else it is what shapes tell, or less."""
    runs_slices: bool
    """Says whether traced steps have a :class:`Slicer`."""
    auto_solver: str
    """Names the solver that ``"auto"`` stands for."""
    processes: Processes
    """Stands for those that train the model together."""

    @property
    def batch_multiple(self) -> int:
        """Returns the number of parts that a batch is divided into, one for each device: its
        samples are a multiple of it; 1 on one device."""

    @property
    def device(self) -> DeviceMemory:
        """Returns what the device's allocator tells."""

    @property
    def memory(self) -> MemoryModel:
        """Predicts the peaks that the device will show, and learns from those it showed."""

    def check(self, model: Any) -> str | None:
        """Raises :class:`UnsupportedModelError` for a model that cannot be rematerialized; returns
        a remark for the log or ``None``."""

    def example_batch(self, model: Any, batch: Any) -> Any:
        """Returns ``batch`` (arrays, specs or a batch size) as what ``train_step`` gets."""

    def resized_spec(self, batch: Any, size: int) -> Any:
        """Returns what :meth:`trace` needs to know of a batch like ``batch`` with ``size`` samples;
        nothing is allocated.

        Raises:
            UnsupportedModelError: an array whose first dimension is not the batch's.
        """

    def trace(self, model: Any, batch: Any, micro_batches: int = 1) -> TracedStep:
        """Traces the model's train step for batches of this shape.

        With micro-batches it is a step that adds up their gradients. Pure, but for variables that
        the step makes when it is first traced (layers that are not built, an optimizer's slots).

        Raises:
            UnsupportedModelError: the step cannot be carried, or not be split.
        """

    def estimated_profile(self, traced: TracedStep, resident_bytes: int | None = None) -> Profile:
        """Returns costs from shapes alone.

        Args:
            traced: the step.
            resident_bytes: what the device has in use between steps; ``None`` where nobody knows,
                then it is what the step's inputs need.
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
            problem: its graph and costs. Without a budget, a schedule that recomputes nothing may
                run in any order.
            schedule: a legal order.
            writing: how it is written for XLA, where a plan says so; only a backend that cannot ask
                the compiler takes notice.
        """

    def measure(self, run: Callable[[], Result], *, wait: bool = True) -> tuple[Result, Usage]:
        """Runs once, waits for it, and returns its result with its time and the allocator's peak.

        Args:
            run: what is measured.
            wait: whether it is waited for; else the time says nothing, and the peak is known where
                memory is allocated in order of the calls.
        """

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Returns whether the framework raised ``error`` because the device had no memory left."""

    def snapshot(self, model: Any) -> Callable[[], None]:
        """Copies the model's, the optimizer's and the metrics' variables to the host, and all that
        the steps traced so far touch; what it returns puts them back.

        Where the allocator fragments, they lie close together in its memory afterwards. After a
        step that ran out of memory they are put back while its error is handled.
        """

    def install(self, model: Any, runner: StepRunner) -> Installed:
        """Makes Keras's train loop ask ``runner`` for every batch; ``model`` is inside ``fit``."""


@contextmanager
def preserved_state(backend: Backend, model: Any) -> Iterator[Callable[[], None]]:
    """Afterwards the model, and all that its traced step touches, is what it was before; what it
    gives puts that back at once."""
    put_back = backend.snapshot(model)
    try:
        yield put_back
    finally:
        put_back()


def load_backend() -> Backend:
    """Returns the backend of the framework Keras runs on.

    Raises:
        UnsupportedModelError: Keras runs on a framework without one, or a version is too old.
    """
    loaded: Backend = _framework().backend()
    return loaded


def load_backends(
    model: Any, compilation: str = "auto", target: Target | None = None
) -> list[Backend]:
    """Returns the backends that can train a model, the one to begin with first.

    Args:
        model: compiled.
        compilation: one of :data:`COMPILATIONS`; ``"auto"`` follows the model.
        target: where steps would run; ``None`` is the live device. For another target steps are
            planned, and none runs.

    Raises:
        UnsupportedModelError: Keras runs on a framework without one, or one that cannot do what is
            asked for, or a version is too old.
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
