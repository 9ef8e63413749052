"""Orders in the pool that recorded steps have shown: prints the peaks that were predicted and
measured, in a process whose pool nothing else has used.

    python recorded_pool_case.py OPTIMIZER
"""

import gc
import json
import sys

import keras_models

import keras_remat
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule


def peaks(optimizer):
    """Yields what orders of less and less memory are predicted to take, and take, in bytes."""
    from keras_remat.backends.tensorflow import backend

    tensorflow = backend()
    model, data = keras_models.convnet(32, 64, 16, blocks=2, optimizer=optimizer)
    batch = tensorflow.example_batch(model, data)
    traced = tensorflow.trace(model, batch)
    gc.collect()
    estimated = tensorflow.estimated_profile(traced, tensorflow.device.in_use_bytes())
    problem, store_all = Problem(traced.graph, estimated), Schedule.store_all(traced.graph)
    run = tensorflow.lower(traced, problem, store_all)
    run(batch)
    recorder = tensorflow.recorder()
    assert recorder.start()
    for _ in range(3):
        run(batch)
    gc.collect()
    profile = recorder.stop(run, tensorflow.device.in_use_bytes())
    problem, resident = Problem(traced.graph, profile), profile.resident_bytes
    most = keras_remat.simulate(problem, store_all).peak_bytes - resident
    for share in (0.9, 0.8, 0.7, 0.6):
        tight = problem.with_budget(resident + int(share * most))
        order = keras_remat.solve(tight, solver="greedy").schedule
        predicted = tensorflow.memory.peak_bytes(problem, order)
        step = tensorflow.lower(traced, tight, order)
        tensorflow.measure(lambda step=step: step(batch))
        _, usage = tensorflow.measure(lambda step=step: step(batch))
        yield predicted, usage.peak_bytes


if __name__ == "__main__":
    keras_remat.enable_cpu_memory_stats()
    print(json.dumps(list(peaks(sys.argv[1]))))
