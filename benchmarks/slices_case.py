"""One part of the slices benchmark, measured in a process of its own.

``python slices_case.py OPTIONS`` prints the result; both are JSON, for :mod:`slices`.

* ``"batch"``: how large a batch trains, with the numbers of the whole batch, in what plain ``fit``
  takes for a small one. The batch is doubled until it does not train within that. Then the largest
  trains beside plain ``fit`` of the same batch, which takes what it wants, and beside gradient
  accumulation of the small one.
* ``"floor"``: how far below the floor of whole ops a step trains: the least of some shares of it
  for which there is a plan in slices.
* ``"card"``: what a step takes, planned and compiled for an H100 at a share of its plain bytes.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import models
import numpy as np
from keras import layers
from rows import MIB, difference
from watch import StepWatch, statistics

import keras_remat
from keras_remat.backends.base import load_backend
from keras_remat.backends.tensorflow import private

#: The small batch, whose plain step says what a larger one may take.
SMALL_BATCH = 8
#: Steps that are not timed: a plan is found, recorded and made again in them.
_UNTIMED = 8

Data = tuple[np.ndarray, np.ndarray]


def _images(pixels: int, samples: int, classes: int = 10) -> Data:
    rng = np.random.default_rng(0)
    return rng.random((samples, pixels, pixels, 3), "float32"), rng.integers(0, classes, samples)


def _application(name: str, pixels: int) -> keras.Model:
    model: keras.Model = getattr(keras.applications, name)(
        weights=None, input_shape=(pixels, pixels, 3), classes=10
    )
    model.compile(keras.optimizers.SGD(1e-3, 0.9), "sparse_categorical_crossentropy")
    return model


def _vgg16_pooled(pixels: int) -> keras.Model:
    """VGG16's convolutions. Its dense layers have 152 million weights at 256 px: with their slots
    they are resident, and take more than half of its floor."""
    body = keras.applications.VGG16(
        weights=None, include_top=False, input_shape=(pixels, pixels, 3)
    )
    pooled = layers.GlobalAveragePooling2D()(body.output)
    model = keras.Model(body.input, layers.Dense(10, activation="softmax")(pooled))
    model.compile(keras.optimizers.SGD(1e-3, 0.9), "sparse_categorical_crossentropy")
    return model


def _unet(pixels: int) -> keras.Model:
    model = models.build_unet(pixels)
    model.compile(keras.optimizers.SGD(1e-3, 0.9), "binary_crossentropy")
    return model


def _masks(pixels: int, samples: int) -> Data:
    rng = np.random.default_rng(0)
    shape = (samples, pixels, pixels)
    return rng.random((*shape, 3), "float32"), rng.integers(0, 2, (*shape, 1)).astype("float32")


def _head(vocabulary: int) -> keras.Model:
    """A language model of which all is small but the vocabulary."""
    inputs = keras.Input((32,), dtype="int32")
    x = layers.LayerNormalization()(layers.Embedding(1000, 64)(inputs))
    model = keras.Model(inputs, layers.Dense(vocabulary)(x))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def _tokens(vocabulary: int, samples: int) -> Data:
    rng = np.random.default_rng(0)
    shape = (samples, 32)
    return rng.integers(0, 1000, shape).astype("int32"), rng.integers(0, vocabulary, shape)


def _contrastive(pixels: int) -> keras.Model:
    """Pairs of images, whose embeddings are to be nearer to each other than to any other's."""

    def loss(_: Any, pairs: Any) -> Any:
        one, other = keras.ops.split(pairs, 2, axis=-1)
        logits = keras.ops.matmul(one, keras.ops.transpose(other)) / 0.1
        own = keras.ops.arange(keras.ops.shape(logits)[0])
        return keras.losses.sparse_categorical_crossentropy(own, logits, from_logits=True)

    inputs = keras.Input((pixels, pixels, 6))
    body = x = keras.Input((pixels, pixels, 3))
    for filters in (32, 64):
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        x = layers.MaxPooling2D()(layers.ReLU()(layers.BatchNormalization()(x)))
    embedding = layers.UnitNormalization()(layers.Dense(32)(layers.GlobalAveragePooling2D()(x)))
    tower = keras.Model(body, embedding)
    pairs = layers.Concatenate()([tower(inputs[..., :3]), tower(inputs[..., 3:])])
    model = keras.Model(inputs, pairs)
    model.compile("adam", loss)
    return model


def _pairs(pixels: int, samples: int) -> Data:
    rng = np.random.default_rng(0)
    return rng.random((samples, pixels, pixels, 6), "float32"), np.zeros((samples, 1), "float32")


def _convlstm(pixels: int) -> keras.Model:
    inputs = keras.Input((8, pixels, pixels, 1))
    x = layers.ConvLSTM2D(16, 3, padding="same", return_sequences=True)(inputs)
    model = keras.Model(inputs, layers.Conv3D(1, 3, padding="same")(x))
    model.compile("adam", "mse")
    return model


def _films(pixels: int, samples: int) -> Data:
    film = np.random.default_rng(0).random((samples, 8, pixels, pixels, 1), "float32")
    return film, film


def _gru(length: int) -> keras.Model:
    inputs = keras.Input((length, 32))
    x = layers.GRU(64, return_sequences=True)(inputs)
    x = layers.MultiHeadAttention(2, 32)(x, x)
    model = keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(x)))
    model.compile("adam", "mse")
    return model


def _series(length: int, samples: int) -> Data:
    rng = np.random.default_rng(0)
    return rng.random((samples, length, 32), "float32"), rng.random((samples, 1), "float32")


#: name → what builds it and its data, both by a size: pixels, words or a length.
MODELS: dict[str, tuple[Callable[[int], keras.Model], Callable[[int, int], Data]]] = {
    "resnet50": (lambda size: _application("ResNet50", size), _images),
    "vgg16": (lambda size: _application("VGG16", size), _images),
    "vgg16_pooled": (_vgg16_pooled, _images),
    "mobilenet": (lambda size: _application("MobileNetV2", size), _images),
    "unet": (_unet, _masks),
    "head": (_head, _tokens),
    "contrastive": (_contrastive, _pairs),
    "convlstm": (_convlstm, _films),
    "gru": (_gru, _series),
}


class Bench:
    """Trains one model in several ways, each from the same weights on the same samples."""

    def __init__(self, options: dict[str, Any]):
        self.options = options
        self.size, self.steps = options["size"], options["steps"]
        self._build, self._data = MODELS[options["model"]]

    def model(self) -> keras.Model:
        """Returns the model with its first weights."""
        keras.backend.clear_session()
        gc.collect()
        keras.utils.set_random_seed(0)
        return self._build(self.size)

    def data(self, samples: int) -> Data:
        """Returns as many samples."""
        return self._data(self.size, samples)

    def fit(
        self,
        batch_size: int,
        steps: int,
        *callbacks: Any,
        of: int = 1,
        model: keras.Model | None = None,
    ) -> StepWatch:
        """Trains one epoch a step, of the same samples: what Keras holds of the data is one batch.

        Args:
            of: how many batches make a step.
        """
        model, watch = model or self.model(), StepWatch()
        x, y = self.data(of * batch_size)
        model.fit(
            x, y, batch_size=batch_size, epochs=steps, shuffle=False, verbose=0,
            callbacks=[*callbacks, watch],
        )  # fmt: skip
        watch.set_model(None)  # it would live on
        return watch

    def remat(self, limit: int, **more: Any) -> keras_remat.RematAutotune:
        """Returns the callback that keeps a limit."""
        return keras_remat.RematAutotune(
            limit, "keep", compilation="ordered", margin=0.0, verbose=0, profile_steps=2,
            solver_time_limit_s=self.options["solve_s"], **more,
        )  # fmt: skip

    # ---------------------------------------------------------------- batches

    def batch(self) -> dict[str, Any]:
        """Returns the row of the largest batch within what the small one takes plainly."""
        small = self.fit(SMALL_BATCH, 3)
        limit = max(small.peaks)
        row: dict[str, Any] = {"small_peak": limit}
        best: keras_remat.RematAutotune | None = None
        size = self.options["first"]
        while size <= self.options["most"]:
            found = self._trained(size, limit)
            if found is None:
                break
            best, largest, size = found, size, 2 * size
        if best is None:
            return row
        plan = best.plan
        row |= {
            "batch_size": largest,
            "parts": plan.slicing.parts if plan.slicing else 1,
            "ops": len(plan.problem.graph.ops) if plan.problem else 0,
            "overhead": plan.overhead,
        }
        ours = self.fit(largest, self.steps, best := self.remat(limit, plan=plan))
        plain = self.fit(largest, self.steps)
        row |= {"peak": max(ours.peaks[2:]), "plain_peak": max(plain.peaks)}
        row |= {"kept": best.plan is not None and row["peak"] <= limit}
        row |= {"difference": difference(ours.losses, plain.losses)}
        row |= {"samples_per_s": largest / median(ours.times_s[2:])}
        row |= {"plain_samples_per_s": largest / median(plain.times_s[2:])}
        return row | self._accumulated(largest, plain.losses)

    def _trained(self, size: int, limit: int) -> keras_remat.RematAutotune | None:
        """Returns the callback of a short ``fit``; ``None`` where none keeps to the limit."""
        for count in (None, min(64, size // SMALL_BATCH)):
            remat = self.remat(limit, micro_batches=count)
            try:
                watch = self.fit(size, _UNTIMED, remat)
            except keras_remat.RematError as error:
                print(f"{size}: {error}", file=sys.stderr)
                continue
            kinds = {str(event.kind) for event in remat.report.events}
            exact = "micro-batches" not in kinds
            if remat.plan and exact and max(watch.peaks[-2:]) <= limit:
                return remat
        return None

    def _accumulated(self, size: int, losses: list[float]) -> dict[str, Any]:
        """Returns what gradient accumulation of the small batch gives."""
        count = size // SMALL_BATCH
        model = self.model()
        of_plain = model.optimizer.get_config() | {"gradient_accumulation_steps": count}
        model.compile(type(model.optimizer).from_config(of_plain), model.loss)
        watch = self.fit(SMALL_BATCH, self.steps, of=count, model=model)
        own = watch.losses[count - 1 :: count]  # the mean over the epoch so far
        return {
            "accumulated_difference": difference(own, losses),
            "accumulated_samples_per_s": SMALL_BATCH / median(watch.times_s[2:]),
        }

    # ---------------------------------------------------------------- cards

    def card(self) -> dict[str, Any]:
        """Returns the row of a plan for a card, at a share of what the plain step takes there."""
        model, data = self.model(), self.data(self._batch_size)
        options = {"card": "H100", "solver_time_limit_s": self.options["solve_s"]}
        plain = keras_remat.make_plan(model, data, 2**40, **options).store_all.peak_bytes
        row: dict[str, Any] = {"plain_peak": plain}
        limit, began_s = round(self.options["aim"] * plain), time.perf_counter()
        try:
            plan = keras_remat.make_plan(model, data, limit, **options)
        except keras_remat.RematError as error:
            return row | {"refused": str(error).partition(". ")[0]}
        peak = (plan.compiled or plan.predicted).peak_bytes
        return row | {
            "share": peak / plain,
            "peak": peak,
            "overhead": plan.overhead,
            "parts": plan.slicing.parts if plan.slicing else 1,
            "planned_s": time.perf_counter() - began_s,
        }

    # ---------------------------------------------------------------- floors

    def floor(self) -> dict[str, Any]:
        """Returns the row of the least share of the floor that trains."""
        plain = self.fit(self._batch_size, self.steps)
        surplus, count = self._surplus()
        resident = plain.resident_bytes  # of one fit
        row: dict[str, Any] = {
            "floor": resident + surplus,
            "resident": resident,
            "plain_peak": max(plain.peaks),
            "ops": count,
        }
        for share in sorted(self.options["shares"], reverse=True):
            found = self._below(share, round(share * (resident + surplus)), plain.losses)
            row |= found
            if "refused" in found:
                break
        return row

    def _surplus(self) -> tuple[int, int]:
        """Returns the floor of whole ops less what is resident, and how many ops there are."""
        backend, model = load_backend(), self.model()
        traced = backend.trace(model, backend.example_batch(model, self.data(self._batch_size)))
        problem = keras_remat.Problem(traced.graph, backend.estimated_profile(traced))
        return problem.floor_bytes - problem.profile.resident_bytes, len(traced.graph.ops)

    @property
    def _batch_size(self) -> int:
        return int(self.options["batch_size"])

    def _below(self, share: float, limit: int, losses: list[float]) -> dict[str, Any]:
        """Returns what training under a limit shows, or why it is refused."""
        remat, began_s = self.remat(limit), time.perf_counter()
        try:
            watch = self.fit(self._batch_size, max(self.steps, _UNTIMED), remat)
        except keras_remat.RematError as error:
            return {"refused": f"{share}: {error}".partition(". ")[0]}
        plan, count = remat.plan, min(len(losses), len(watch.losses))
        if plan is None or plan.measured is None or plan.measured.peak_bytes > limit:
            told = f"{max(watch.peaks[-2:]) / MIB:.1f} MiB, over {limit / MIB:.1f}"
            return {"refused": f"{share}: measured {told}"}
        return {
            "share": share,
            "peak": plan.measured.peak_bytes,
            "overhead": plan.overhead,
            "parts": plan.slicing.parts if plan.slicing else 1,
            "difference": difference(watch.losses[:count], losses[:count]),
            "fit_s": time.perf_counter() - began_s,
        }


def main(text: str) -> int:
    """Measures what the options ask for and prints it."""
    options = json.loads(text)
    if options["part"] == "card":  # of which no step runs
        print(json.dumps(options | Bench(options).card()))
        return 0
    keras_remat.enable_cpu_memory_stats()
    bench = Bench(options)
    row = bench.batch() if options["part"] == "batch" else bench.floor()
    if not statistics():
        print("the allocator keeps no statistics", file=sys.stderr)
        return 1
    print(json.dumps(options | row | {"onednn": "on" if private.onednn_is_on() else "off"}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
