"""Trains the sizes that a search found, and goes down or up from there.

Where prediction and device disagree, the device wins: a found size is trained for a few real steps,
on the given samples repeated, and every variable is put back. The next size is chosen as inside
``fit`` (:mod:`keras_remat.batch_size.size_chooser`).

A size may have a graph of its own, where the framework folds an op at some sizes and not at others.
So every size is compared with its own trace before it runs, and planned anew where the ops differ.

A kernel may change with the batch, too, and its workspace then follows from no smaller size. Where
the bytes alive are the whole prediction, and op times can be measured, a size whose peak is off its
prediction is recorded, and the next size is chosen by the recorded costs of its ops.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from keras_remat.backends.base import Backend, RunStep, TracedStep, preserved_state
from keras_remat.backends.batches import repeated_batch
from keras_remat.backends.memory import is_on_host
from keras_remat.batch_size.cost_fit import transfer_costs
from keras_remat.batch_size.found import BatchSearch, SizeTrial, is_allowed
from keras_remat.batch_size.scaling import traced_at
from keras_remat.batch_size.size_chooser import SizeChooser
from keras_remat.batch_size.step_scaling import Scaling, in_slices
from keras_remat.core.graph import Graph
from keras_remat.core.limit import Limit
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule, Usage
from keras_remat.errors import BudgetError, UnsupportedModelError
from keras_remat.planning.plan import Plan
from keras_remat.planning.request import PlanRequest, plan_for

#: A peak off its prediction by more than this share shows that other kernels ran: on PyTorch plans
#: were at most 0.07 % off on a CPU and 0.7 % on an H200 where the recorded kernels ran
#: (``benchmarks/step_memory.py --backend torch``, ``benchmarks/gpu_models.py``).
_OTHER_KERNELS = 0.01
#: Number of steps that are recorded then: on a GPU the first shows memory, and the second times.
_RECORDED_ON_CPU, _RECORDED_ON_GPU = 1, 2

#: Trains a size under a plan; returns a step's usage, or ``None`` when memory ran out.
Train = Callable[[int, Plan], Usage | None]


class SizeRunner:
    """Trains steps of any batch size, on the samples of one batch repeated.

    The model's variables are put back after each size.

    Args:
        scaling: the step's costs at any size; learns the recorded costs at a size whose prediction
            was off. Sizes run in its slices.
    """

    def __init__(self, backend: Backend, model: Any, batch: Any, scaling: Scaling):
        self._backend, self._model, self._batch, self._scaling = backend, model, batch, scaling
        self._traced: tuple[int, TracedStep] | None = None  # of the newest size

    def _trace(self, size: int) -> TracedStep:
        if self._traced is None or self._traced[0] != size:
            self._traced = None
            gc.collect()  # the step before is in reference cycles
            whole = traced_at(self._backend, self._model, self._batch, size)
            self._traced = size, in_slices(whole, self._scaling.slicing)
        return self._traced[1]

    def graph(self, size: int) -> Graph:
        """Returns the train step's graph at a size.

        Raises:
            UnsupportedModelError: the model cannot take a batch of that size.
        """
        return self._trace(size).graph

    def __call__(self, size: int, plan: Plan) -> Usage | None:
        """Trains a size and returns a step's usage; ``None`` when the device ran out of memory."""
        backend, traced = self._backend, self._trace(size)
        known = plan.problem
        if known is None:
            raise ValueError("a plan that was loaded tells no costs: plan anew")
        problem = replace(known, graph=traced.graph, budget_bytes=plan.budget_bytes)
        schedule = plan.solution.schedule
        try:
            with preserved_state(backend, self._model) as put_back:
                if backend.memory.order_matters:
                    put_back()  # the peak depends on what ran before
                batch = repeated_batch(self._batch, size)
                run = backend.lower(traced, problem, schedule, plan.writing)
                profile, usage = self._measured(problem, schedule, run, batch)
        except Exception as error:
            if not backend.is_out_of_memory(error):
                raise
            return None
        if profile is not None and self._runs_other_kernels(problem, schedule, usage):
            problem = replace(problem, profile=profile)
            whole = problem if traced.whole is None else traced.whole.problem(problem)
            self._scaling.whole.learn(size, whole)
        if backend.device.has_statistics:
            backend.memory.observe(problem, schedule, usage.peak_bytes)
        return usage

    def _measured(
        self, problem: Problem, schedule: Schedule, run: RunStep, batch: Any
    ) -> tuple[Profile | None, Usage]:
        """Measures a step; returns its profile, where it was recorded, and its usage.

        The peak of the first call decides whether further steps are recorded. Where a first call
        tunes kernels, it decides nothing else: the step is measured again.
        """
        backend = self._backend
        _, usage = backend.measure(lambda: run(batch))
        if self._runs_other_kernels(problem, schedule, usage):
            steps = _RECORDED_ON_CPU if is_on_host(backend.device) else _RECORDED_ON_GPU
            return self._recorded(steps, problem.profile.resident_bytes, run, batch)
        return None, usage if self._tells_at_once else backend.measure(lambda: run(batch))[1]

    @property
    def _tells_at_once(self) -> bool:
        """Returns whether the first call of a step is like later ones.

        No kernel is tuned then, and the memory that earlier steps left free does not matter.
        """
        return self.learns and is_on_host(self._backend.device)

    @property
    def learns(self) -> bool:
        """Returns whether a size is recorded when its ops take other bytes than expected.

        That is so where the bytes alive are the whole prediction, and op times can be measured.
        """
        backend = self._backend
        tells = backend.device.has_statistics and backend.measures_op_times
        return tells and not backend.memory.order_matters

    def _runs_other_kernels(self, problem: Problem, schedule: Schedule, usage: Usage) -> bool:
        """Returns whether a step's peak shows other workspaces of its ops than expected."""
        if not self.learns:
            return False
        predicted = self._backend.memory.peak_bytes(problem, schedule)
        return abs(usage.peak_bytes - predicted) > _OTHER_KERNELS * predicted

    def _recorded(
        self, steps: int, resident_bytes: int, run: RunStep, batch: Any
    ) -> tuple[Profile | None, Usage]:
        """Records steps; returns their profile, and the usage of the last one.

        The profile is ``None`` where the profiler is busy.
        """
        backend, profile = self._backend, None
        recorder = backend.recorder()
        is_recording = recorder.start()
        try:
            for _ in range(steps if is_recording else 1):
                _, usage = backend.measure(lambda: run(batch))
        finally:  # a profiler session must not outlive a step that raised
            if is_recording:
                profile = recorder.stop(run, resident_bytes)
        return profile, usage


def verified_search(
    search: BatchSearch,
    scaling: Scaling,
    chooser: SizeChooser,
    limit: Limit,
    train: Train,
    graph_of: Callable[[int], Graph],
) -> BatchSearch:
    """Trains the sizes that a search found, and goes down or up from there.

    Args:
        chooser: chooses the sizes.
        limit: memory limit. Predicted peaks leave its margin free; measured ones need not.
        train: runs a size; see :class:`SizeRunner`.
        graph_of: returns the graph of the train step that really runs at a size.

    Returns:
        The search with the largest size that trained, its plan with the measured usage, and the
        smallest size that did not train; the sizes as they were, where none trained.
    """
    started, probes = time.perf_counter(), list(search.probes)
    while True:
        chooser, chosen = chooser.choose(scaling, limit)
        if chosen is None:
            break
        size, plan = chosen
        problem = scaling.at(size)
        try:
            graph = graph_of(size)
        except UnsupportedModelError as error:
            own: Plan | SizeTrial = SizeTrial(size, None, str(error))
        else:
            own = _for_its_graph(size, plan, problem, graph, chooser)
        if isinstance(own, SizeTrial):  # the reason why not
            probes.append(own)
            chooser = chooser.after_trial(size, None, 0, fits=False)
            continue
        usage = train(size, own)
        if usage is None:
            chooser = chooser.after_trial(size, own, 0, fits=False)
            continue
        ran = replace(own, measured=usage, budget_bytes=limit.usable_bytes)
        probes.append(SizeTrial(size, ran))
        fits = limit.holds(usage.peak_bytes)
        chooser = chooser.after_trial(size, own, usage.peak_bytes, fits=fits)
    (failed, failed_peak), largest = chooser.failed, chooser.trained or search.max_batch_size
    return replace(
        search,
        max_batch_size=largest,
        plain_batch_size=min(search.plain_batch_size, largest),
        probes=tuple(probes),
        fit=scaling.fit,
        failed_batch_size=failed or None,
        failed_peak_bytes=failed_peak or None,
        verification_time_s=time.perf_counter() - started,
        ended_by_clock=search.ended_by_clock or chooser.ended_by_clock,
    )


def _for_its_graph(
    size: int, plan: Plan, planned: Problem, graph: Graph, chooser: SizeChooser
) -> Plan | SizeTrial:
    """Returns a plan for the graph that really runs at a size.

    It is ``plan``, or a new one where the graph has other ops; where none fits, a trial with the
    reason.
    """
    if graph.has_ops_of(planned.graph):
        return plan
    problem, others = transfer_costs(planned, graph), len(planned.graph.ops)
    differs = f"the train step has {len(graph.ops)} ops at this size, {others} at others"
    try:
        plan = plan_for(
            PlanRequest.on(
                chooser.backend,
                problem=problem,
                batch_size=size,
                limit=Limit(plan.budget_bytes),
                solver="greedy",
                seconds=chooser.solve_s,
                seed=chooser.seed,
            )
        )
    except BudgetError as error:
        return SizeTrial(size, None, f"{differs}: {error}")
    if not is_allowed(problem, plan.predicted.time_s, chooser.max_overhead):
        return SizeTrial(size, None, f"{differs}: overhead {plan.overhead:.1%} is over the bound")
    return plan
