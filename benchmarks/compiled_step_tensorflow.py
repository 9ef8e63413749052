"""The cases of ``compiled_step.py`` on TensorFlow with ``jit_compile=True``, one in a process.

``temp`` is what the device allocator's peak shows above what was in use before a step. XLA takes
its temporary memory as one buffer; a large free region, made once, lets the allocator count that
buffer exactly.
"""

from __future__ import annotations

import statistics
import time

import keras
import tensorflow as tf
from rows import MIB

import keras_remat
from keras_remat.backends.base import preserved_state
from keras_remat.backends.tensorflow.compiled import CompiledBackend
from keras_remat.backends.tensorflow.memory import measure
from keras_remat.backends.tensorflow.profiler.device import device_name
from keras_remat.core.limit import Limit
from keras_remat.core.problem import Problem
from keras_remat.errors import RematError
from keras_remat.planning.request import PlanRequest, plan_for

#: Room for every case's buffer twice over; untouched, so no memory of the machine.
REGION_BYTES = 8 * 2**30
#: Compilations for one budget, and for the smallest peak.
TRIES, TRIES_FOR_LEAST = 4, 8


class Recomputed(keras.layers.Layer):
    """A block under ``tf.recompute_grad``."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def call(self, x, training=None):
        return tf.recompute_grad(lambda y: self.block(y, training=training))(x)


def measured(backend, model, step, batch):
    """Bytes a step takes beside what is in use before it; the model's variables are put back."""
    with preserved_state(backend, model):
        before = backend.device.in_use_bytes()
        return backend.measure(lambda: step(batch))[1].peak_bytes - before


def ours(model, batch, budget, smallest):
    """Returns a step for ``budget`` temporary bytes, or for the smallest peak that halving the way
    to the floor finds, and its numbers."""
    backend = CompiledBackend()
    traced = backend.trace(model, batch)
    problem = Problem(
        traced.graph, backend.estimated_profile(traced, backend.device.in_use_bytes())
    )
    resident, best, tries = problem.profile.resident_bytes, None, 0
    floor, missed = problem.floor_bytes - resident, 0
    while tries < (TRIES_FOR_LEAST if smallest else TRIES):
        tries += 1
        try:
            asked = {"problem": problem, "batch_size": 1, "limit": Limit(resident + budget)}
            plan = plan_for(PlanRequest.on(backend, **asked, seconds=10.0))
        except RematError:
            if not smallest:
                break
            took = None
        else:
            step = backend.lower(traced, problem, plan.solution.schedule)
            took = measured(backend, model, step, batch)
        if took is not None and (best is None or took < best[0]):
            best = took, step, plan
        elif smallest and (took is None or budget == missed):
            floor = budget  # less cannot be had there
        if smallest and took is not None and budget < took and budget != missed:
            missed = budget  # what it took teaches the next plan for it
        elif smallest:
            budget = (floor + (budget if best is None else best[0])) // 2
        elif took <= budget:
            break
    if best is None:
        raise SystemExit("no plan near the floor")
    return best[1], {
        "tries": tries,
        "recomputed": sum(best[2].solution.schedule.recomputed.values()),
    }


def run_case(model, batch, case, budget, steps, loss_steps):
    """Compiles and times one case in this process; returns a dictionary of numbers."""
    keras_remat.enable_cpu_memory_stats()
    tf.raw_ops.Empty(shape=[REGION_BYTES // MIB, MIB], dtype=tf.uint8, init=False)
    model.jit_compile = True
    backend = CompiledBackend()
    batch = backend.example_batch(model, batch)
    started, started_cpu, result = time.perf_counter(), time.process_time(), {}
    if case.startswith("ours"):
        step, result = ours(model, batch, budget, case == "ours@min")
    else:
        step = tf.function(model.train_step, autograph=False, jit_compile=True)
        measured(backend, model, step, batch)
    result["compile_s"], result["compile_cpu_s"] = (
        time.perf_counter() - started,
        time.process_time() - started_cpu,
    )
    losses, wall, cpu, temp = [], [], [], 0
    for _ in range(steps):
        before, c = measure.bytes_in_use(), time.process_time()
        logs, usage = measure.measure(lambda: step(batch))
        wall.append(usage.time_s)
        cpu.append(time.process_time() - c)
        temp = max(temp, usage.peak_bytes - before)
        losses.append(float(logs["loss"]))
    return {
        **result,
        "temp": temp,
        "peak": before + temp,
        "time_s": statistics.median(wall[1:]),
        "cpu_s": min(cpu[1:]),
        "losses": losses[:loss_steps],
        "device_peak": usage.peak_bytes,
        "device": device_name(),
    }
