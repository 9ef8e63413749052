"""Answers "will it fit?" for cards that need not be there, before anything is run or rented.

The answer comes from a process of its own, with Keras on JAX and no device but the CPU
(:mod:`keras_remat.cards.process`). So it is the same whatever backend, device or environment the
caller has, and the caller's memory stays as it is. The model goes there as Keras saves it, without
weights. For a model that does not run on JAX, the process has Keras on TensorFlow, whose step is
compiled by the same compiler.

Known limits: the process must be able to import a model's own classes; neither cuDNN's nor cuBLAS's
scratch memory is in the bytes.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from keras_remat.backends.batches import check_dense, resized_spec
from keras_remat.cards import process
from keras_remat.cards.process import ArraySpec, NotTakenError, Request
from keras_remat.cards.report import CardReport, CardRow
from keras_remat.checks import check_int, check_seconds, check_share
from keras_remat.core import interpreter
from keras_remat.core.target import Target
from keras_remat.errors import UnsupportedModelError, without_inner_frames
from keras_remat.planning.make_plan import target_of

_ERRORS_SHOWN = 500


@without_inner_frames
def will_it_fit(
    model: Any,
    batch: Any = None,
    cards: Sequence[str | Target] = ("T4", "A100-40"),
    *,
    batch_size: int | None = None,
    shapes: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    margin: float = 0.05,
    time_limit_s: float = 20.0,
    seed: int = 0,
    progress: Callable[[CardRow], None] | None = None,
) -> CardReport:
    """Says whether a train step fits cards that need not be there; no step runs.

    It compiles for each card by XLA:GPU, in a process of its own, with the extra ``cards``. Batch
    sizes and samples per second are predictions.

    Args:
        model: a compiled Keras model written in Keras's own ops, on whatever backend, or in
            TensorFlow's; or its name: a file that ``model.save`` wrote, or
            ``package.module:function``.
        batch: ``(x, y[, sample_weight])`` as arrays or specs, or an int batch size where inputs and
            targets follow from the model; ``None`` for a model that is named, or with
            ``batch_size``.
        cards: names in :data:`keras_remat.cards.table.CARDS`, or cards of one's own as
            :func:`keras_remat.cards.table.card` reads them, such as ``"RTX3060:memory=8GiB"``; or
            targets.
        batch_size: samples of the batch, whatever ``batch`` has.
        shapes, dtypes: of inputs that a named model leaves open, as on the command line:
            ``"tokens=128"``.
        margin: share of a card's usable memory that is kept free.
        time_limit_s: seconds of solving for each card; compiling comes on top.
        seed: seed of the solver's random choices.
        progress: function that is called with a card's row as soon as its verdict is known, and
            again when the row is complete.

    Raises:
        MissingPackageError: the extra ``cards`` is not installed.
        UnsupportedModelError: the model cannot be taken to that process, or be traced there.
        ValueError, TypeError: wrong arguments.
    """
    check_share("margin", margin)
    check_seconds("time_limit_s", time_limit_s)
    check_int("seed", seed, least=0)
    named = isinstance(model, (str, os.PathLike))
    _check_batch(batch, batch_size, named=named)
    request = Request(
        model=os.fspath(model) if named else _serialized(model),
        batch=_batch(batch, batch_size),
        targets=_targets(cards),
        shapes=tuple(shapes),
        dtypes=tuple(dtypes),
        margin=margin,
        time_limit_s=time_limit_s,
        seed=seed,
        search_path=(os.getcwd(), *sys.path),
        settings={} if named else _settings(),
    )
    return _report(request, progress or (lambda row: None))


def _check_batch(batch: Any, batch_size: int | None, *, named: bool) -> None:
    """Raises for a batch that does not go with the model, or a size below 1."""
    if batch_size is not None:
        check_int("batch_size", batch_size, least=1)
    if isinstance(batch, (int, np.integer)):
        check_int("batch", batch, least=1)
    elif named and batch is not None:
        raise TypeError("a model that is named has a batch size, not arrays: give batch_size")
    if not named and batch is None and batch_size is None:
        raise TypeError("give a batch (x, y), or batch_size")


def _targets(cards: Sequence[str | Target]) -> tuple[Target, ...]:
    names = [cards] if isinstance(cards, (str, Target)) else list(cards)
    if not names:
        raise ValueError('cards must name at least one, such as "T4"')
    targets = tuple(target for target in map(target_of, names) if target is not None)
    by_name: dict[str, Target] = {}
    for target in targets:
        if by_name.setdefault(target.name, target) != target:
            raise ValueError(
                f"two different cards are called {target.name!r}: give each a name of its own"
            )
        if target.usable_bytes is None and target.total_bytes is None:
            raise ValueError(f"the target {target.device!r} has no usable_bytes: give some")
    return targets


def _serialized(model: Any) -> dict[str, Any]:
    """Returns a model as Keras saves it, without weights."""
    import keras

    if not isinstance(model, keras.Model):
        raise TypeError(
            f"model must be a compiled Keras model or its name, got {type(model).__name__}"
        )
    if not model.compiled:
        raise ValueError("the model is not compiled: call model.compile(optimizer, loss) first")
    try:
        config: dict[str, Any] = keras.saving.serialize_keras_object(model)
    except Exception as error:  # whatever a user's classes raise
        raise UnsupportedModelError(
            f"The model cannot be taken to the process that compiles it, because Keras cannot "
            f"serialize it: {type(error).__name__}: {error}. Give its classes get_config(), or "
            "name a function that makes it, as package.module:function."
        ) from error
    return config


def _settings() -> dict[str, Any]:
    import keras

    return {
        "set_floatx": keras.config.floatx(),
        "set_image_data_format": keras.config.image_data_format(),
    }


def _batch(batch: Any, size: int | None) -> Any:
    """Returns a batch as shapes and dtypes, or its size."""
    if batch is None or isinstance(batch, (int, np.integer)):
        if size is not None and batch not in (None, size):
            raise ValueError(f"batch is {batch}, and batch_size is {size}: give one of them")
        return size if batch is None else int(batch)
    import keras

    def spec(shape: Any, leaf: Any) -> ArraySpec:
        return ArraySpec(
            tuple(int(dim) for dim in shape), keras.backend.standardize_dtype(leaf.dtype)
        )

    def as_spec(leaf: Any) -> Any:
        if leaf is None:
            return None
        check_dense(leaf)
        leaf = leaf if hasattr(leaf, "shape") else np.asarray(leaf)
        return spec(leaf.shape, leaf)

    specs = keras.tree.map_structure(as_spec, batch)
    return specs if size is None else resized_spec(specs, size, spec)


def _report(request: Request, progress: Callable[[CardRow], None]) -> CardReport:
    try:
        return _report_on("jax", request, progress)
    except NotTakenError as error:
        if find_spec("tensorflow") is None:
            raise UnsupportedModelError(_not_taken(f"JAX ({error})")) from error
        on_jax = error
    try:
        report = _report_on("tensorflow", request, progress)
    except NotTakenError as error:
        told = _not_taken(f"JAX ({on_jax}), nor on TensorFlow ({error})")
        raise UnsupportedModelError(told) from error
    return replace(report, framework="tensorflow")


def _not_taken(where: str) -> str:
    return (
        f"The model does not run where it is compiled for a card: not with Keras on {where}. Its "
        "own classes and functions have to lie in modules that can be imported (not in a script "
        "or notebook); or name a function that makes it, as package.module:function."
    )


def _report_on(framework: str, request: Request, progress: Callable[[CardRow], None]) -> CardReport:
    """Returns the answer of a process with Keras on a framework.

    Raises:
        NotTakenError: the model does not run on the framework.
        RematError, ValueError, TypeError, ImportError, OSError: the request cannot be answered.
    """
    names = [target.name for target in request.targets]
    report = CardReport(batch_size=0, rows=())
    rows: dict[str, CardRow] = {}
    for kind, what in _messages(request, framework):
        if kind == process.BEGUN:
            report = replace(report, name=what[0], batch_size=what[1])
        elif kind == process.ROW:
            rows[what.card] = what
            progress(what)
        elif kind == process.LAYERS:
            report = replace(report, layers=what)
        elif kind == process.FAILED:
            raise what
        elif kind == process.NOT_TAKEN:
            raise NotTakenError(what)
    return replace(report, rows=tuple(rows[name] for name in names))


def _messages(request: Request, framework: str) -> Iterator[tuple[str, Any]]:
    """Yields the messages of a process with Keras on a framework, until it is done.

    Raises:
        UnsupportedModelError: the process ended before.
    """
    with TemporaryDirectory(prefix="keras_remat_", ignore_cleanup_errors=True) as folder:
        asked, errors = Path(folder) / "request", Path(folder) / "errors"
        asked.write_bytes(pickle.dumps(request))
        # the process is killed as soon as it has answered, and so leaves its temporary files
        variables = {**interpreter.for_cards(framework), "TMPDIR": folder}
        with errors.open("wb") as error_stream:
            child = interpreter.start(
                "-m", "keras_remat.cards.process", str(asked), variables=variables,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=error_stream,
            )  # fmt: skip
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            kind = ""
            while kind != process.DONE:
                try:
                    kind, what = pickle.load(child.stdout)
                except EOFError:
                    told = errors.read_text(errors="replace").strip()[-_ERRORS_SHOWN:]
                    raise UnsupportedModelError(
                        f"The process that compiles for cards ended with {child.wait()}, for want "
                        f"of memory for instance; ask about fewer cards. It said: {told}"
                    ) from None
                yield kind, what
        finally:
            child.kill()
            child.wait()
            child.stdin.close()
            child.stdout.close()
