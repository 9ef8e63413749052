"""What has to hold on every allocator: limits are kept, and out of memory leaves no trace.

``.ci/run`` runs this, and whatever else is marked ``allocator``, in lanes of their own: oneDNN's
allocator, BFC in growing regions, and BFC in one region with the stand-in for a GPU
(:mod:`gpu_stand_in`), whose memory ends at ``TF_CPU_BFC_MEM_LIMIT_IN_MB``.
"""

import gc
import os

import keras_models
import numpy as np
import pytest
import tensorflow as tf
from own_process import TESTS, came_of

import keras_remat
from keras_remat.backends.tensorflow import backend
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.training.undo import OutOfMemory, StepGuard
from keras_remat.units import MIB

pytestmark = pytest.mark.allocator
SAMPLES, BATCH = 4096, 1024
LIMIT_MIB = int(os.environ.get("TF_CPU_BFC_MEM_LIMIT_IN_MB", 2**20))


def fit(epochs, limit=None, margin=0.05):
    callback = keras_remat.RematAutotune(
        memory_limit=limit,
        batch_size="keep",
        solver="greedy",
        solver_time_limit_s=5.0,
        profile_steps=1,
        margin=margin,
        verbose=0,
    )
    model, data = keras_models.mlp(SAMPLES, width=512, blocks=4, optimizer="sgd")
    history = model.fit(
        *data, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, callbacks=[callback]
    )
    return callback, history.history["loss"]


def in_use():
    gc.collect()
    return backend().device.in_use_bytes()


def test_a_fit_keeps_its_limit_and_its_losses():
    """What other tests hold, and Keras of the plain model, is there in both fits."""
    before = in_use()
    plain, plain_losses = fit(2)
    taken = plain.report.baseline.peak_bytes - before
    assert taken > 16 * MIB
    del plain
    room = int(0.75 * taken)
    limit = in_use() + room
    callback, losses = fit(4, limit, margin=0.05 * room / limit)
    assert callback.plan is not None
    assert callback.plan.solution.schedule.recomputed
    assert 0 < callback.plan.measured.peak_bytes <= limit
    assert losses[:2] == pytest.approx(plain_losses, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_orders_take_what_is_predicted_in_the_pool_that_recorded_steps_have_shown(optimizer):
    tensorflow = backend()
    if not tensorflow.device.has_statistics or tensorflow.device.name != "CPU:0":
        pytest.skip("for an allocator with statistics, whose recordings name it")
    peaks = came_of(TESTS / "recorded_pool_case.py", optimizer)
    assert len(peaks) == 4
    for predicted, measured in peaks:
        assert measured == pytest.approx(predicted, rel=0.02)


@pytest.mark.skipif(LIMIT_MIB > 2048, reason="the memory has no end here")
def test_out_of_memory_is_known_and_leaves_the_state():
    """A step whose values are eight times the memory each; the allocator waits ten seconds before
    it gives up."""
    tensorflow = backend()
    model, data = keras_models.mlp(64, width=512, blocks=4)
    batch = tensorflow.example_batch(model, tuple(part[:1] for part in data))
    size = 2**21 * LIMIT_MIB // 512
    traced = tensorflow.trace(model, tensorflow.resized_spec(batch, size))
    problem = Problem(traced.graph, tensorflow.estimated_profile(traced))
    step = tensorflow.lower(traced, problem, Schedule.store_all(traced.graph))
    before = [variable.numpy() for variable in model.variables]
    put_back = tensorflow.snapshot(model)
    samples = tuple(np.zeros((size, *part.shape[1:]), part.dtype) for part in data)
    with pytest.raises(tf.errors.OpError) as caught:
        tensorflow.measure(lambda: step((*samples, None)))
    assert tensorflow.is_out_of_memory(caught.value)
    put_back()
    for variable, value in zip(model.variables, before, strict=True):
        assert np.array_equal(variable.numpy(), value)
    small, _ = keras_models.mlp(64, width=512, blocks=4)
    assert np.isfinite(small.fit(*data, verbose=0).history["loss"][0])


@pytest.mark.skipif(LIMIT_MIB > 2048, reason="the memory has no end here")
def test_a_compiled_step_is_undone_each_time_its_launch_fails():
    """XLA frees the variables that a failed launch donated: without care the process ends."""
    model, data = keras_models.mlp(64, width=512, blocks=4, jit_compile=True)
    guard = StepGuard(model, backend())
    model.train_on_batch(*data)
    before = [variable.numpy() for variable in model.variables]
    held = in_use()
    too_many = tuple(np.repeat(part, 1024 * LIMIT_MIB // 512, axis=0) for part in data)
    for _ in range(2):
        outcome, _ = guard.attempt(
            lambda batch: model.train_on_batch(*batch), too_many, guarded=True
        )
        assert isinstance(outcome, OutOfMemory)
        assert in_use() <= held + MIB  # the failed step's batch is not kept
        for variable, value in zip(model.variables, before, strict=True):
            assert np.array_equal(variable.numpy(), value)
    assert np.isfinite(model.train_on_batch(*data)[0])
