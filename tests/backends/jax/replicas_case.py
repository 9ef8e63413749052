"""``fit`` on four devices that the host pretends to have, plain and rematerialized; prints what
came of it as JSON: ``python replicas_case.py data|model keep|joined``."""

import json
import os
import sys
import warnings

os.environ["KERAS_BACKEND"] = "jax"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
)

import jax
import jax_models as models
import keras
import numpy as np
from compiled_steps import CompiledSteps

import keras_remat
from keras_remat.backends.jax import device

sys.modules["tensorflow"] = None  # Keras would load it to seed it
BATCH = 64
#: Fewer compile quicker; with a model's parts on devices, activations are less of what it needs.
BLOCKS = 2 if sys.argv[1] == "data" else 4
#: Of what the plain step adds. The least that plans with two blocks come to is 0.62 with JAX 0.10,
#: and 0.72 with JAX 0.12, whose XLA:CPU needs a seventh less for the plain step. On several devices
#: it holds two random words for each element that dropout sees, in place of a boolean.
SHARE = 0.8
steps = CompiledSteps()


def distribution(kind):
    if kind == "data":
        return keras.distribution.DataParallel()
    layouts = keras.distribution.LayoutMap(
        keras.distribution.DeviceMesh((2, 2), ["batch", "model"])
    )
    layouts[".*dense.*kernel"] = (None, "model")
    layouts[".*dense.*bias"] = ("model",)
    return keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")


def trained(remat):
    steps.newest = None
    keras.utils.set_random_seed(0)
    model = models.mixer(blocks=BLOCKS)
    data = models.batch(model, 2 * BATCH)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        history = model.fit(
            *data,
            batch_size=BATCH,
            shuffle=False,
            verbose=0,
            epochs=2,
            callbacks=[remat],
        )
    return {
        "losses": history.history["loss"],
        "temp": steps.temp_bytes,
        "all_reduces": len(steps.reduced_arrays),
        "reduced_arrays": sum(steps.reduced_arrays),
        "shardings": sorted({str(v.value.sharding) for v in model.variables}),
        "kinds": [event.kind for event in remat.report.events],
        "recomputes": remat.plan is not None and remat.plan.recomputes,
        "batch": remat.report.batch_size,
        "said": [str(w.message) for w in said if "keras_remat" in str(w.message)],
        "peak": remat.report.epochs[-1].peak_bytes,
    }


def joined(size=2 * BATCH, samples=12 * BATCH + 40):
    """Batches that are joined, and plain ones of the same samples: what the weights are after."""
    remat = keras_remat.RematAutotune(None, size, verbose=0)
    options = {"shuffle": False, "verbose": 0}
    weights = []
    for callback in (remat, None):
        keras.utils.set_random_seed(0)
        model = models.mixer(blocks=4)
        x, y = models.batch(model, samples)
        if callback is not None:
            model.fit(x, y, batch_size=BATCH, callbacks=[callback], **options)
            change = next(event for event in remat.report.events if event.kind == "batch")
            first = change.step * BATCH
        else:
            rest = samples - (samples - first) % size
            for begin, end in ((0, first), (first, rest), (rest, samples)):
                of = BATCH if begin == 0 else size
                model.fit(x[begin:end], y[begin:end], batch_size=of, **options)
        weights.append(model.get_weights())
    return {
        "batch": remat.report.batch_size,
        "steps": remat.report.epochs[0].steps,
        "expected_steps": change.step + -(-(samples - first) // size),
        "difference": max(float(abs(a - b).max()) for a, b in zip(*weights, strict=True)),
    }


keras.distribution.set_distribution(distribution(sys.argv[1]))
if sys.argv[2] == "joined":
    print(json.dumps(joined()))
    sys.exit()
plain = trained(keras_remat.RematAutotune(None, "keep", verbose=0))
resident = device.Device().in_use_bytes()
limit = int(resident + SHARE * (plain["peak"] - resident))
remat = keras_remat.RematAutotune(limit, "keep", solver="greedy", margin=0.0, verbose=0)
came = {"plain": plain, "remat": trained(remat), "limit": limit}
came["in_use"] = [device.Device().in_use_bytes()]
read = [np.array(array) for array in jax.live_arrays()]
came["in_use"].append(device.Device().in_use_bytes())
print(json.dumps(came))
