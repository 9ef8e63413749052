"""Plain Keras or solvers of the maximum batch benchmark, one model in a process of its own:
``python max_batch_case.py OPTIONS``.

:mod:`max_batch` gives the options as JSON and reads the rows from standard output, one JSON object
per line, each written as soon as it is known. With the row of plain Keras among the options, it is
not measured again.
"""

from __future__ import annotations

import gc
import json
import math
import os
import sys
import time
from dataclasses import replace
from itertools import count, takewhile
from statistics import median
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import paper_models
from max_batch import OUT_OF_MEMORY
from rows import UNLIMITED_BYTES
from watch import StepWatch, TorchEpoch, is_on_torch_cpu, long_fit

import keras_remat
from keras_remat.backends.base import Backend, RunStep, load_backend
from keras_remat.backends.batches import batch_bytes, repeated_batch
from keras_remat.batch_size.cost_fit import transfer_costs
from keras_remat.batch_size.found import BatchSearch, is_allowed, overhead_bound
from keras_remat.batch_size.search import search_batch_size
from keras_remat.batch_size.size_chooser import SizeChooser
from keras_remat.batch_size.sizes import shorter_by
from keras_remat.batch_size.step_scaling import Scaling, step_scaling
from keras_remat.batch_size.trials import SizeRunner, verified_search
from keras_remat.core.limit import Limit
from keras_remat.planning.calibrated_solve import within_budget
from keras_remat.planning.make_plan import traced_model

#: How far one step up goes from a batch that trained.
STEP_UP = 0.03
#: Steps of plain Keras per batch after a first one; its ops run in another order every time, and
#: its highest peak comes late.
_PLAIN_STEPS = 7
#: How often a size that measures over the limit is planned again.
_REPLANS = 2
#: What BFC takes when TensorFlow starts.
_FIRST_REGION_BYTES = 2 * 2**20


#: A size that no search reaches: an int asks for the largest that fits, however few updates it
#: leaves in an epoch.
_ANY_SIZE = 2**20
#: Loader batches of an epoch of ``fit``, and its samples, at least; and the most epochs.
_LOADER_STEPS, _EPOCH_SAMPLES, _MOST_EPOCHS = 40, 200, 20
#: It ends when so many epochs kept one size, and so many steps: a size is measured within nine.
_SETTLED_EPOCHS, _SETTLED_STEPS = 2, 12


class _EndOnceSettled(keras.callbacks.Callback):
    """Ends training when the batch size has stayed for some epochs, after the first."""

    def __init__(self, remat: keras_remat.RematAutotune):
        super().__init__()
        self._remat = remat

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        epochs = self._remat.report.epochs[1:]
        size = self._remat.report.epochs[-1].batch_size
        kept = list(takewhile(lambda one: one.batch_size == size, reversed(epochs)))
        steps = sum(one.samples // size for one in kept)
        if len(kept) >= _SETTLED_EPOCHS and steps >= _SETTLED_STEPS:
            self.model.stop_training = True


class Trained(NamedTuple):
    """Steps of a batch size by a schedule: what was predicted and measured of them."""

    size: int
    schedule: keras_remat.Schedule
    predicted_bytes: int
    peak_bytes: int
    seconds: float


class Measurement:
    """What one model can train under one limit.

    Args:
        options: see :func:`max_batch.options_of`.
    """

    def __init__(self, options: dict[str, Any]):
        self.options = options
        self.paper = paper_models.PAPER_MODELS[options["model"]]
        self.model = self.paper.build(self.paper.pixels)
        self.start = options.get("plain_batch") or self.paper.plain_batch
        self.batch = self.paper.batch(self.start)
        self.backend: Backend = load_backend()
        self.limit_bytes = int(options["limit_bytes"] or 0)
        self.plain_batch, self.plain_s_per_sample = 0, math.nan
        self.scaling: Scaling

    def row(self, **row: Any) -> None:
        """Hands a row to the benchmark at once."""
        print(json.dumps({"model": self.paper.name} | row), flush=True)

    def run(self) -> None:
        """Everything, row by row."""
        plain = self.options.get("plain")
        if plain is None:
            self._plain()
        else:
            self.limit_bytes, self.plain_batch = plain["limit_bytes"], plain["batch"]
            self.plain_s_per_sample = plain["seconds"] / plain["batch"]
            self.backend.trace(self.model, self.batch)  # builds the model
        if set(self.options["solvers"]) - {"fit"}:
            self._profile()
        for name in self.options["solvers"]:
            try:
                self._fit() if name == "fit" else self._solver(name)
            except keras_remat.RematError as error:
                self.row(row="batch", solver=name, error=f"{type(error).__name__}: {error}")

    # ---------------------------------------------------------------- plain Keras

    def _measured(self, run: RunStep, size: int, steps: int) -> tuple[int, float]:
        """Trains ``steps`` steps after a first one; the highest allocator peak of them all
        (:data:`OUT_OF_MEMORY` where they did not end), and the median seconds without the first."""
        try:
            return self._ran(run, size, steps)
        except Exception as error:
            if not self.backend.is_out_of_memory(error):
                raise
            return OUT_OF_MEMORY, math.nan

    def _ran(self, run: RunStep, size: int, steps: int) -> tuple[int, float]:
        batch = repeated_batch(self.batch, size)
        peaks, times_s = [], []
        watched = TorchEpoch(self.model) if is_on_torch_cpu() else None
        for _ in range(1 + steps):
            if watched is not None:
                watched.step_begins()
            logs, usage = self.backend.measure(lambda: run(batch))
            loss = float(logs["loss"])
            if not math.isfinite(loss):
                raise RuntimeError(f"{self.paper.name} at batch {size}: the loss is {loss}")
            peaks.append(usage.peak_bytes)
            times_s.append(usage.time_s)
        if watched is not None:
            peaks, _ = watched.ends(batch_bytes(batch))
        return max(peaks), median(times_s[1:])

    def _train_plain(self, size: int) -> tuple[int, float]:
        self.model.train_function = None
        gc.collect()
        function = self.model.make_train_function() or self.model.train_function
        given = list if keras.backend.backend() == "torch" else iter
        return self._measured(lambda batch: function(given([batch])), size, _PLAIN_STEPS)

    def _plain(self) -> None:
        """The largest batch of plain Keras: found by training, one sample more at a time."""
        size = self.start
        self.backend.trace(self.model, self.batch)  # builds the model
        peak, seconds = self._train_plain(size)
        self.limit_bytes = self.limit_bytes or peak
        while peak > self.limit_bytes and size > 1:
            size -= 1
            peak, seconds = self._train_plain(size)
        if peak > self.limit_bytes:
            raise RuntimeError(
                f"plain Keras needs {peak} bytes for one sample, more than the limit of "
                f"{self.limit_bytes}"
            )
        while True:
            more = self._train_plain(size + 1)
            if more[0] > self.limit_bytes:
                break
            size, (peak, seconds) = size + 1, more
        self.plain_batch, self.plain_s_per_sample = size, seconds / size
        self.row(
            row="batch",
            solver="plain",
            limit_bytes=self.limit_bytes,
            batch=size,
            ratio=1.0,
            measured_bytes=peak,
            seconds=seconds,
            time_ratio=1.0,
            failed_batch=size + 1,
            failed_bytes=more[0],
            predicted_bytes=None,
            overhead=0.0,
            search_s=None,
            pixels=self.paper.pixels,
        )

    # ---------------------------------------------------------------- planning

    def _profile(self) -> None:
        self.model.train_function = None
        step = traced_model(
            self.backend,
            self.model,
            self.batch,
            UNLIMITED_BYTES,
            0.0,
            "measured",
            self.options["seed"],
        )
        self.scaling = step_scaling(self.backend, self.model, step)

    def _search(self, name: str) -> BatchSearch:
        """What the product finds, its plan with what was measured; Chen's schedules go the same
        way."""
        options, limit = self.options, Limit(self.limit_bytes, self.options["margin"])
        start = self.start
        if name == "auto":
            found = keras_remat.find_max_batch_size(
                self.model,
                self.batch,
                limit.total_bytes,
                margin=options["margin"],
                time_limit_s=options["search_s"],
                seed=options["seed"],
            )
            self._learn(found)
            return found
        search = search_batch_size(
            self.scaling,
            start,
            limit,
            self.backend,
            solver=name,
            time_limit_s=options["chen_s"],
            seed=options["seed"],
        )
        train = SizeRunner(self.backend, self.model, self.batch, self.scaling)
        chooser = SizeChooser.after(
            self.backend,
            search,
            solver=name,
            solve_s=options["chen_s"] / 4,
            seed=options["seed"],
        )
        return verified_search(search, self.scaling, chooser, limit, train, train.graph)

    def _learn(self, found: BatchSearch) -> None:
        """Takes over what a search has measured, at sizes whose kernels are others, too: what it
        finds is predicted by what it knows."""
        for size, profile in ({} if found.fit is None else found.fit.profiles).items():
            whole = self.scaling.whole
            whole.learn(size, replace(whole.at(size), profile=profile))

    def train(self, size: int, schedule: keras_remat.Schedule) -> Trained:
        """Really trains ``size`` samples per step by a schedule. The peak is predicted just
        before."""
        gc.collect()
        spec = self.backend.resized_spec(self.batch, size)
        traced = self.backend.trace(self.model, spec)
        expected = self.backend.estimated_profile(traced, 0).op_workspace_bytes
        problem = transfer_costs(self.scaling.at(size), traced.graph, expected)
        if not traced.graph.has_ops_of(
            self.scaling.at(size).graph
        ):  # TensorFlow folds an op at some sizes: the order is another
            memory, seed = self.backend.memory, self.options["seed"]
            schedule = within_budget(
                problem, self.limit_bytes, memory, solver="greedy", seed=seed
            ).schedule
        keras_remat.validate(problem, schedule)
        predicted = self.backend.memory.peak_bytes(problem, schedule)
        run = self.backend.lower(traced, problem.with_budget(self.limit_bytes), schedule)
        if self.backend.memory.order_matters:
            self.backend.snapshot(self.model)()  # the variables, close together as in fit
        return Trained(size, schedule, predicted, *self._measured(run, size, self.options["steps"]))

    def trained(self, size: int, schedule: keras_remat.Schedule, name: str) -> Trained:
        """Trains by a known order, and where that is over the limit by one made again for this size
        and what was measured, as ``fit`` does; returns what needed least."""
        tried = [self.train(size, schedule)]
        while (newest := tried[-1]).peak_bytes > self.limit_bytes and len(tried) <= _REPLANS:
            if newest.peak_bytes < OUT_OF_MEMORY:
                over = max(0, newest.peak_bytes - newest.predicted_bytes)
            else:  # of which nothing is known but that it was too much
                less = newest.predicted_bytes * (1 - shorter_by(len(tried)))
                over = max(0, self.limit_bytes - int(less))
            problem = self.scaling.at(size)
            try:
                found = within_budget(
                    problem,
                    self.limit_bytes - over,
                    self.backend.memory,
                    solver=name,
                    time_limit_s=self.options["search_s"] / 6,
                    seed=self.options["seed"],
                )
            except (keras_remat.InfeasibleBudgetError, keras_remat.ScheduleNotFoundError):
                break
            if not is_allowed(problem, found.time_s, "forward"):
                break
            tried.append(self.train(size, found.schedule))
        return min(tried, key=lambda one: one.peak_bytes)

    # ---------------------------------------------------------------- inside fit

    def _fit(self) -> None:
        """The size that a running ``fit`` settles on, of loader batches without end. Peaks are of
        all its steps, the first ones too; time is that of its last epoch."""
        remat = keras_remat.RematAutotune(
            self.limit_bytes, _ANY_SIZE, margin=self.options["margin"], verbose=0
        )
        watch = StepWatch(watched_epoch=None, batch_bytes=None)
        settled, data = _EndOnceSettled(remat), endless(self.batch)
        loader_steps = max(_LOADER_STEPS, _EPOCH_SAMPLES // self.start)
        steps = {"steps_per_epoch": loader_steps, "epochs": _MOST_EPOCHS}
        long_fit(self.model, data, callbacks=[remat, watch, settled], **steps)
        report, plan = remat.report, remat.plan
        self.row(
            row="batch",
            solver="fit",
            limit_bytes=self.limit_bytes,
            batch=report.batch_size,
            ratio=report.batch_size / self.plain_batch,
            predicted_bytes=None if plan is None else plan.predicted.peak_bytes,
            measured_bytes=max(watch.peaks),
            peaks=watch.peaks,
            events=[(event.step, event.message) for event in report.events],
            overhead=0.0 if plan is None else plan.overhead,
            time_ratio=1 / report.epochs[-1].samples_per_s / self.plain_s_per_sample,
            search_s=report.planning_time_s,
            failed_batch=None,
            failed_bytes=None,
            pixels=self.paper.pixels,
        )

    # ---------------------------------------------------------------- one solver

    def _solver(self, name: str) -> None:
        started = time.perf_counter()
        search = self._search(name)
        search_s = time.perf_counter() - started
        best = self.trained(search.max_batch_size, search.plan.solution.schedule, name)
        while best.peak_bytes > self.limit_bytes and best.size > 1:
            out = best.peak_bytes >= OUT_OF_MEMORY
            share = 1 - STEP_UP if out else self.limit_bytes / best.peak_bytes
            size = min(best.size - 1, int(best.size * share))
            best = self.trained(size, best.schedule, name)
        while True:  # until the allocator says no
            more = max(best.size + 1, math.ceil(best.size * (1 + STEP_UP)))
            larger = self.trained(more, best.schedule, name)
            if larger.peak_bytes > self.limit_bytes:
                break
            best = larger
        overhead, allowed = self._overhead(best.size, best.schedule)
        self.row(
            row="batch",
            solver=name,
            limit_bytes=self.limit_bytes,
            batch=best.size,
            ratio=best.size / self.plain_batch,
            searched=search.max_batch_size,
            predicted_bytes=best.predicted_bytes,
            measured_bytes=best.peak_bytes,
            overhead=overhead,
            allowed_overhead=allowed,
            time_ratio=best.seconds / best.size / self.plain_s_per_sample,
            search_s=search_s,
            ended_by_clock=search.ended_by_clock,
            failed_batch=larger.size,
            failed_bytes=larger.peak_bytes,
            recomputed=len(best.schedule.recomputed),
            found_by=search.plan.solution.solver,
            pixels=self.paper.pixels,
        )
        if self.options["predictions"]:
            self._predictions(best)

    def _overhead(self, size: int, schedule: keras_remat.Schedule) -> tuple[float, float]:
        """The overhead of an order at this size, and one extra forward pass, both over the
        store-all time."""
        problem = self.scaling.at(size)
        return keras_remat.simulate(
            problem, schedule
        ).time_s / problem.store_all_time_s - 1, overhead_bound(problem, "forward")

    def _predictions(self, found: Trained) -> None:
        """Predicted and measured peak of the found order at batches that were not profiled."""
        profiled = self.start
        orders = (self.train(size, found.schedule) for size in (profiled // 2, 2 * profiled))
        for one in (*orders, found):
            self.row(
                row="prediction",
                batch=one.size,
                profiled=profiled,
                predicted_bytes=one.predicted_bytes,
                measured_bytes=one.peak_bytes,
            )


def endless(batch: Any) -> Any:
    """Returns data that are this batch, time and again."""
    if keras.backend.backend() != "tensorflow":
        return (batch for _ in count())
    import tensorflow as tf

    return tf.data.Dataset.from_tensors(batch).repeat()


def one_region(nbytes: int) -> None:
    """Has BFC take all it may have at once, as a GPU's does; a first region it has already."""
    import tensorflow as tf

    tf.raw_ops.Empty(shape=[nbytes - _FIRST_REGION_BYTES], dtype=tf.uint8)


if __name__ == "__main__":
    keras_remat.enable_cpu_memory_stats()
    options = json.loads(sys.argv[1])
    if options["pool"]:
        one_region(options["limit_bytes"])
    Measurement(options).run()
