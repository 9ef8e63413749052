"""One model of ``cards.py`` on one card: its rows, each printed as soon as it is known.

A step is traced, compiled without a schedule, and planned for shares of what that needs. No step
runs, so the batch is shapes and the weights are zeros.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
from keras import layers
from rows import version_of

from keras_remat.backends.base import load_backends
from keras_remat.backends.memory import MemoryModel
from keras_remat.backends.xla.card_compiler import CardCompiler, CardStep
from keras_remat.backends.xla.compiled_memory import CompiledMemory
from keras_remat.backends.xla.module_costs import costs
from keras_remat.backends.xla.ways import Written
from keras_remat.cards.process import initialize_with_zeros
from keras_remat.cards.table import card
from keras_remat.core.limit import Limit
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate
from keras_remat.core.writing import Writing
from keras_remat.errors import InfeasibleBudgetError, RematError
from keras_remat.planning.request import PlanRequest, plan_for

PIXELS, TOKENS, WORDS = 64, 256, 4000


def _application(name: str) -> Any:
    return getattr(keras.applications, name)(
        weights=None, classes=10, input_shape=(PIXELS, PIXELS, 3)
    )


def unet() -> Any:
    """Three levels of two convolutions with batch normalization, and skip connections."""

    def convolutions(x: Any, filters: int) -> Any:
        for _ in range(2):
            x = layers.Conv2D(filters, 3, padding="same")(x)
            x = layers.ReLU()(layers.BatchNormalization()(x))
        return x

    inputs = x = keras.Input((96, 96, 3))
    kept = []
    for filters in (32, 64, 128):
        x = convolutions(x, filters)
        kept.append(x)
        x = layers.MaxPooling2D()(x)
    x = convolutions(x, 256)
    for filters in (128, 64, 32):
        x = convolutions(layers.Concatenate()([layers.UpSampling2D()(x), kept.pop()]), filters)
    return keras.Model(inputs, layers.Conv2D(1, 1, activation="sigmoid")(x))


def _block(x: Any, heads: int, width: int, *, causal: bool = False, dropout: float = 0.0) -> Any:
    """A pre-norm transformer block."""
    y = layers.LayerNormalization()(x)
    y = layers.MultiHeadAttention(heads, width // heads)(y, y, use_causal_mask=causal)
    x = x + (layers.Dropout(dropout)(y) if dropout else y)
    y = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x))
    y = layers.Dense(width)(y)
    return x + (layers.Dropout(dropout)(y) if dropout else y)


class Positions(layers.Layer):
    """Adds a vector that is learned for every position."""

    def __init__(self, width: int):
        super().__init__()
        self.table = layers.Embedding(TOKENS, width)

    def call(self, x: Any) -> Any:
        return x + self.table(keras.ops.arange(TOKENS))


def _embedded(inputs: Any, width: int) -> Any:
    return Positions(width)(layers.Embedding(WORDS, width)(inputs))


def gpt() -> Any:
    """Twelve causal blocks that predict the next word."""
    inputs = keras.Input((TOKENS,), dtype="int32")
    x = _embedded(inputs, 256)
    for _ in range(12):
        x = _block(x, 4, 256, causal=True)
    return keras.Model(inputs, layers.Dense(WORDS)(layers.LayerNormalization()(x)))


def bert() -> Any:
    """Six blocks with dropout, and a head of ten classes."""
    inputs = keras.Input((TOKENS,), dtype="int32")
    x = layers.Dropout(0.1)(_embedded(inputs, 256))
    for _ in range(6):
        x = _block(x, 4, 256, dropout=0.1)
    return keras.Model(inputs, layers.Dense(10)(x[:, 0]))


def vit() -> Any:
    """Six blocks on patches of eight pixels."""
    inputs = keras.Input((128, 128, 3))
    x = layers.Reshape((256, 256))(layers.Conv2D(256, 8, 8)(inputs))
    for _ in range(6):
        x = _block(x, 4, 256)
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


def lstm() -> Any:
    """Two recurrent layers, loops on every card, and a dense block on every position."""
    inputs = keras.Input((128,), dtype="int32")
    x = layers.LSTM(256, return_sequences=True, use_cudnn=False)(
        layers.Embedding(WORDS, 256)(inputs)
    )
    x = layers.LayerNormalization()(layers.Dense(1024, activation="gelu")(x))
    x = layers.LSTM(256, use_cudnn=False)(layers.Dense(256)(x))
    return keras.Model(inputs, layers.Dense(10)(x))


class Sampled(layers.Layer):
    """A normal sample of mean and logarithm of variance, with its divergence as a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.seed = keras.random.SeedGenerator(1)

    def call(self, mean: Any, log_variance: Any) -> Any:
        ops = keras.ops
        terms = 1 + log_variance - ops.square(mean) - ops.exp(log_variance)
        self.add_loss(-0.5 * ops.mean(ops.sum(terms, axis=1)))
        noise = keras.random.normal(ops.shape(mean), seed=self.seed)
        return mean + ops.exp(0.5 * log_variance) * noise


def vae() -> Any:
    """A convolutional variational autoencoder."""
    relu = {"padding": "same", "activation": "relu"}
    inputs = x = keras.Input((PIXELS, PIXELS, 3))
    for filters in (32, 64):
        x = layers.Conv2D(filters, 3, 2, **relu)(layers.Conv2D(filters, 3, **relu)(x))
    x = layers.Flatten()(x)
    x = Sampled()(layers.Dense(16)(x), layers.Dense(16)(x))
    x = layers.Reshape((16, 16, 64))(layers.Dense(16 * 16 * 64, activation="relu")(x))
    for filters in (64, 32):
        x = layers.Conv2DTranspose(filters, 3, 2, **relu)(layers.Conv2D(filters, 3, **relu)(x))
    return keras.Model(inputs, layers.Conv2D(3, 3, padding="same", activation="sigmoid")(x))


def residual() -> Any:
    """Eight residual blocks of two convolutions, in two sizes."""
    inputs = keras.Input((PIXELS, PIXELS, 3))
    x = layers.Conv2D(32, 3, padding="same")(inputs)
    for filters, strides in ((32, 1), (32, 1), (32, 1), (64, 2), (64, 1), (64, 1), (64, 1)):
        y = layers.Conv2D(filters, 3, strides, padding="same", use_bias=False)(x)
        y = layers.ReLU()(layers.BatchNormalization()(y))
        y = layers.Conv2D(filters, 3, padding="same", use_bias=False)(y)
        y = layers.BatchNormalization()(y)
        x = x if strides == 1 else layers.Conv2D(filters, 1, strides)(x)
        x = layers.ReLU()(x + y)
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


def inverted() -> Any:
    """Six inverted residual blocks with depthwise convolutions, in two sizes."""
    inputs = keras.Input((PIXELS, PIXELS, 3))
    x = layers.Conv2D(16, 3, 2, padding="same")(inputs)
    for filters, strides in ((16, 1), (16, 1), (24, 2), (24, 1), (24, 1), (24, 1)):
        y = layers.Conv2D(6 * x.shape[-1], 1, use_bias=False)(x)
        y = layers.ReLU(6.0)(layers.BatchNormalization()(y))
        y = layers.DepthwiseConv2D(3, strides, padding="same", use_bias=False)(y)
        y = layers.ReLU(6.0)(layers.BatchNormalization()(y))
        y = layers.BatchNormalization()(layers.Conv2D(filters, 1, use_bias=False)(y))
        x = x + y if x.shape == y.shape else y
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


#: Builder or name in ``keras.applications``, loss and batch size. The order is that of the table.
MODELS: dict[str, tuple[Any, str, int]] = {
    "gpt": (gpt, "words", 16),
    "bert": (bert, "classes", 32),
    "vit": (vit, "classes", 32),
    "MobileNetV2": ("MobileNetV2", "probabilities", 128),
    "ResNet50": ("ResNet50", "probabilities", 64),
    "unet": (unet, "binary_crossentropy", 16),
    "lstm": (lstm, "classes", 64),
    "vae": (vae, "binary_crossentropy", 64),
    "VGG16": ("VGG16", "probabilities", 64),
    "ConvNeXtTiny": ("ConvNeXtTiny", "probabilities", 64),
    "EfficientNetB0": ("EfficientNetB0", "probabilities", 64),
    "DenseNet121": ("DenseNet121", "probabilities", 64),
    "residual": (residual, "classes", 64),
    "inverted": (inverted, "classes", 64),
}


def compiled_model(name: str) -> tuple[Any, int]:
    """Returns a compiled model and its batch size."""
    make, loss, batch_size = MODELS[name]
    model = _application(make) if isinstance(make, str) else make()
    logits = loss in ("words", "classes")
    if logits or loss == "probabilities":
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=logits)
    model.compile("adam", loss)
    return model, batch_size


@dataclass(frozen=True)
class CompiledStep:
    """Says what compiling told of one schedule.

    Args:
        added_bytes: what it adds to the resident ones.
        time_s: by the card's roofline, counted from the module.
        modules: how many were compiled until one kept to the limit.
    """

    added_bytes: int
    time_s: float
    modules: int = 1


#: Compiles a schedule of a step, or Keras's own.
Compile = Callable[[Problem, Schedule | None], CompiledStep]


def compile_of(traced: Any) -> Compile:
    """Returns what compiles schedules of a step."""

    def told(step: CardStep, modules: int = 1) -> CompiledStep:
        time_s = costs(step.as_text(), traced.target.rates).time_s
        return CompiledStep(step.added_bytes, time_s, modules)

    known: dict[Schedule, Written] = {}
    if keras.backend.backend() == "jax":
        from keras_remat.backends.jax import lower as lowering

        def on_jax(problem: Problem, schedule: Schedule | None) -> CompiledStep:
            if schedule is None:
                return told(lowering.lower_plain(traced))
            room, written = problem.room_bytes, known.get(schedule)
            known[schedule] = written = lowering.lower_within(traced, schedule, room, written)
            return told(written.step, len(written.ways))

        return on_jax
    from keras_remat.backends.tensorflow import private
    from keras_remat.backends.tensorflow.compiled.lower import LoweredStep, ways_of

    compiler = CardCompiler()

    def on_tensorflow(problem: Problem, schedule: Schedule | None) -> CompiledStep:
        def compiled(step: Any) -> CardStep:
            return compiler.compiled(private.serialized_hlo(step.function), traced.target)

        def write(writing: Writing) -> Written:
            step = compiled(LoweredStep(traced, schedule, writing=writing))
            return Written(step, step.added_bytes, writing)

        if schedule is None:
            return told(compiled(traced))
        room, before = problem.room_bytes, known.get(schedule)
        known[schedule] = written = ways_of(traced).within(schedule, write, room, before)
        return told(written.step, len(written.ways))

    return on_tensorflow


@dataclass
class Compiler:
    """Compiles schedules of one step, and remembers.

    Args:
        compile_step: see :func:`compile_of`.
        plain: Keras's own step; compiled once.
        memory: is asked for its prediction before a schedule is compiled.
        predicted: bytes above the resident ones of what was compiled, in order.
        compiled: what was, in order.
    """

    compile_step: Compile
    plain: CompiledStep
    memory: MemoryModel | None = None
    predicted: list[int] = field(default_factory=list)
    compiled: dict[Schedule, CompiledStep] = field(default_factory=dict)

    def __call__(self, problem: Problem, schedule: Schedule | None) -> int:
        if schedule is None:
            return self.plain.added_bytes
        resident = problem.profile.resident_bytes
        self.predicted.append(self._predicted_peak_bytes(problem, schedule) - resident)
        self.compiled[schedule] = self.compile_step(problem, schedule)
        return self.compiled[schedule].added_bytes

    def time_s(self, problem: Problem, schedule: Schedule | None) -> float:
        """Returns the seconds of what was compiled, by the card's roofline."""
        return (self.plain if schedule is None else self.compiled[schedule]).time_s

    def _predicted_peak_bytes(self, problem: Problem, schedule: Schedule) -> int:
        """Returns what was expected of a schedule; the memory model's word for one that runs no op
        again is of Keras's own step, which is not what is compiled here."""
        if schedule == Schedule.store_all(problem.graph):
            return simulate(problem, schedule).peak_bytes
        assert self.memory is not None
        return self.memory.peak_bytes(problem, schedule)

    def told(self, problem: Problem) -> dict[str, Any]:
        """Returns what a row says of the schedules of one limit.

        Args:
            problem: with that limit. The first schedule is compiled for it, where it was not.
        """
        steps = list(self.compiled.values())
        first = [self.compile_step(problem, schedule) for schedule in [*self.compiled][:1]]
        return {
            "predicted_bytes": (self.predicted or [None])[0],
            "compiled_bytes": first[0].added_bytes if first else None,
            "least_bytes": min((step.added_bytes for step in steps), default=None),
            "compilations": len(steps),
            "modules": sum(step.modules for step in steps),
        }


def rows(name: str, card_name: str, policy: str, shares: list[float], seconds: float) -> Any:
    """Yields one row for each share of what the plain step adds to the resident bytes."""
    initialize_with_zeros()
    keras.config.set_dtype_policy(policy)
    model, batch_size = compiled_model(name)
    (backend,) = load_backends(model, "compiled", card(card_name))
    backend.check(model)
    batch = backend.example_batch(model, batch_size)
    traced = backend.trace(model, batch)
    problem = Problem(traced.graph, backend.estimated_profile(traced), name=name)
    resident = problem.profile.resident_bytes
    compile_step = compile_of(traced)
    plain = compile_step(problem, None)
    store_all = simulate(problem, Schedule.store_all(problem.graph)).peak_bytes - resident
    known = {
        "name": name,
        "card": card_name,
        "framework": keras.backend.backend(),
        "policy": policy,
        "batch_size": batch_size,
        "ops": len(problem.graph.ops),
        "resident_bytes": resident,
        "plain_bytes": plain.added_bytes,
        "store_all_bytes": store_all,
        "floor_bytes": problem.floor_bytes - resident,
    }
    for share in shares:
        started, started_cpu = time.perf_counter(), time.process_time()
        compiler = Compiler(compile_step, plain)
        compiler.memory = CompiledMemory(
            compiler, on_gpu=True, rewrites=True, compiled_time_s=compiler.time_s
        )
        limit = int(share * plain.added_bytes)
        row = known | {"at": share, "limit_bytes": limit}
        try:
            plan = plan_for(
                PlanRequest(
                    problem=problem,
                    batch_size=batch_size,
                    limit=Limit(resident + limit),
                    memory=compiler.memory,
                    auto_solver=backend.auto_solver,
                    seconds=seconds,
                )
            )
        except InfeasibleBudgetError:
            row["status"] = "below the floor"
        except RematError:
            row["status"] = "not found"
        else:
            row |= {
                "status": "kept",
                "overhead": plan.predicted.time_s / problem.store_all_time_s - 1,
                "kept_bytes": plan.predicted.peak_bytes - resident,
                "time": compiler.compiled.get(plan.solution.schedule, plain).time_s / plain.time_s,
            }
        yield (
            row
            | compiler.told(problem.with_budget(resident + limit))
            | {
                "taken": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
                "jax": version_of("jax"),
                "seconds": round(time.perf_counter() - started, 1),
                "cpu_s": round(time.process_time() - started_cpu, 1),
            }
        )


def main() -> None:
    """Prints a JSON object for every row."""
    for row in rows(**json.loads(sys.argv[1])):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
