"""One of two processes with two devices each that train a model together; prints what came of it as
JSON: ``python processes_case.py RANK PORT [FAULT]``.

A fault is ``WHERE:CALL:RANK:KIND``: the call of a function, counted from 1, that raises in one of
the processes. ``options:0:RANK:`` gives a process other options.
"""

import json
import os
import sys
import warnings

os.environ["KERAS_BACKEND"] = "jax"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
)

import jax
import jax_models as models
import keras

import keras_remat
from keras_remat.backends.jax import JaxBackend, device
from keras_remat.errors import UnsupportedModelError
from keras_remat.planning import request
from keras_remat.training.requests import PlanRequests

RANK, PORT = int(sys.argv[1]), sys.argv[2]
WHERE, CALL, AT, KIND = (sys.argv[3] if len(sys.argv) > 3 else "nowhere:0:0:").split(":")
BATCH = 32
KINDS = {
    "oom": lambda: jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory: injected"),
    "interrupt": KeyboardInterrupt,
    "bug": lambda: ValueError("injected"),
    "unsupported": lambda: UnsupportedModelError("injected"),
}
#: Where a fault is → what is called there.
PLACES = {
    "run": (device.Device, "run"),
    "plain": (device.Device, "run_plain"),
    "trace": (JaxBackend, "trace"),
    "lower": (JaxBackend, "lower"),
    "solve": (request, "within_budget"),
    "keep": (PlanRequests, "keep"),
    "data": (None, None),
}


def inject():
    """Makes a call raise in this process, if it is the one."""
    if WHERE not in PLACES or int(AT) != RANK:
        return
    owner, name = PLACES[WHERE]
    if owner is None:
        return
    real, calls = getattr(owner, name), []

    def failing(*arguments, **options):
        calls.append(1)
        if len(calls) == int(CALL):
            raise KINDS[KIND]()
        return real(*arguments, **options)

    setattr(owner, name, failing)


def batches(model, fails):
    x, y = models.batch(model, 12 * BATCH)
    part = BATCH // 2  # of this process
    for at in range(12):
        if fails and at == int(CALL):
            raise KINDS[KIND]()
        begin = at * BATCH + RANK * part
        yield x[begin : begin + part], y[begin : begin + part]


def trained(callback):
    keras.utils.set_random_seed(0)
    model = models.mixer(blocks=4)
    fails = callback is not None and WHERE == "data" and int(AT) == RANK
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        history = model.fit(
            batches(model, fails),
            steps_per_epoch=12,
            verbose=0,
            callbacks=[] if callback is None else [callback],
        )
    return history.history["loss"], [
        str(w.message) for w in said if "keras_remat" in str(w.message)
    ]


keras.distribution.initialize(f"localhost:{PORT},localhost:{PORT}", 2, RANK)
keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
plain, _ = trained(None)
watched = keras_remat.RematAutotune(None, "keep", verbose=0)
trained(watched)
problem, peak = watched.problem, watched.report.epochs[-1].peak_bytes
resident = problem.profile.resident_bytes
limit = int(resident + 0.65 * (peak - resident))
inject()
remat = keras_remat.RematAutotune(
    limit + RANK,  # the smallest counts
    "max",
    margin=0.0,
    seed=int(WHERE == "options" and int(AT) == RANK),
    verbose=0,
)
losses, said = trained(remat)
print(
    json.dumps(
        {
            "plain": plain,
            "losses": losses,
            "said": said,
            "plain_peak": peak,
            "limit": remat.report.limit_bytes,
            "smallest_limit": limit,
            "peak": remat.report.epochs[-1].peak_bytes,
            "order": None if remat.plan is None else list(remat.plan.solution.schedule.order),
            "events": [f"{e.kind}: {e.message}" for e in remat.report.events],
        }
    )
)
