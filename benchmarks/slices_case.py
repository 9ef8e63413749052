"""One part of the slices benchmark, measured in a process of its own.

``python slices_case.py OPTIONS`` prints the result; both are JSON, for :mod:`slices`.

* ``"batch"``: how large a batch trains, with the numbers of the whole batch, in what plain ``fit``
  takes for a small one. The batch is doubled until it does not train within that. Then the largest
  trains beside plain ``fit`` of the same batch, which takes what it wants, and beside gradient
  accumulation of the small one.
* ``"floor"``: how far below the floor of whole ops a step trains: the least of some shares of it
  for which there is a plan in slices.
* ``"plain"``, ``"reversed"``, ``"within"``, ``"accumulated"``, ``"below"``: one ``fit`` of those
  two, in a process of its own: what Keras's functions hold of a model lives on, and would count in
  the next ``fit``. ``"reversed"`` is plain ``fit`` of the same batches with their samples in
  reverse order: its sums over the batch are added up in another order, as those of slices are.
* ``"bound"``: what slices of a batch add at the least within what plain ``fit`` takes for a small
  one (:mod:`slice_bounds`).
* ``"card"``: what a step takes, planned and compiled for an H100 at a share of its plain bytes.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import models
import numpy as np
import slice_bounds
from keras import layers
from rows import MIB, difference, row_of
from watch import StepWatch, statistics

import keras_remat
from keras_remat.backends.base import load_backend
from keras_remat.backends.tensorflow import private
from keras_remat.core.slices import SliceRule

#: The small batch, whose plain step says what a larger one may take.
SMALL_BATCH = 8
#: Steps that are not timed: a plan is found, recorded and made again in them.
_UNTIMED = 8
#: At how many moments a bound looks, and for how many seconds. ResNet50's batch of 512 adds 0.85,
#: 0.98 and 1.26 at the least by 24, 48 and 123, and takes 3, 7 and 33 s.
_CUTS, _BOUND_S = 123, 600.0

#: What fits under a limit tell.
_WITHIN = ("batch_size", "peak", "kept", "parts", "ops", "overhead", "samples_per_s")
_BELOW = ("refused", "peak", "overhead", "parts", "difference", "fit_s")

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


class _Batches(keras.utils.PyDataset):
    """Hands out the batches of some samples, in order; each begins with its last sample if
    ``is_reversed``."""

    def __init__(self, data: Data, batch_size: int, is_reversed: bool = False):
        super().__init__()
        self._data, self._batch_size = data, batch_size
        self._step = -1 if is_reversed else 1

    def __len__(self) -> int:
        return len(self._data[0]) // self._batch_size

    def __getitem__(self, index: int) -> Data:
        at = slice(index * self._batch_size, (index + 1) * self._batch_size)
        x, y = self._data
        return x[at][:: self._step], y[at][:: self._step]


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
        is_reversed: bool = False,
    ) -> StepWatch:
        """Trains one epoch a step, of the same samples. They are made batch by batch: of arrays
        Keras's input pipeline holds four copies in the device's memory, where a step runs.

        Args:
            of: how many batches make a step.
            is_reversed: whether the samples of a batch come in reverse order.
        """
        model, watch = model or self.model(), StepWatch()
        batches = _Batches(self.data(of * batch_size), batch_size, is_reversed)
        model.fit(batches, epochs=steps, shuffle=False, verbose=0, callbacks=[*callbacks, watch])
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
        limit = self._alone("plain", batch_size=SMALL_BATCH, steps=3)["peak"]
        row: dict[str, Any] = {"small_peak": limit}
        best: dict[str, Any] | None = None
        size = self.options["first"]
        while size <= self.options["most"]:
            found = self._trained(size, limit)
            if found is None:
                break
            best, size = found, 2 * size
        if best is None:
            return row
        largest = best["batch_size"]
        plain = self._alone("plain", batch_size=largest)
        accumulated = self._alone("accumulated", batch_size=largest)
        row |= {key: best[key] for key in _WITHIN}
        row |= {"plain_peak": plain["peak"], "plain_samples_per_s": plain["samples_per_s"]}
        row |= {"accumulated_samples_per_s": accumulated["samples_per_s"]}
        row |= {"difference": self._off(best, plain)}
        turned = self._alone("reversed", batch_size=largest)
        row |= {"reversed_difference": self._off(turned, plain)}
        return row | {"accumulated_difference": self._off(accumulated, plain)}

    def _off(self, one: dict[str, Any], other: dict[str, Any]) -> float:
        """Returns how far the losses of the steps of one fit are off another one's."""
        return difference(one["losses"][: self.steps], other["losses"][: self.steps])

    def _trained(self, size: int, limit: int) -> dict[str, Any] | None:
        """Returns what a ``fit`` within a limit tells; ``None`` where none keeps to it."""
        for count in (None, min(64, size // SMALL_BATCH)):
            found = self._alone("within", batch_size=size, limit=limit, count=count)
            if "peak" in found:
                return found
            print(f"{size}: {found['refused']}", file=sys.stderr)
        return None

    def within(self) -> dict[str, Any]:
        """Returns what training under a limit shows, in slices if a number of them is asked for; or
        why it is refused."""
        limit, size = self.options["limit"], self._batch_size
        remat = self.remat(limit, micro_batches=self.options["count"])
        try:
            watch = self.fit(size, max(self.steps, _UNTIMED), remat)
        except keras_remat.RematError as error:
            return {"refused": str(error)}
        plan, peak = remat.plan, max(watch.peaks[-2:])
        if plan is None or peak > limit:
            return {"refused": f"measured {peak / MIB:.1f} MiB, over {limit / MIB:.1f}"}
        if "micro-batches" in {str(event.kind) for event in remat.report.events}:
            return {"refused": "in micro-batches, whose numbers are not the whole batch's"}
        return {
            "peak": peak,
            "kept": True,
            "parts": plan.slicing.parts if plan.slicing else 1,
            "ops": len(plan.problem.graph.ops) if plan.problem else 0,
            "overhead": plan.overhead,
            "losses": watch.losses,
            "samples_per_s": size / median(watch.times_s[-2:]),
        }

    def accumulated(self) -> dict[str, Any]:
        """Returns what gradient accumulation of the small batch gives."""
        count = self._batch_size // SMALL_BATCH
        model = self.model()
        of_plain = model.optimizer.get_config() | {"gradient_accumulation_steps": count}
        model.compile(type(model.optimizer).from_config(of_plain), model.loss)
        watch = self.fit(SMALL_BATCH, self.steps, of=count, model=model)
        return {
            "losses": watch.losses[count - 1 :: count],  # the mean over the epoch so far
            "samples_per_s": SMALL_BATCH / median(watch.times_s[2:]),
        }

    def _alone(self, part: str, **more: Any) -> dict[str, Any]:
        """Returns what a process of its own measures."""
        return row_of("slices_case.py", json.dumps(self.options | {"part": part, **more}))

    def plain(self) -> dict[str, Any]:
        """Returns what plain ``fit`` takes, and its losses."""
        watch = self.fit(self._batch_size, self.steps)
        return {
            "peak": max(watch.peaks),
            "losses": watch.losses,
            "samples_per_s": self._batch_size / median(watch.times_s[1:]),
        }

    def reversed(self) -> dict[str, Any]:
        """Returns the losses of plain ``fit`` of batches in reverse order."""
        watch = self.fit(self._batch_size, self.steps, is_reversed=True)
        return {"losses": watch.losses}

    # ---------------------------------------------------------------- bounds

    def bound(self) -> dict[str, Any]:
        """Returns the row of what slices of larger batches add at the least."""
        limit = self._alone("plain", batch_size=SMALL_BATCH, steps=3)["peak"]
        sizes, size = list[dict[str, Any]](), self.options["first"]
        while size <= self.options["most"]:
            problem, rules = self._whole(size)
            added = slice_bounds.least_added(problem.with_budget(limit), rules, _CUTS, _BOUND_S)
            told = {"batch_size": size, "resident": problem.profile.resident_bytes}
            sizes.append(told | {"least_added": added})
            print(sizes[-1], file=sys.stderr)
            size *= 2
        return {"small_peak": limit, "sizes": sizes, "cuts": _CUTS}

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
        plain = self._alone("plain")
        turned = self._alone("reversed")
        problem, _ = self._whole(self._batch_size)
        floor = problem.floor_bytes
        row: dict[str, Any] = {
            "floor": floor,
            "resident": problem.profile.resident_bytes,
            "plain_peak": plain["peak"],
            "reversed_difference": self._off(turned, plain),
            "ops": len(problem.graph.ops),
        }
        for share in sorted(self.options["shares"], reverse=True):
            limit, losses = round(share * floor), plain["losses"]
            found = self._alone("below", share=share, limit=limit, losses=losses)
            row |= {key: found[key] for key in _BELOW if key in found}
            if "refused" in row:
                break
            row["share"] = share
        return row

    def _whole(self, size: int) -> tuple[keras_remat.Problem, Mapping[int, SliceRule]]:
        """Returns the step of whole ops, and how they may run in slices; what is resident is the
        model's and the batch's, by their shapes: between two steps, some of what a step has freed
        may still be in use."""
        backend, model = load_backend(), self.model()
        traced = backend.trace(model, backend.example_batch(model, self.data(size)))
        rules = {} if traced.slicer is None else traced.slicer.rules
        return keras_remat.Problem(traced.graph, backend.estimated_profile(traced)), rules

    @property
    def _batch_size(self) -> int:
        return int(self.options["batch_size"])

    def below(self) -> dict[str, Any]:
        """Returns what training under a limit shows, or why it is refused."""
        share, limit, losses = (self.options[name] for name in ("share", "limit", "losses"))
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
            "peak": plan.measured.peak_bytes,
            "overhead": plan.overhead,
            "parts": plan.slicing.parts if plan.slicing else 1,
            "difference": difference(watch.losses[:count], losses[:count]),
            "fit_s": time.perf_counter() - began_s,
        }


def main(text: str) -> int:
    """Measures what the options ask for and prints it."""
    options = json.loads(text)
    if options["part"] == "card":  # of which no step runs here
        print(json.dumps(options | Bench(options).card()))
        return 0
    keras_remat.enable_cpu_memory_stats()
    bench = Bench(options)
    row = getattr(bench, options["part"])()
    if not statistics():
        print("the allocator keeps no statistics", file=sys.stderr)
        return 1
    print(json.dumps(options | row | {"onednn": "on" if private.onednn_is_on() else "off"}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
