"""A backend without a framework: its train step is a chain whose values grow with the batch, its
allocator is the simulation.

What a real device does differently can be dialled in: an allocator that needs more than the
simulated peak, measured peaks above the predicted ones, a profiler that is busy or sees nothing.
"""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np

from keras_remat.backends.base import TracedStep
from keras_remat.backends.memory import SimulatedMemory
from keras_remat.backends.processes import Processes
from keras_remat.batch_size.scaling import BatchScaling
from keras_remat.core.graph import BACKWARD, FORWARD, Graph, Op, Value
from keras_remat.core.limit import Limit
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule, Usage
from keras_remat.core.simulate import simulate
from keras_remat.errors import ScheduleNotFoundError, UnsupportedModelError
from keras_remat.planning import calibrated_solve
from keras_remat.planning.background import PlanProcessError
from keras_remat.planning.request import PlanRequest, plan_for

#: Bytes of one sample in every value of the chain.
SAMPLE_BYTES = 1024
RESIDENT_BYTES = 10_000
MODEL = SimpleNamespace(name="fake", built=True, non_trainable_variables=())


def chain_graph(batch_size, layers=8, fixed_bytes=0, kind=FORWARD):
    """``layers`` forward ops and as many backward ops; backward op i reads the gradient before it
    and forward values i and i−1. Every value has ``fixed_bytes`` beside its samples, and the first
    op is of ``kind``."""
    n = layers
    reads = [(i - 1,) if i else () for i in range(n)]
    for i in range(n):
        layer = n - 1 - i
        reads.append(tuple(([n + i - 1] if i else []) + ([layer - 1] if layer else []) + [layer]))
    phases = [FORWARD] * n + [BACKWARD] * n
    kinds = [kind, *phases[1:]]
    ops = tuple(Op(i, f"op{i}", kinds[i], reads[i], (i,), phases[i]) for i in range(2 * n))
    nbytes = batch_size * SAMPLE_BYTES + fixed_bytes
    values = tuple(Value(i, f"v{i}", nbytes, (batch_size, 256), "float32", i) for i in range(2 * n))
    return Graph(ops, values, (2 * n - 1,))


def chain_problem(batch_size, layers=8, source="estimated", **more):
    graph = chain_graph(batch_size, layers, **more)
    return Problem(graph, profile_of(graph, source), name="chain")


def profile_of(graph, source):
    return Profile(
        (1.0,) * len(graph.ops), (0,) * len(graph.ops), RESIDENT_BYTES, source, "FAKE:0", "fake"
    )


def store_all_peak(batch_size, layers=8, **more):
    problem = chain_problem(batch_size, layers, **more)
    return simulate(problem, Schedule.store_all(problem.graph)).peak_bytes


def scaling_of(small=4, large=8, layers=8):
    """The chain at any batch size, traced at two."""
    problem = chain_problem(small, layers)
    return BatchScaling(problem, small, chain_graph(large, layers), large)


def batch_of(first, size):
    """Samples numbered from ``first``, and no targets."""
    return (np.arange(first, first + size), None)


def texts_of(samples, length):
    """Samples of so many numbered tokens: a step's values grow with both."""
    return (np.arange(samples * length).reshape(samples, length), np.zeros(samples))


def elements_of(batch):
    """How many numbers its samples are; ``np.size`` does not know PyTorch's tensors."""
    return int(np.prod(np.shape(batch[0])))


class FakeOutOfMemoryError(Exception):
    """What the fake framework raises."""


@dataclass(frozen=True)
class FakeStep(TracedStep):
    surplus_bytes: int = 0
    least_bytes: int = 0
    unordered_bytes: int = 0

    def plain_unordered_bytes(self, problem, memory):
        return problem.profile.resident_bytes + self.unordered_bytes

    def plain_peak_bytes(self, problem, memory):
        least = problem.profile.resident_bytes + self.least_bytes
        return max(super().plain_peak_bytes(problem, memory), least) + self.surplus_bytes


class FakeDevice:
    """An allocator that keeps statistics, unless it is told not to.

    Attributes:
        has_statistics: as in :class:`keras_remat.backends.memory.DeviceMemory`.
    """

    def __init__(self, backend, name, has_statistics):
        self._backend, self.name, self.has_statistics = backend, name, has_statistics

    def in_use_bytes(self):
        return RESIDENT_BYTES if self.has_statistics else 0

    def peak_bytes(self):
        return self._backend.peak_at_failure if self.has_statistics else 0

    def begin_watch(self):
        self._backend.watched_bytes = RESIDENT_BYTES

    def phase_peak_bytes(self):
        return 0

    def watched_peak_bytes(self):
        return self._backend.watched_bytes if self.has_statistics else 0

    def total_bytes(self):
        return self._backend.memory_bytes

    def floor_advice(self, op):
        return f"Give {op.name} less."


class FakeBackend:
    """Records what was asked of it.

    Args:
        memory_bytes: of the device.
        allocator_bytes: what the allocator needs above the simulated peak, from (problem,
            schedule).
        surplus_bytes: what a step measures above its predicted peak, from ("plain" or the schedule,
            batch size).
        slowness: times the simulated seconds of a step.
        profiler: ``"free"``, ``"busy"`` (the user's session runs) or ``"blind"`` (too few ops are
            seen).
        folds: whether a layer is folded away at a batch size, as Grappler does at some.
        fixed_bytes, kind: as in :func:`chain_graph`.
        first_call_bytes: what the first call of a step takes above its later ones, and ten times
            the seconds, as where kernels are tuned.
        device_name: of the device.
        has_statistics: whether its allocator tells peaks; where it does not, all peaks are 0.
        profiler_remark: what its recorder remarks.

    Attributes:
        ran: per step what ran (``"plain"`` or the schedule) and the numbers of its samples.
        traced: batch sizes, in order.
        recording: whether a recorder is running.
        snapshots, waits: how often the state was copied, and a step was waited for.
        lowered, writings: the schedules that were lowered and how they are written, in order.
        fails_at: numbers of the calls of a step, from 1, that run out of memory after they have
            changed the state.
        has_bytes: steps that need more run out of memory, whatever was promised.
        can_be_cut: whether the train step can be traced in micro-batches.
    """

    name, compilation = "fake", "ordered"
    measures_op_times = True
    runs_slices = guesses_workspaces = False
    auto_solver = "auto"
    batch_multiple = 1
    processes = Processes()

    def __init__(
        self,
        memory_bytes=2**40,
        *,
        allocator_bytes=None,
        surplus_bytes=None,
        profiler="free",
        layers=8,
        slowness=1e-3,
        folds=lambda size: False,
        fixed_bytes=0,
        kind=FORWARD,
        first_call_bytes=0,
        device_name="CPU:0",
        has_statistics=True,
        profiler_remark="",
    ):
        self.memory_bytes, self.profiler = memory_bytes, profiler
        self.layers, self.folds = layers, folds
        self.allocator_bytes = allocator_bytes or (lambda problem, schedule: 0)
        self.surplus_bytes = surplus_bytes or (lambda what, size: 0)
        self.ran, self.traced = [], []
        self.device = FakeDevice(self, device_name, has_statistics)
        self.profiler_remark = profiler_remark
        self.memory = SimulatedMemory()
        self.memory.uncalibrated_bytes = self.predicted
        self.more = {"fixed_bytes": fixed_bytes, "kind": kind}
        self.first_call_bytes, self.called = first_call_bytes, set()
        self.lowered, self.writings = [], []
        self.snapshots = self.waits = 0
        self.recording, self.watched_bytes = False, RESIDENT_BYTES
        self.calls, self.peak_at_failure, self.slowness = 0, 0, slowness
        self.fails_at, self.has_bytes, self.can_be_cut = set(), 2**60, True
        self.plain_surplus_bytes = self.plain_least_bytes = self.plain_unordered_bytes = 0

    @property
    def installed(self):
        """The train function, as far as trainers ask for it."""
        return SimpleNamespace(
            run_plain=self.run_plain,
            restore=lambda: None,
            as_given=lambda batch: batch,
            changed_layers=list,
            variables=nullcontext,
        )

    def check(self, model):
        return None

    def example_batch(self, model, batch):
        return batch

    def resized_spec(self, batch, size):
        return batch_of(0, size)

    def trace(self, model, batch, micro_batches=1):
        size = elements_of(batch)
        if micro_batches > 1 and not self.can_be_cut:
            raise UnsupportedModelError("a train_step of its own")
        self.traced.append(size if micro_batches == 1 else (size, micro_batches))
        graph = chain_graph(-(-size // micro_batches), self._layers_at(size), **self.more)
        needs = self.plain_surplus_bytes, self.plain_least_bytes, self.plain_unordered_bytes
        return FakeStep(graph, {"samples": size}, *needs)

    def _layers_at(self, size):
        return self.layers - self.folds(size)

    def estimated_profile(self, traced, resident_bytes=None):
        profile = profile_of(traced.graph, "estimated")
        if resident_bytes is not None:
            more = resident_bytes + sum(traced.held_bytes)
            profile = replace(profile, resident_bytes=more)
        return profile

    def predicted(self, problem, schedule):
        """The peak before any calibration."""
        return simulate(problem, schedule).peak_bytes + self.allocator_bytes(problem, schedule)

    def recorder(self):
        return SimpleNamespace(
            start=self._start_recording, stop=self._stop_recording, remark=self.profiler_remark
        )

    def _start_recording(self):
        if self.recording or self.profiler == "busy":  # there is one session at a time
            return False
        self.recording = True
        return True

    def _stop_recording(self, lowered, resident_bytes):
        assert self.recording
        self.recording = False
        if self.profiler != "free":
            return None
        profile = profile_of(lowered.problem.graph, "measured")
        known = profile.resident_bytes if resident_bytes is None else resident_bytes
        return replace(profile, resident_bytes=known)

    def lower(self, traced, problem, schedule, writing=None):
        assert problem.graph == traced.graph, "an order runs on the graph it was made for"

        if schedule in self.lowered:
            self.called -= {(schedule, size) for _, size in self.called}
        self.lowered.append(schedule)
        self.writings.append(writing)

        def run(batch):
            assert elements_of(batch) == traced.handles["samples"], (
                "a lowered step runs batches of its own shape only"
            )
            return self._step(schedule, batch, problem)

        run.problem = problem
        return run

    def run_plain(self, batch):
        size = elements_of(batch)
        problem = chain_problem(size, self._layers_at(size), **self.more)
        return self._step("plain", batch, problem)

    def _step(self, what, batch, problem):
        self.ran.append((what, np.ravel(batch[0]).tolist()))
        self.calls += 1
        self._ran_problem = problem
        schedule = Schedule.store_all(problem.graph) if what == "plain" else what
        peak = self.predicted(
            replace(problem, profile=profile_of(problem.graph, "estimated")), schedule
        )
        surplus = self.surplus_bytes(what, elements_of(batch))
        self.watched_bytes = max(self.watched_bytes, peak + surplus)
        if self.calls in self.fails_at or peak > self.has_bytes:
            self.peak_at_failure = min(peak, self.has_bytes)
            raise FakeOutOfMemoryError
        return {"loss": float(len(self.ran))}

    def measure(self, run, *, wait=True):
        self.waits += wait
        result = run()
        what, samples = self.ran[-1]
        problem = replace(
            self._ran_problem, profile=profile_of(self._ran_problem.graph, "estimated")
        )
        schedule = Schedule.store_all(problem.graph) if what == "plain" else what
        usage = simulate(problem, schedule)
        peak = self.predicted(problem, schedule) + self.surplus_bytes(what, len(samples))
        slowness, first = self.slowness, (what, len(samples)) not in self.called
        if first:
            self.called.add((what, len(samples)))
            if self.first_call_bytes:
                peak, slowness = peak + self.first_call_bytes, 10 * slowness
        return result, Usage(usage.time_s * slowness, peak if self.device.has_statistics else 0)

    def is_out_of_memory(self, error):
        return isinstance(error, FakeOutOfMemoryError)

    def snapshot(self, model):
        before = len(self.ran)
        self.snapshots += 1

        def put_back():
            del self.ran[before:]

        return put_back

    @property
    def kinds(self):
        """What ran, step by step: ``"plain"`` or ``"remat"``."""
        return ["plain" if what == "plain" else "remat" for what, _ in self.ran]

    @property
    def samples(self):
        """The numbers of all trained samples, in the order of training."""
        return [number for _, numbers in self.ran for number in numbers]


def quick_plan(problem, budget_bytes, backend=None, *, time_limit_s=5.0, **asked):
    """A plan that keeps to a budget, by a quick solver, unless another one is asked for."""
    told = {"problem": problem, "batch_size": 1, "limit": Limit(budget_bytes), "solver": "greedy"}
    told |= {"seconds": time_limit_s, **asked}
    return plan_for(PlanRequest.on(backend or FakeBackend(), **told))


def note_solves(monkeypatch, note):
    """Has ``note`` called with the arguments of every solve of a fit before it begins."""

    def noted(*given, **options):
        note(*given, **options)
        return calibrated_solve.within_budget(*given, **options)

    monkeypatch.setattr("keras_remat.planning.request.within_budget", noted)


class FakePlanProcess:
    """Solves in this process, once it is asked for; stands in for
    :class:`keras_remat.planning.background.PlanProcess`.

    Attributes:
        steps: for how many of them it says that it has not ended.
        fails_with: what it ends with instead of an answer.
        finds: whether it finds a plan.
        all: that were started, in order.
    """

    steps, fails_with, finds, all = 0, None, True, ()

    def __init__(self, request):
        self.request, self.asked, self.ended = request, 0, False
        self.all.append(self)

    @property
    def has_ended(self):
        self.asked += 1
        return self.asked > self.steps

    def answer(self):
        if self.fails_with is not None:
            raise PlanProcessError(self.fails_with)
        if not self.finds:
            raise ScheduleNotFoundError(0, 0)
        return plan_for(self.request)

    def end(self):
        self.ended = True


def plan_in_fake_processes(monkeypatch, **attributes):
    """Returns the list that the processes beside training will be in."""
    kind = type("FakePlanProcess", (FakePlanProcess,), {"all": [], **attributes})
    monkeypatch.setattr("keras_remat.training.effects.PlanProcess", kind)
    return kind.all


def event_kinds(report):
    return [event.kind for event in report.events]
