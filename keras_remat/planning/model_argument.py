"""Loads the model that a command line names, with a batch for it.

A model is a file that ``model.save`` wrote, or a function that returns a model, alone or with a
batch. Where it comes alone, a batch is made up, from the shapes and dtypes of the model's inputs,
or from those given by name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from keras_remat.backends.batches import as_specs
from keras_remat.backends.example_batches import example_batch, fixed_batch
from keras_remat.backends.statistics import enable_cpu_memory_stats
from keras_remat.errors import UnknownBatchError

_A_MODEL = "a model is a file that model.save wrote, or package.module:function"
DEFAULT_BATCH_SIZE = 32
_FUNCTION = "MODULE:FUNCTION that returns (model, (x, y))"


class NamedModelError(ValueError):
    """Reports that a name gives no model, or that another argument is wrong for it."""


def add_arguments(command: Any) -> None:
    """Adds the arguments that name a model and its batch to a command.

    They are ``model`` and the options ``batch_size``, ``shape`` and ``dtype``.
    """
    command.add_argument(
        "model",
        metavar="MODEL.keras|MODULE:FUNCTION",
        help="a compiled model that model.save wrote, or package.module:function: model, or "
        "(model, batch)",
    )
    command.add_argument(
        "--batch-size",
        type=int,
        metavar="N",
        help="samples of the batch that is traced (default: those of the model's inputs, or 32)",
    )
    command.add_argument(
        "--shape",
        action="append",
        default=[],
        metavar="[INPUT=]DIM,DIM",
        help="shape of an input without the batch, where the model leaves it open",
    )
    dtype_help = "dtype of an input, where the model is not built"
    command.add_argument(
        "--dtype", action="append", default=[], metavar="[INPUT=]DTYPE", help=dtype_help
    )


def model_and_batch(
    name: str,
    batch_size: int | None = None,
    shapes: Sequence[str] = (),
    dtypes: Sequence[str] = (),
) -> tuple[Any, Any]:
    """Returns a compiled model, and a batch for it: the function's own, or specs of one that is
    made up. Specs take no memory: where a model is planned for a card, nothing reads its data.

    Args:
        name: a file, or ``package.module:function``.
        batch_size: number of samples of a batch that is made up; ``None`` for the fixed size of the
            model's inputs, or else :data:`DEFAULT_BATCH_SIZE`.
        shapes: input shapes, each ``"[INPUT=]DIM,DIM"`` without the batch.
        dtypes: input dtypes, each ``"[INPUT=]DTYPE"``.

    Raises:
        FileNotFoundError: there is no such file.
        UnsupportedModelError: the batch would be sparse or ragged.
        NamedModelError: the name gives no compiled model, no batch follows from the model, or the
            batch is given twice.
    """
    model, batch = _loaded(name)
    given = [
        option
        for option, value in (
            ("--batch-size", batch_size),
            ("--shape", shapes),
            ("--dtype", dtypes),
        )
        if value not in (None, [], ())
    ]
    if batch is not None:
        if given:
            raise NamedModelError(
                f"{name!r} gave a batch of its own: leave out {' and '.join(given)}"
            )
        return model, batch
    if batch_size is None:
        fixed = fixed_batch(model)
        batch_size = DEFAULT_BATCH_SIZE if fixed is None else fixed[1][0]
    try:
        made = example_batch(
            model,
            batch_size,
            seed=None,
            shapes={key: _dimensions(text) for key, text in _by_name(shapes, "--shape").items()},
            dtypes={key: _dtype(text) for key, text in _by_name(dtypes, "--dtype").items()},
        )
    except UnknownBatchError as error:
        advice = f"--shape INPUT=DIM,DIM (and --dtype), or {_FUNCTION}"
        raise NamedModelError(
            f"{error.reason}: give {advice if error.lacks_shapes else _FUNCTION}"
        ) from error
    return model, as_specs(made)


def _named(module: str, name: str) -> Callable[[], Any]:
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise NamedModelError(f"no model from '{module}:{name}': {error}") from error
    if not callable(found):
        raise NamedModelError(f"'{module}:{name}' is no function: {type(found).__name__}")
    return found  # type: ignore[no-any-return]


def _loaded(name: str) -> tuple[Any, Any]:
    """Returns the model of a file or a function, and its batch, ``None`` where it has none."""
    import keras

    enable_cpu_memory_stats()
    module, _, function = name.partition(":")
    batch: Any = None
    if function and not Path(name).exists():
        sys.path.insert(0, "")  # as python -m does: finds modules in the current folder
        try:
            model = _named(module, function)()
        finally:
            sys.path.remove("")
        if isinstance(model, tuple) and len(model) == 2 and isinstance(model[0], keras.Model):
            model, batch = model
    elif not Path(name).exists():
        raise FileNotFoundError(f"no file {name!r}; {_A_MODEL}")
    else:
        try:
            model = keras.saving.load_model(name)
        except KeyError as error:  # an archive of something else
            told = f"{name!r} holds no model of Keras ({error.args[0]}); {_A_MODEL}"
            raise NamedModelError(told) from error
    if not isinstance(model, keras.Model):
        raise NamedModelError(f"{name!r} gave {type(model).__name__}; {_A_MODEL}")
    if not model.compiled:
        raise NamedModelError(
            f"{name!r} gave a model that is not compiled: call model.compile(optimizer, loss) "
            "before model.save, or in the function"
        )
    return model, batch


def _by_name(texts: Sequence[str], option: str) -> dict[str, str]:
    """Returns the texts of an option by input name; ``""`` where the name was left out.

    Raises:
        NamedModelError: an input is named twice.
    """
    found: dict[str, str] = {}
    for text in texts:
        name, _, said = text.rpartition("=")
        if name in found:
            raise NamedModelError(
                f"{option} is given twice for {name or 'the only input'}: {text!r}"
            )
        found[name] = said
    return found


def _dimensions(text: str) -> tuple[int, ...]:
    """Returns ``(224, 224, 3)`` of ``"224,224,3"``; an empty text is the shape of a number.

    Raises:
        NamedModelError: a dimension is no positive integer.
    """
    dimensions = text.split(",") if text.strip() else []
    if not all(dimension.strip().isdecimal() and int(dimension) for dimension in dimensions):
        raise NamedModelError(
            f"--shape takes the dimensions without the batch, such as tokens=128 or 224,224,3; "
            f"got {text!r}"
        )
    return tuple(int(dimension) for dimension in dimensions)


def _dtype(text: str) -> str:
    """Returns Keras's name of a dtype.

    Raises:
        NamedModelError: Keras knows no dtype of that name.
    """
    import keras

    try:
        return str(keras.backend.standardize_dtype(text))
    except ValueError as error:
        raise NamedModelError(f"--dtype takes a name such as int32; got {text!r}") from error
