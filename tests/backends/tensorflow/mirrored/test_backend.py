"""Steps on several replicas: one replica's is cut out of what a strategy runs on all, planned, and
run by all; what is refused is refused with its reason."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from own_process import came_of, free_port

import keras_remat
from keras_remat.backends.tensorflow import backends
from keras_remat.backends.tensorflow.mirrored.backend import MirroredBackend
from keras_remat.backends.versions import OLDEST_FOR_REPLICAS, sentence_for
from keras_remat.errors import UnsupportedModelError

CASES = Path(__file__).parents[1] / "replicas_case.py"
#: Cases that are run together: starting a process takes longer than each of them.
TOGETHER = (
    "resident", "memory", "undone", "models", "without_strategy", "embedding", "refusals",
)  # fmt: skip
TOO_OLD = sentence_for("MirroredStrategy", OLDEST_FOR_REPLICAS)
needs_mirrored = pytest.mark.skipif(bool(TOO_OLD), reason=TOO_OLD)


def outcome(case):
    """Returns what came of a case, each of which runs once in a process of its own; skips where
    Keras is too old for several devices."""
    if TOO_OLD:
        pytest.skip(TOO_OLD)
    return _run(TOGETHER if case in TOGETHER else (case,))[case]


@functools.cache
def _run(cases):
    return came_of(CASES, *cases)


# ------------------------------------------------------------------ the step of one replica


def test_every_replica_runs_the_step_on_its_own_device():
    came = outcome("embedding")
    assert [device.rpartition(":")[2] for device in came["devices"]] == ["0", "1"]
    assert came["ours"] == pytest.approx(came["plain"], rel=1e-6)


def test_what_gathers_or_reduces_is_never_recomputed():
    came = outcome("embedding")
    assert came["collectives"] == ["CollectiveReduceV2", "CollectiveGatherV2"]
    assert came["recomputable"] == [False, False]


@pytest.mark.slow
def test_gradients_in_packs_need_less_than_in_one_and_are_the_same():
    came = outcome("packs")
    one, several, weights = came["one"], came["several"], came["bytes"]
    assert len(several["collectives"]) > 3 * len(one["collectives"])
    assert several["ours"] == one["ours"] == came["plain"]
    assert one["peak"] >= one["plain_least"] >= 2 * weights
    assert several["plain_least"] == pytest.approx(one["plain_least"], rel=0.01)
    assert several["peak"] < 0.8 * weights


@pytest.mark.slow
def test_loops_are_written_for_every_replica():
    came = outcome("recurrent")
    assert came["ours"] == pytest.approx(came["plain"], rel=1e-6)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("asks", "UnsupportedModelError: Replica 1 does not compute what the first one does"),
        ("follows", "what one replica computes from its part of the batch decides on another"),
        ("uneven", "UnsupportedBatchError: A batch of 32 samples does not divide evenly among 2"),
    ],
)
def test_replicas_that_differ_are_refused_with_the_reason(name, said):
    assert said in outcome("refusals")[name]


# ------------------------------------------------------------------ the backend


@pytest.mark.slow
def test_all_replicas_keep_the_limit_and_the_losses():
    """The limit is one replica's, and what is measured is its part of the allocator that both
    share, less than the prediction where they do not peak together. The last batch of every epoch
    is uneven: its step stays plain, and the fit goes on."""
    came = outcome("fit")
    assert came["recomputes"]
    assert came["peak"] <= came["limit"] < came["plain_peak"]
    assert came["peak"] <= 1.1 * came["predicted"]
    assert came["remat"]["losses"] == pytest.approx(came["plain"]["losses"], rel=1e-4)
    assert not came["remat"]["weights_differ"]
    (said,) = came["remat"]["said"]
    assert "A batch of 9 samples does not divide evenly" in said
    assert not any(event.startswith("unmodified") for event in came["events"])


@pytest.mark.slow
def test_joined_batches_train_as_plain_ones_of_the_same_samples():
    """Every sample is trained once, wherever batches grow; what is left at the end is one step."""
    came = outcome("larger")
    assert came["batch"] == 64
    assert came["samples"] == came["expected_samples"]
    assert came["steps"] == came["expected_steps"]
    assert came["difference"] < 1e-4


def test_state_comes_back_on_every_device():
    assert outcome("undone") == {"changed": True, "restored": True, "parts": 2}


def test_logical_cpus_share_an_allocator_and_each_has_an_equal_part():
    came = outcome("memory")
    assert came["allocator"] >= 4 * came["held"]
    assert came["replica"] == -(-came["allocator"] // 2)


def test_a_model_without_a_strategy_trains_on_one_of_several_devices():
    came = outcome("without_strategy")
    assert came["ops"] > 20
    assert came["limits"][0] == came["limits"][1] > 0


def test_what_replicas_share_until_it_is_written_is_counted_before_the_first_step():
    came = outcome("resident")
    assert came["traced"] == pytest.approx(came["trained"], rel=0.1)


@pytest.mark.parametrize(
    ("name", "said"), [("xla", "jit_compile=True"), ("outside", "strategy.scope()")]
)
def test_models_that_cannot_be_scheduled_are_refused(name, said):
    assert said in outcome("models")[name]


def strategies():
    yield tf.distribute.OneDeviceStrategy("CPU:0"), "no strategy is needed"
    central = tf.distribute.experimental.CentralStorageStrategy(["CPU:0"])
    yield central, "not on every replica's"
    for name, why in (
        ("CollectiveAllReduceStrategy", "keras#20585"),
        ("ParameterServerStrategyV2", "same step at the same time"),
        ("TPUStrategyV2", "keeps no order"),
        ("MyStrategy", "only tf.distribute.MirroredStrategy"),
    ):
        yield type(name, (), {})(), why


def test_other_strategies_are_refused_with_their_reason():
    for strategy, why in strategies():
        model = SimpleNamespace(distribute_strategy=strategy)
        (backend,) = backends(model, "auto")
        with pytest.raises(UnsupportedModelError, match=why):
            backend.check(model)


@needs_mirrored
def test_a_scope_of_another_strategy_is_refused():
    made, other = (tf.distribute.MirroredStrategy(["CPU:0"]) for _ in range(2))
    model = SimpleNamespace(distribute_strategy=made)
    with other.scope(), pytest.raises(UnsupportedModelError, match="scope of another strategy"):
        MirroredBackend(model).check(model)


@needs_mirrored
def test_one_replica_trains_under_a_plan():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
        model.compile("sgd", "mse")
    remat = keras_remat.RematAutotune("1GiB", "keep", verbose=0)
    with strategy.scope():  # a scope that is left open is the model's own
        model.fit(np.ones((8, 4)), np.ones((8, 4)), verbose=0, callbacks=[remat])
    assert remat.problem is not None
    assert remat.report.events == []


WORKER = """
import json, os, sys
os.environ["TF_CONFIG"] = sys.argv[1]
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import keras, numpy as np, tensorflow as tf
with tf.distribute.MultiWorkerMirroredStrategy().scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
try:
    model.fit(np.ones((8, 4)), np.ones((8, 1)), batch_size=4, verbose=0)
    print("fits", flush=True)
except ValueError as error:
    print(error, flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_keras_itself_cannot_fit_with_several_workers_yet():
    """keras-team/keras#20585. Where this fails, Keras has mended it: several workers can be
    supported, and are no longer to be refused for this reason."""
    ports = [free_port() for _ in range(2)]
    cluster = {"worker": [f"localhost:{port}" for port in ports]}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, json.dumps({"cluster": cluster, "task": task})],
            env=os.environ | {"KERAS_BACKEND": "tensorflow", "CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for task in ({"type": "worker", "index": at} for at in range(2))
    ]
    try:
        said = [worker.communicate(timeout=180)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert all("PerReplica" in text for text in said), said
