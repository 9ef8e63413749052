"""One part of the GPU benchmark, in a process of its own: ``python gpu_case.py OPTIONS.json``.

:mod:`gpu` writes the options and reads the answer, which is written again after everything that was
found. Only public functions of the package are used, and the backend's verbs where a step has to be
undone.
"""

from __future__ import annotations

import gc
import json
import math
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
from keras import layers
from rows import MIB, difference
from watch import Repeated, StepWatch, long_fit, statistics

import keras_remat

ON_JAX = keras.backend.backend() == "jax"
#: Samples whose plain step takes a good part of the memory, but not all of it.
BATCH = 64
#: Steps of every fit that is measured; the calls whose peaks are told.
STEPS, TOLD = 6, (1, 2, 5)
_TEXT = 300


class Answer:
    """What was found so far; on disk after every addition."""

    def __init__(self, path: str):
        self._path = Path(path)
        self._found: dict[str, Any] = {"facts": {}, "rows": []}

    def fact(self, **facts: Any) -> None:
        """Adds facts by name."""
        self._found["facts"] |= facts
        self._write()

    def row(self, **row: Any) -> None:
        """Adds a row of the part's table."""
        self._found["rows"].append(row)
        self._write()

    def skipped(self, reason: str) -> None:
        """Says why nothing was measured."""
        self._found["skipped"] = f"not here: {reason}"
        self._write()

    def _write(self) -> None:
        self._path.write_text(json.dumps(self._found, default=str))


# ---------------------------------------------------------------- the model


def build(options: dict[str, Any], jit: bool = True) -> keras.Model:
    """A convolutional network with batch normalization, depthwise convolutions and skip
    connections."""
    size, filters, blocks = (32, 16, 3) if options["stand_in"] else (128, 64, 8)
    keras.utils.set_random_seed(0)
    inputs = layers.Input((size, size, 3))
    x = layers.Conv2D(filters, 3, strides=2, padding="same")(inputs)
    for _ in range(blocks):
        h = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(2 * filters, 1)(x)))
        h = layers.DepthwiseConv2D(3, padding="same")(h)
        h = layers.ReLU()(layers.BatchNormalization()(h))
        x = layers.Add()([x, layers.BatchNormalization()(layers.Conv2D(filters, 1)(h))])
    model = keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-4), loss, jit_compile=jit)
    return model


def samples(options: dict[str, Any], count: int) -> tuple[np.ndarray, np.ndarray]:
    """Random images and labels."""
    size = 32 if options["stand_in"] else 128
    rng = np.random.default_rng(0)
    return rng.normal(size=(count, size, size, 3)).astype("float32"), rng.integers(0, 10, count)


# ---------------------------------------------------------------- the device


def on_cpu() -> bool:
    """Whether there is no GPU."""
    if ON_JAX:
        import jax

        return bool(jax.default_backend() == "cpu")
    import tensorflow as tf

    return not tf.config.list_physical_devices("GPU")


def cap(options: dict[str, Any]) -> None:
    """Caps TensorFlow's memory on a GPU; JAX's, and the stand-in's, were capped by variables.
    PyTorch's parts cap their own."""
    if keras.backend.backend() != "tensorflow" or on_cpu():
        return
    import tensorflow as tf

    gpu = tf.config.list_physical_devices("GPU")[0]
    megabytes = options["memory_bytes"] // MIB
    tf.config.set_visible_devices(gpu, "GPU")
    tf.config.set_logical_device_configuration(
        gpu, [tf.config.LogicalDeviceConfiguration(memory_limit=megabytes)]
    )


def repeated(batch: Any, count: int) -> Any:
    """Returns a data set of ``count`` times the same batch; on a CPU it is in memory once."""
    if ON_JAX:
        return Repeated(batch, count)
    import tensorflow as tf

    with tf.device("CPU:0"):
        return tf.data.Dataset.from_tensors(batch).repeat(count)


def trained(
    model: keras.Model, data: Any, remat: Any = None, epochs: int = 1
) -> tuple[StepWatch, list[str]]:
    """Fits on batches, and returns what was seen from outside and the warnings."""
    watch = StepWatch()
    callbacks = [watch] if remat is None else [remat, watch]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", UserWarning)
        long_fit(model, data, epochs=epochs, callbacks=callbacks)
    return watch, [str(w.message)[:_TEXT] for w in said if "keras_remat" in str(w.message)]


def mib(nbytes: float) -> float:
    """Bytes as MiB."""
    return round(nbytes / MIB, 1)


# ---------------------------------------------------------------- parts


def environment(options: dict[str, Any], answer: Answer) -> None:
    """Versions, device, allocator, limit; whether kernels can be timed."""
    answer.fact(keras=keras.__version__, backend=keras.backend.backend(), gpu=not on_cpu())
    if ON_JAX:
        import jax

        device = jax.local_devices()[0]
        answer.fact(jax=jax.__version__, device=device.device_kind, devices=jax.device_count())
        multiply = jax.jit(lambda x: (x @ x).sum())
        x, record = jax.numpy.ones((512, 512)), jax.profiler.trace
        run: Callable[[], Any] = lambda: multiply(x).block_until_ready()  # noqa: E731
    else:
        import tensorflow as tf

        answer.fact(
            tensorflow=tf.__version__,
            devices=[d.name for d in tf.config.list_logical_devices()],
            details=[
                tf.config.experimental.get_device_details(d)
                for d in tf.config.list_physical_devices("GPU")
            ],
        )
        x, record = tf.ones((512, 512)), _tensorflow_trace
        run = lambda: tf.reduce_sum(x @ x).numpy()  # noqa: E731
    run()
    answer.fact(statistics={k: mib(v) for k, v in statistics().items()} or "none")
    folder = options["folder"]
    with record(folder):
        for _ in range(3):
            run()
    for path in sorted(Path(folder).rglob("*.xplane.pb")):
        _planes(path, answer)


def _tensorflow_trace(folder: str) -> Any:
    import tensorflow as tf

    levels = tf.profiler.experimental.ProfilerOptions(
        host_tracer_level=3, python_tracer_level=0, device_tracer_level=1
    )
    return tf.profiler.experimental.Profile(folder, levels)


def _planes(path: Path, answer: Answer) -> None:
    """The planes of a profile: a GPU's are there only where CUPTI may be used."""
    if ON_JAX:
        import jax

        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            answer.row(plane=plane.name, events=sum(len(list(line.events)) for line in plane.lines))
        return
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace.FromString(path.read_bytes())
    answer.fact(profile=path.name, errors=list(space.errors))
    for plane in space.planes:
        answer.row(plane=plane.name, events=sum(len(line.events) for line in plane.lines))


def compile_seconds(options: dict[str, Any], answer: Answer) -> None:
    """Seconds to compile Keras's own step, choosing kernels by trying and not, and what it says it
    takes."""
    import jax

    model = build(options)
    data = samples(options, BATCH)
    model.train_on_batch(*data)  # builds it
    model.jax_state_sync()
    state = tuple(
        [v.value for v in group]
        for group in (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
            model.metrics_variables,
        )
    )
    platform_options = [{}, {"xla_gpu_autotune_level": 0}] if not on_cpu() else [{}]
    for compiler_options in platform_options:
        jax.clear_caches()
        lowered = jax.jit(model.train_step, donate_argnums=0).lower(state, data)
        started = time.perf_counter()
        compiled = lowered.compile(compiler_options=compiler_options or None)
        taken = compiled.memory_analysis()
        answer.row(
            options=compiler_options or "default",
            seconds=round(time.perf_counter() - started, 2),
            temp_mib=mib(taken.temp_size_in_bytes),
            peak_in_use_mib=mib(statistics().get("peak", 0)),
        )


def analysis(options: dict[str, Any], answer: Answer) -> None:
    """What the compiler says a step takes against what the allocator saw, for one schedule: the
    allocator's peak cannot be reset, so every schedule has a process."""
    model = build(options)
    batch = samples(options, BATCH)
    plan = None
    if options["share"] < 1:
        plan = keras_remat.make_plan(model, batch, _limit(model, batch, options["share"]))
    before = statistics().get("peak", 0)
    remat = keras_remat.RematAutotune(None, "keep", plan=plan, margin=0.0, verbose=0)
    watch, said = trained(model, repeated(batch, STEPS), remat)
    measured = remat.report.baseline if plan is None else remat.plan.measured
    answer.row(
        schedule="plain" if plan is None else f"plan at {options['share']}",
        said_mib=mib(plan.predicted.peak_bytes) if plan else "",
        measured_mib=mib(measured.peak_bytes),
        allocator_before_mib=mib(before),
        allocator_peak_mib=mib(watch.peaks[-1]) if watch.peaks[-1] else "no statistics",
        step_s=median(watch.times_s[2:]),
        last_loss=watch.losses[-1],
        warnings=said,
    )


def _limit(model: keras.Model, batch: Any, share: float) -> int:
    """What a plan without recomputation needs at rest, and a share of what it adds."""
    plan = keras_remat.make_plan(model, batch, 2**45, profile="estimated", solver="store_all")
    resident = plan.problem.profile.resident_bytes
    return int(resident + share * (plan.store_all.peak_bytes - resident))


def steps(options: dict[str, Any], answer: Answer) -> None:
    """Plain ``fit`` against ``fit`` under limits: peaks of the first calls, predicted and measured
    peaks, times, losses."""
    data = repeated(samples(options, BATCH), 4 * STEPS)
    plain, _ = trained(build(options, options["jit"]), data)
    answer.fact(
        plain_peaks_mib={f"call {n}": mib(plain.peaks[n - 1]) for n in TOLD},
        plain_step_s=median(plain.times_s[2:]),
    )
    again, _ = trained(build(options, options["jit"]), data)
    answer.fact(losses_of_plain_twice_differ_by=difference(plain.losses, again.losses))
    measured = keras_remat.RematAutotune(None, "keep", verbose=0)
    trained(build(options, options["jit"]), data, measured)
    baseline = measured.report.baseline
    if baseline is None:
        answer.fact(baseline=[e.message for e in measured.report.events])
        return
    resident = statistics().get("current", 0)
    for share in (0.7, 0.5):
        model = build(options, options["jit"])
        limit = int(resident + share * (baseline.peak_bytes - resident))
        seconds = 4.0 if options["stand_in"] else 20.0
        remat = keras_remat.RematAutotune(
            limit, "keep", margin=0.0, verbose=0, solver_time_limit_s=seconds
        )
        row: dict[str, Any] = {"share": share, "limit_mib": mib(limit)}
        try:
            watch, said = trained(model, data, remat)
        except keras_remat.RematError as error:
            answer.row(**row, outcome=f"{type(error).__name__}: {error}"[:_TEXT])
            continue
        plan = remat.plan
        if plan is None or plan.measured is None:
            answer.row(**row, outcome=[event.kind for event in remat.report.events])
            continue
        answer.row(
            **row,
            predicted_mib=mib(plan.predicted.peak_bytes),
            measured_mib=mib(plan.measured.peak_bytes),
            settled_step_s=median(watch.times_s[-3:]),
            op_times=plan.profile_source,
            predicted_step_s=plan.predicted.time_s,
            loss_difference=difference(plain.losses, watch.losses),
            events=[event.kind for event in remat.report.events],
            warnings=said,
        )


def allocator(options: dict[str, Any], answer: Answer) -> None:
    """What TensorFlow's allocator makes of a sequence of requests: rounding, whole chunks, and what
    a request that does not fit between others takes."""
    import tensorflow as tf

    device = "/CPU:0" if on_cpu() else "/GPU:0"
    share = options["memory_bytes"] // 64
    held: list[Any] = []
    with tf.device(device):
        tf.raw_ops.Empty(shape=[share], dtype=tf.uint8)
        for name, nbytes in (
            ("odd", share + 13), ("small", 1000), ("large", 8 * share), ("half of it", 4 * share),
        ):  # fmt: skip
            before = statistics()["current"]
            held.append(tf.raw_ops.Empty(shape=[nbytes], dtype=tf.uint8))
            taken = statistics()["current"] - before
            answer.row(request=name, requested_bytes=nbytes, taken_bytes=taken)
        del held[2]  # a hole of 8 shares
        before = statistics()["current"]
        held.append(tf.raw_ops.Empty(shape=[5 * share], dtype=tf.uint8))
        taken = statistics()["current"] - before
        answer.row(request="into a hole of 8/5", requested_bytes=5 * share, taken_bytes=taken)


def out_of_memory(options: dict[str, Any], answer: Answer) -> None:
    """Every way to run out of memory: class, text, seconds, whether it is recognized, and whether
    the state comes back bit for bit."""
    from keras_remat.backends.base import load_backend
    from keras_remat.training.undo import OutOfMemory, StepGuard

    if ON_JAX and on_cpu():
        answer.skipped("JAX's CPU allocator has no limit")
        return
    backend, model = load_backend(), build(options)
    model.fit(*samples(options, BATCH), batch_size=BATCH, verbose=0)
    too_many = math.ceil(options["memory_bytes"] / (16 * (4 if options["stand_in"] else 64) * 1024))
    data = samples(options, 1)
    many = tuple(keras.ops.convert_to_tensor(np.repeat(p, too_many, axis=0)) for p in data)
    host = np.zeros(options["memory_bytes"] + MIB, "uint8")

    def device_array() -> Any:
        return keras.ops.zeros((options["memory_bytes"] // 2,), "float32")

    faces = {
        "one array": device_array,
        "a copy from the host": lambda: keras.ops.convert_to_tensor(host) + 1,
        f"a step of {too_many} samples": lambda: model.train_on_batch(*many),
    }
    if on_cpu():  # where host memory ends, TensorFlow's copy of an array is a segmentation fault
        del faces["a copy from the host"]
    guard = StepGuard(model, backend)
    for name, provoke in faces.items():
        before = [v.numpy() for v in model.variables]
        started = time.perf_counter()
        outcome: dict[str, Any] = {"error": "none", "recognized": ""}
        try:
            attempt, _ = guard.attempt(lambda _, provoke=provoke: provoke(), None, guarded=True)
            error = attempt.cause if isinstance(attempt, OutOfMemory) else None
        except Exception as raised:  # whatever it is, is what was asked
            error = raised
        if error is not None:
            outcome = {
                "error": type(error).__name__,
                "text": str(error)[:_TEXT],
                "recognized": backend.is_out_of_memory(error),
            }
        del error
        seconds = time.perf_counter() - started
        gc.collect()
        same = all(
            np.array_equal(v.numpy(), old) for v, old in zip(model.variables, before, strict=True)
        )
        answer.row(face=name, seconds=round(seconds, 2), state_bit_for_bit=same, **outcome)


def promise(options: dict[str, Any], answer: Answer) -> None:
    """The largest batch, found without training and inside ``fit``: it trains, 5 % above does not,
    and what it is worth against plain Keras's best batch."""
    size, limit = BATCH // 4, options["memory_bytes"]
    if options["stand_in"]:  # its device is the machine, whose memory is no card's
        limit //= 8
    model = build(options)
    batch = samples(options, size)
    started = time.perf_counter()
    search = keras_remat.find_max_batch_size(model, batch, limit, time_limit_s=60.0)
    answer.fact(
        limit_mib=mib(limit),
        plain_batch=search.plain_batch_size,
        largest_batch=search.max_batch_size,
        search_s=round(time.perf_counter() - started, 1),
    )
    for name, count in (
        ("plain", search.plain_batch_size),
        ("largest", search.max_batch_size),
        ("5 % above", math.ceil(1.05 * search.max_batch_size)),
    ):
        remat = None if name == "plain" else keras_remat.RematAutotune(limit, "keep", verbose=0)
        _promised(options, answer, name, count, remat)


def untouched(options: dict[str, Any], answer: Answer) -> None:
    """``RematAutotune()`` without an argument in a fit of small batches, and the same fit plain."""
    size, steps = BATCH // 4, 120 if options["stand_in"] else 400
    _promised(options, answer, "plain", size, None, steps)
    asked = options["memory_bytes"] // 8 if options["stand_in"] else None
    remat = keras_remat.RematAutotune(asked, verbose=0)
    try:
        _promised(options, answer, "RematAutotune()", size, remat, steps)
    finally:
        answer.fact(events=[event.message for event in remat.report.events])
        answer.fact(plan=str(remat.plan), setup_s=remat.report.setup_s)


def _promised(
    options: dict[str, Any],
    answer: Answer,
    name: str,
    size: int,
    remat: Any,
    steps: int = 2 * STEPS,
) -> None:
    model, data = build(options), repeated(samples(options, size), steps)
    row: dict[str, Any] = {"run": name, "batch": size}
    try:
        watch, said = trained(model, data, remat, epochs=2)
    except Exception as error:  # a failure is an outcome, and the next run goes on
        answer.row(**row, outcome=f"{type(error).__name__}: {error}"[:_TEXT])
        return
    row |= {"outcome": "trained", "highest_peak_mib": mib(max(watch.peaks))}
    if remat is None or not remat.report.epochs:
        answer.row(**row, samples_per_s=size / median(watch.times_s[2:]))
        return
    last = remat.report.epochs[-1]
    answer.row(
        **row | {"batch": last.batch_size},
        epoch_peak_mib=mib(last.peak_bytes),
        samples_per_s=last.samples_per_s,
        warnings=said,
    )


CASES = (
    environment, compile_seconds, analysis, steps, allocator, out_of_memory, promise, untouched
)  # fmt: skip


def main(path: str, cases: tuple[Callable[[dict[str, Any], Answer], None], ...] = CASES) -> int:
    """Runs the one of some cases that the options name."""
    options = json.loads(Path(path).read_text())
    answer = Answer(options["answer"])
    cap(options)
    try:
        {case.__name__: case for case in cases}[options["case"]](options, answer)
    except Exception as error:  # what was found before counts, and the reason with it
        traceback.print_exc()
        answer.fact(error=f"{type(error).__name__}: {error}"[:_TEXT])
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
