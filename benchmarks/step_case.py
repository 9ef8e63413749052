"""One model of the step memory benchmark, measured in a process of its own.

``python step_case.py OPTIONS`` prints the result; both are JSON, for :mod:`step_memory`. The order
matters for what is measured: plain ``fit`` first, then ``fit`` with ``RematAutotune`` under the
smallest limit it keeps, then one ``fit`` per other limit, each from the same initial weights, and
last the comparison, in which plain, store-all and rematerialized steps take turns so that the
machine's moods hit all of them.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import models
import numpy as np
from rows import difference
from watch import StepWatch, is_on_torch_cpu, long_fit, statistics

import keras_remat
from keras_remat.backends.base import Backend, RunStep, TracedStep, load_backend, preserved_state
from keras_remat.planning.calibrated_solve import within_budget

#: Steps each variant runs before the next one takes its turn; the first of them is not timed.
_TURN_STEPS = 5
#: Seconds the input pipeline gets after a step to fill its buffers again, before what is resident
#: is read.
_REFILL_S = 0.05
#: Probes of the search for the least predicted peak; the last interval is at most the range divided
#: by two to this power.
_PROBES = 4
#: Epochs of a plain ``fit``, and of one under a limit.
_PLAIN_EPOCHS, _EPOCHS = 2, 3
#: Limits that are tried, each above the one before, until ``fit`` keeps one.
_LIMITS = 4


class Probe(StepWatch):
    """A watch that knows when the schedule changed.

    Args:
        epochs: of this ``fit``.
        batch_bytes: of one batch.
        callback: the ``RematAutotune`` of this ``fit``; listed after it, so that its plan can be
            looked at.
    """

    def __init__(self, epochs: int, batch_bytes: int, callback: Any = None):
        super().__init__(watched_epoch=epochs - 1, batch_bytes=batch_bytes)
        self._remat = callback
        self.started_s = self.swapped_after_s = 0.0
        self._schedule: Any = None
        self._changed_after = 0

    @property
    def final_peak_bytes(self) -> int:
        """The most of all steps since the last change of the schedule."""
        return max(self.peaks[self._changed_after :] or self.peaks[-1:])

    @property
    def final_time_s(self) -> float:
        """The median step since the last change of the schedule; the first one is left out."""
        return median(self.times_s[self._changed_after + 1 :] or self.times_s[-1:])

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.started_s = self.started_s or time.perf_counter()
        super().on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        super().on_train_batch_end(batch, logs)
        time.sleep(_REFILL_S)
        self.resident_bytes = max(self.resident_bytes, statistics().get("current", 0))
        plan = self._remat.plan if self._remat is not None else None
        if plan is not None and plan.solution.schedule != self._schedule:
            self._schedule, self._changed_after = plan.solution.schedule, len(self.peaks)
        if plan is not None and plan.profile_source == "measured" and not self.swapped_after_s:
            self.swapped_after_s = time.perf_counter() - self.started_s


class State:
    """The variables of a model and its optimizer, to take and to put back; on PyTorch with the
    state of its own random numbers, of which a ``Dropout`` without a seed draws."""

    def __init__(self, model: keras.Model):
        variables = [
            *model.variables,
            *model.optimizer.variables,
            *(v for m in model.metrics for v in m.variables),
        ]
        self._variables = list({id(v): v for v in variables}.values())

    def take(self) -> list[np.ndarray]:
        values = [np.array(keras.ops.convert_to_numpy(v)) for v in self._variables]
        if keras.backend.backend() == "torch":
            import torch

            values.append(torch.get_rng_state().numpy())
        return values

    def put_back(self, values: list[np.ndarray]) -> None:
        for variable, value in zip(self._variables, values, strict=False):
            variable.assign(value)
        if keras.backend.backend() == "torch":
            import torch

            torch.set_rng_state(torch.from_numpy(values[-1]))


def same_bits(left: list[np.ndarray], right: list[np.ndarray]) -> bool:
    """Whether two states are equal bit for bit (a NaN equals itself)."""
    return all(a.tobytes() == b.tobytes() for a, b in zip(left, right, strict=True))


@dataclass
class Variant:
    """A way to run the step, with what it has run so far."""

    name: str
    run: RunStep
    state: list[np.ndarray]
    losses: list[float] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)


def take_turns(
    model: keras.Model,
    state: State,
    variants: list[Variant],
    batches: list[Any],
    steps: int,
    backend: Backend,
) -> None:
    """Every variant trains ``steps`` steps on the same batches from its own state, a few at a
    time."""
    for start in range(0, steps, _TURN_STEPS):
        for variant in variants:
            state.put_back(variant.state)
            for step in range(start, min(start + _TURN_STEPS, steps)):
                model.reset_metrics()  # so that the loss that comes back is this batch's
                batch = batches[step % len(batches)]
                logs, usage = backend.measure(lambda run=variant.run, batch=batch: run(batch))
                variant.losses.append(float(keras.ops.convert_to_numpy(logs["loss"])))
                if step > start or steps == 1:
                    variant.times_s.append(usage.time_s)
            variant.state = state.take()


def smallest_budget(problem: keras_remat.Problem, backend: Backend, time_limit_s: float) -> int:
    """The least allocator peak of a greedy plan, by bisection of the budget between floor and
    store-all."""
    low = problem.floor_bytes
    best = backend.memory.peak_bytes(problem, keras_remat.Schedule.store_all(problem.graph))
    for _ in range(_PROBES):
        probe = (low + best) // 2
        try:
            found = within_budget(
                problem, probe, backend.memory, solver="greedy", time_limit_s=time_limit_s
            )
        except keras_remat.ScheduleNotFoundError as error:
            low = probe
            best = min(best, error.best_peak_bytes or best)
        else:
            best = min(best, found.peak_bytes)
    return best


class ChildrenMemory:
    """The most resident memory that processes started from this one took together, sampled while
    the ``with`` block runs.

    (``RUSAGE_CHILDREN`` counts what a child shares with its parent between ``fork`` and ``exec``,
    which is all the parent has.)

    Attributes:
        peak_bytes: the most so far.
    """

    def __init__(self, period_s: float = 0.1):
        self._period_s, self.peak_bytes = period_s, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def _sample(self) -> None:
        own = (Path("/proc/self/cmdline")).read_bytes()
        while not self._stop.wait(self._period_s):
            pages = 0
            for thread in Path("/proc/self/task").iterdir():
                try:
                    for number in (thread / "children").read_text().split():
                        child = Path("/proc", number)
                        if (child / "cmdline").read_bytes() != own:  # it runs its own program
                            pages += int((child / "statm").read_text().split()[1])
                except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                    continue
            self.peak_bytes = max(self.peak_bytes, pages * os.sysconf("SC_PAGE_SIZE"))

    def __enter__(self) -> ChildrenMemory:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()


def _memory_high_water(reset: bool = False) -> int:
    """The process's resident set at its highest, in bytes; ``reset`` starts counting again from
    what it is now."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    )
    return int(line.split()[1]) * 1024


class Measurement:
    """Everything that is measured on one case."""

    def __init__(self, options: dict[str, Any]):
        self.options = options
        self.model, self.case = models.make(options["model"], options["batch"])
        self.backend = load_backend()
        self.result: dict[str, Any] = {
            "model": self.case.name,
            "batch": self.case.batch_size,
            "is_cnn": self.case.is_cnn,
            "rows": [],
        }

    def run(self) -> dict[str, Any]:
        with ChildrenMemory() as children:
            self._run()
        self.result["planner_rss_bytes"] += children.peak_bytes
        return self.result

    def _run(self) -> None:
        options, model, backend = self.options, self.model, self.backend
        self.data = data = keras.tree.map_structure(keras.ops.convert_to_tensor, self.case.steps(4))
        batch = models.batches(data, self.case.batch_size)[0]
        backend.trace(model, batch)  # builds the model
        self.state = State(model)
        initial = self.state.take()
        self._begin_anew = backend.snapshot(model)  # variables lie where they lie in a first fit
        # without a limit that bites the callback leaves the step alone, and tells what is resident
        # when it comes to plan
        watching = keras_remat.RematAutotune(batch_size="keep", verbose=0)
        probe = self._probe(_PLAIN_EPOCHS)
        self._fit(_PLAIN_EPOCHS, watching, probe)
        resident = max(probe.resident_bytes, watching.problem.profile.resident_bytes)
        self._begin_anew()
        if is_on_torch_cpu():  # plain steps leave gradients on the weights, plans do not
            backend.device.note_batch(batch)
            resident = backend.device.in_use_bytes()
        self.result |= {"plain_peak_bytes": max(probe.peaks[1:]), "resident_bytes": resident}

        traced, problem, store_all = self._plan(batch)
        plain = _plain_step(model)
        variants = [
            Variant("plain", plain, initial),
            Variant("plain again", plain, initial),
            Variant("store-all", store_all, initial),
        ]
        self.result["smallest_bytes"] = self._least_limit()  # until it is measured
        # fractions are held against the smallest
        for budget in sorted(options["budgets"], key=lambda budget: budget != "smallest"):
            row: dict[str, Any] = {"budget": budget}
            self.result["rows"].append(row)
            try:
                if budget == "smallest":
                    plan = self._smallest(row)
                else:
                    limit, raised = self._limit_bytes(budget)
                    row |= {"limit_bytes": limit, "raised": raised}
                    plan = self._train_within(limit, row)
            except keras_remat.RematError as error:
                row["error"] = f"{type(error).__name__}: {error}"
                continue
            if plan is not None and plan.slicing is None:  # what runs in slices is another graph
                budgeted = problem.with_budget(plan.budget_bytes)
                run = backend.lower(traced, budgeted, plan.solution.schedule)
                variants.append(Variant(budget, run, initial))
        batches = models.batches(data, self.case.batch_size)
        take_turns(model, self.state, variants, batches, options["steps"], backend)
        self._compare(variants)

    def _probe(self, epochs: int, callback: Any = None) -> Probe:
        of_batch = sum(leaf.nbytes for leaf in keras.tree.flatten(self.case.steps(1)))
        return Probe(epochs, of_batch, callback)

    def _fit(self, epochs: int, *callbacks: Any) -> None:
        """On a CPU the whole data set is in the allocator's bytes; as tensors it is there once, in
        the same place in every fit."""
        gc.collect()  # what the fit before had is held by reference cycles
        told = {"batch_size": self.case.batch_size, "callbacks": list(callbacks)}
        long_fit(self.model, **self.data, **told, epochs=epochs)

    def _plan(self, batch: Any) -> tuple[TracedStep, keras_remat.Problem, RunStep]:
        """Traces, profiles store-all steps and searches for the smallest limit; what that takes is
        part of the result."""
        model, backend, options = self.model, self.backend, self.options
        before = _memory_high_water(reset=True)
        started = time.perf_counter()
        traced = backend.trace(model, batch)
        trace_s = time.perf_counter() - started
        problem = keras_remat.Problem(
            traced.graph,
            backend.estimated_profile(traced, backend.device.in_use_bytes()),
            name=self.case.name,
        )
        growth = _memory_high_water() - before
        schedule = keras_remat.Schedule.store_all(traced.graph)
        started = time.perf_counter()
        store_all = backend.lower(
            traced, problem.with_budget(2 * self.result["plain_peak_bytes"]), schedule
        )  # in order
        lower_s = time.perf_counter() - started
        with preserved_state(backend, model):
            store_all(batch)
            recorder = backend.recorder()
            if not recorder.start():
                raise RuntimeError("another profiler session is running")
            for _ in range(3):
                store_all(batch)
            # what is resident in ``fit``, where the input pipeline holds data and batches too
            profile = recorder.stop(store_all, self.result["resident_bytes"])
        if profile is None:
            raise RuntimeError("the profiler saw too few ops")
        problem = keras_remat.Problem(traced.graph, profile, name=self.case.name)
        store_all = backend.lower(traced, problem, schedule)  # no budget, no pressure: in no order
        before = _memory_high_water(reset=True)
        least = smallest_budget(problem, backend, options["probe_time_limit_s"])
        growth = max(growth, _memory_high_water() - before)
        self.result |= {
            "ops": len(traced.graph.ops),
            "values": len(traced.graph.values),
            "floor_bytes": problem.floor_bytes,
            "least_predicted_bytes": least,
            "planner_rss_bytes": growth,
            "trace_s": trace_s,
            "lower_s": lower_s,
        }
        return traced, problem, store_all

    def _limit_bytes(self, budget: str) -> tuple[int, bool]:
        """The limit of a fraction, never below 1.1 × the smallest measured peak; and whether it had
        to be raised for that."""
        resident = self.result["resident_bytes"]
        wanted = resident + int(float(budget) * (self.result["plain_peak_bytes"] - resident))
        least = int(1.1 * self.result["smallest_bytes"])
        return max(wanted, least), wanted < least

    def _least_limit(self) -> int:
        """The limit that leaves the least predicted peak beside its margin."""
        return int(self.result["least_predicted_bytes"] / (1 - self.options["margin"])) + 1

    def _smallest(self, row: dict[str, Any]) -> keras_remat.Plan | None:
        """``fit`` under the smallest limit that it keeps: from the least predicted peak up, until
        one holds."""
        limit = self._least_limit()
        for attempt in range(1, _LIMITS + 1):
            row |= {"limit_bytes": limit, "raised": False, "attempts": attempt}
            plan = self._train_within(limit, row)
            limit = row["limit_bytes"]
            self.result["smallest_bytes"] = row["measured_bytes"]
            if row["measured_bytes"] <= limit:
                break
            limit = max(int(1.03 * limit), row["measured_bytes"])
        return plan

    def _train_within(self, limit: int, row: dict[str, Any]) -> keras_remat.Plan | None:
        """One ``fit`` under the limit, which is raised to what is needed where it is refused."""
        for attempt in range(1, _LIMITS + 1):
            row["limit_bytes"] = limit
            try:
                return self._fit_within(limit, row)
            except (keras_remat.InfeasibleBudgetError, keras_remat.ScheduleNotFoundError) as error:
                if attempt == _LIMITS:
                    raise
                needed = max(getattr(error, "best_peak_bytes", None) or 0, error.floor_bytes)
                limit = int(max(1.03 * limit, 1.01 * needed / (1 - self.options["margin"])))
                row["raised"] = row["budget"] != "smallest"
        raise AssertionError("the loop returns or raises")

    def _fit_within(self, limit: int, row: dict[str, Any]) -> keras_remat.Plan | None:
        """One ``fit`` with ``RematAutotune`` under the limit; fills in the row."""
        options = self.options
        self._begin_anew()
        remat = keras_remat.RematAutotune(
            memory_limit=limit,
            batch_size="keep",
            solver=options["solver"],
            margin=options["margin"],
            solver_time_limit_s=options["solver_time_limit_s"],
            seed=options["seed"],
            verbose=0,
        )
        probe = self._probe(_EPOCHS, remat)
        try:
            self._fit(_EPOCHS, remat, probe)
        finally:
            row["events"] = [event.message for event in remat.report.events]
        plan = remat.plan
        if plan is None:
            store_all = keras_remat.Schedule.store_all(remat.problem.graph)
            row |= {
                "predicted_bytes": self.backend.memory.peak_bytes(remat.problem, store_all),
                "measured_bytes": max(probe.peaks[-3:]),
                "fit_peak_bytes": max(probe.peaks[1:]),
                "overhead": 0.0,
                "recomputed": 0,
                "parts": 1,
                "to_swap_s": None,
            }
            return None
        row |= {
            "predicted_bytes": plan.predicted.peak_bytes,
            "measured_bytes": probe.final_peak_bytes,
            "fit_peak_bytes": max(probe.peaks),
            "overhead": plan.overhead,
            "recomputed": len(plan.solution.schedule.recomputed),
            "parts": plan.slicing.parts if plan.slicing else 1,
            "to_swap_s": probe.swapped_after_s,
            "solver": plan.solution.solver,
        }
        return plan

    def _compare(self, variants: list[Variant]) -> None:
        """Times, weights and losses of the variants against plain and store-all; how far two runs
        of the plain step part is the measure."""
        plain, again, store_all, *rest = variants
        plain_s = median([*plain.times_s, *again.times_s])
        self.result |= {
            "plain_time_s": plain_s, "store_all_time_ratio": median(store_all.times_s) / plain_s,
            "plain_again_difference": difference(plain.losses, again.losses),
        }  # fmt: skip
        for row in self.result["rows"]:
            for variant in rest:
                if variant.name == row["budget"]:
                    row["time_ratio"] = median(variant.times_s) / plain_s
                    row["equal_weights"] = same_bits(variant.state, store_all.state)
                    row["loss_difference"] = difference(plain.losses, variant.losses)


def _plain_step(model: keras.Model) -> RunStep:
    """Keras's own train function, one batch at a time."""
    function = model.make_train_function() or model.train_function
    if keras.backend.backend() == "torch":  # it is given the loader's batches, not an iterator
        return lambda batch: function([batch])
    return lambda batch: function(iter([batch]))


if __name__ == "__main__":
    keras_remat.enable_cpu_memory_stats()
    print(json.dumps(Measurement(json.loads(sys.argv[1])).run()))
