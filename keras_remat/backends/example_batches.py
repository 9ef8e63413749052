"""Makes batches to plan with: from the user's arrays or specs, or from the model and its losses."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from keras_remat.backends.batches import batch_size_of, check_dense
from keras_remat.backends.keras_private import as_fit_converts, is_own
from keras_remat.backends.tables import names
from keras_remat.errors import UnknownBatchError, unknown_name

#: Losses whose target has the output's shape; the sparse one's lacks the last dimension.
_SAME_SHAPE = names("""
    categorical_crossentropy binary_crossentropy mean_squared_error mse mean_absolute_error mae
    huber log_cosh kl_divergence poisson
""")
_GIVE_A_BATCH = "give a batch (x, y)"


def example_batch(
    model: Any,
    batch: Any,
    *,
    seed: int | None = 0,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    dtypes: Mapping[str, str] | None = None,
) -> Any:
    """Returns ``batch``, in any form, as the NumPy arrays that ``fit`` would pass to a step.

    Args:
        model: a Keras model; needed when ``batch`` is an int.
        batch: ``(x, y[, sample_weight])`` as arrays or as anything with ``shape`` and ``dtype``
            (specs become random data of exactly that type), or an int: that many samples for the
            model's inputs and losses.
        seed: seed of random data; with ``None`` the data are zeros that take no memory.
        shapes: input's name → its shape without the batch dimension, where ``batch`` is an int. The
            name of a single input may be ``""``.
        dtypes: input's name → its dtype, likewise.

    Raises:
        UnsupportedModelError: a sparse or ragged array, spec or input.
        UnknownBatchError: an int, and inputs or targets that do not follow from the model.
        ValueError: an int that is not positive or not the model's fixed batch size, arrays without
            samples or of another shape than the model's inputs, or a shape that is not fully known.
        TypeError: a bool, another type, or numbers and lists instead of arrays.
    """
    import keras

    rng = None if seed is None else np.random.default_rng(seed)
    if isinstance(batch, bool):
        raise TypeError("batch must be (x, y[, sample_weight]) or an int, got a bool")
    if (
        hasattr(batch, "__index__") and tuple(getattr(batch, "shape", ())) == ()
    ):  # NumPy's integers have a shape
        size = operator.index(batch)
        if size <= 0:
            raise ValueError(f"batch must be positive, got {size}")
        return _from_model(model, size, rng, dict(shapes or {}), dict(dtypes or {}))
    if not isinstance(batch, (tuple, list, dict)) and not hasattr(batch, "shape"):
        raise TypeError(
            "batch must be (x, y[, sample_weight]) as arrays or specs, or an int; got "
            f"{type(batch).__name__}"
        )
    batch = _weights_per_target(batch)
    arrays = keras.tree.map_structure(lambda leaf: _array(leaf, rng), batch)
    if batch_size_of(arrays) == 0:
        raise ValueError("batch must have samples, got arrays without any")
    check_shapes(model, arrays)
    return arrays


def check_shapes(model: Any, batch: Any) -> None:
    """Raises :class:`ValueError` where arrays do not have the shapes of the model's inputs.

    The batch dimension is not compared. Only functional and built Sequential models with Keras's
    own ``train_step`` are checked.

    Args:
        model: a Keras model.
        batch: ``(x, y[, sample_weight])`` or ``x``, of arrays or specs with every dimension.
    """
    import keras

    own_step = getattr(type(model), "train_step", None)
    if own_step is None or not own_step.__module__.startswith("keras."):
        return  # another train_step may do anything with a batch
    given = batch[0] if isinstance(batch, (tuple, list)) else batch
    inputs = keras.tree.flatten(_symbolic(model)[0])
    arrays = keras.tree.flatten(given)
    if isinstance(given, dict) and all(getattr(t, "name", None) in given for t in inputs):
        arrays = [given[tensor.name] for tensor in inputs]
    if len(inputs) != len(arrays):
        return  # left to Keras
    for tensor, array in zip(inputs, arrays, strict=True):
        if tensor is None or array is None:
            continue
        wanted, shape = tuple(tensor.shape[1:]), tuple(array.shape[1:])
        if not any(_may_be(wanted, one) for one in (shape, (*shape, 1), _without_last_one(shape))):
            raise ValueError(
                f"input {tensor.name!r} has the shape {wanted} without the batch, and the batch "
                f"has {shape}: give arrays of the input's shape"
            )


def _without_last_one(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns a shape without a last dimension of 1, which Keras drops where it is too many."""
    return shape[:-1] if shape[-1:] == (1,) else shape


def _may_be(wanted: tuple[int | None, ...], shape: tuple[int, ...]) -> bool:
    return len(wanted) == len(shape) and all(
        a in (None, b) for a, b in zip(wanted, shape, strict=True)
    )


def _array(leaf: Any, rng: np.random.Generator | None) -> Any:
    if leaf is None:
        return None
    import keras

    check_dense(leaf)
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    symbolic = isinstance(leaf, keras.KerasTensor) or not hasattr(leaf, "__array__")
    if shape is not None and dtype is not None and symbolic:
        return _random(tuple(shape), getattr(dtype, "name", str(dtype)), rng)
    array = as_fit_converts(leaf)
    if array is None:
        raise TypeError(
            f"batch must hold arrays, got {leaf!r} ({type(leaf).__name__}): fit takes no lists of "
            "numbers either. numpy.asarray makes an array of one."
        )
    return array


def _weights_per_target(batch: Any) -> Any:
    """Returns the batch with the sample weights repeated for each of several targets, as ``fit``
    passes them to a step."""
    import keras

    if not isinstance(batch, (tuple, list)) or len(batch) != 3:
        return batch
    x, y, weights = batch
    if not isinstance(y, (tuple, list, dict)) or not isinstance(weights, np.ndarray):
        return batch
    return x, y, keras.tree.map_structure(lambda _: weights, y)


def _random(
    shape: tuple[int | None, ...],
    dtype: str,
    rng: np.random.Generator | None,
    *,
    high: int = 2,
) -> np.ndarray:
    if any(dim is None for dim in shape):
        raise ValueError(
            f"the shape {shape} is not fully known; give arrays or specs with every dimension"
        )
    known = tuple(int(dim) for dim in shape if dim is not None)
    if dtype == "string":
        raise UnknownBatchError("strings do not follow from the model", _GIVE_A_BATCH)
    if rng is None:
        return np.broadcast_to(np.zeros((), "float32" if dtype == "bfloat16" else dtype), known)
    if "int" in dtype:
        return rng.integers(0, high, known).astype(dtype)
    if dtype == "bool":
        return rng.integers(0, 2, known).astype(bool)
    return rng.random(known).astype("float32" if dtype == "bfloat16" else dtype)


def fixed_batch(model: Any) -> tuple[str, tuple[int | None, ...]] | None:
    """Returns name and shape of a model's input whose batch size is fixed; ``None`` without one."""
    import keras

    for tensor in keras.tree.flatten(_symbolic(model)[0]):
        if tensor is not None and tensor.shape and tensor.shape[0] is not None:
            return tensor.name, tuple(tensor.shape)
    return None


def _symbolic(model: Any) -> tuple[Any, Any]:
    """Returns the symbolic inputs and outputs of a functional or built Sequential model; ``None``
    twice for other models."""
    import keras

    if isinstance(model, keras.Sequential) and getattr(model, "inputs", None) and model.outputs:
        return model.inputs[0], model.outputs[0]  # a Sequential model has one of each
    return getattr(model, "input", None), getattr(model, "output", None)


def _inputs(
    model: Any, size: int, shapes: dict[str, tuple[int, ...]], dtypes: dict[str, str]
) -> Any:
    """Returns specs of ``size`` samples for a model's inputs, completed by ``shapes`` and
    ``dtypes``.

    Raises:
        UnknownBatchError: a shape follows neither from the model nor from ``shapes``.
        UnsupportedModelError: a sparse or ragged input.
        ValueError: a name that no input has, or a shape that is not the input's.
    """
    import keras

    inputs, _ = _symbolic(model)
    if inputs is None and shapes:
        made = {
            name: keras.KerasTensor((size, *shape), dtypes.pop(name, "float32"), name=name or "x")
            for name, shape in shapes.items()
        }
        _check_names(dtypes, list(made))
        return made[""] if list(made) == [""] else made
    if inputs is None:
        raise UnknownBatchError(
            "the model's inputs do not follow from it (it is neither functional nor a built "
            "Sequential)",
            _GIVE_A_BATCH,
            lacks_shapes=True,
        )
    fixed = fixed_batch(model)
    # a Sequential may have the size of the batch that built it, and takes others
    may_differ = isinstance(model, keras.Sequential)
    if fixed is not None and fixed[1][0] != size and not may_differ:
        raise ValueError(
            f"the batch is {size}, and the model's input {fixed[0]!r} has the fixed shape "
            f"{fixed[1]}: give {fixed[1][0]}"
        )
    flat = keras.tree.flatten(inputs)
    names = [tensor.name for tensor in flat]
    if isinstance(inputs, dict) and len(inputs) == len(flat):  # the names that fit uses
        names = sorted(inputs)
    if len(names) == 1:  # a single input's name may be left out
        shapes = {name or names[0]: shape for name, shape in shapes.items()}
        dtypes = {name or names[0]: dtype for name, dtype in dtypes.items()}
    _check_names({**shapes, **dtypes}, names)
    specs = [
        _input(tensor, name, size, shapes.get(name), dtypes.get(name))
        for name, tensor in zip(names, flat, strict=True)
    ]
    return keras.tree.pack_sequence_as(inputs, specs)


def _check_names(given: Collection[str], names: list[str]) -> None:
    for name in given:
        if name not in names:
            raise ValueError(unknown_name("input", name, names))


def _input(
    tensor: Any, name: str, size: int, shape: tuple[int, ...] | None, dtype: str | None
) -> Any:
    """Returns the spec of one input; a given shape (without the batch dimension) and dtype replace
    its own."""
    import keras

    check_dense(tensor)
    own = tuple(tensor.shape[1:])
    if shape is None and None in own:
        raise UnknownBatchError(
            f"the shape {(size, *own)} of input {name!r} is not fully known",
            "give arrays or specs with every dimension",
            lacks_shapes=True,
        )
    if shape is not None and not _may_be(own, shape):
        raise ValueError(f"input {name!r} has the shape {own} without the batch, got {shape}")
    return keras.KerasTensor((size, *(shape or own)), dtype or tensor.dtype, name=tensor.name)


def _from_model(
    model: Any,
    size: int,
    rng: np.random.Generator | None,
    shapes: dict[str, tuple[int, ...]],
    dtypes: dict[str, str],
) -> tuple[Any, Any]:
    import keras

    specs = _inputs(model, size, shapes, dtypes)
    x = keras.tree.map_structure(lambda t: _random(tuple(t.shape), t.dtype, rng), specs)
    _, outputs = _symbolic(model)
    if outputs is None or shapes:
        try:
            outputs = model.compute_output_spec(specs)
        except Exception as error:  # layers of a user's model may raise anything
            told = keras.tree.map_structure(lambda t: tuple(t.shape), specs)
            raise ValueError(f"the model takes no inputs of shape {told}: {error}") from error
    loss = getattr(model, "loss", None)
    if loss is None and not _computes_its_loss(model):
        return x, None  # its layers add the loss
    losses: Any = (
        loss
        if isinstance(loss, (list, tuple, dict))
        else keras.tree.map_structure(lambda _: loss, outputs)
    )
    if isinstance(losses, dict) and isinstance(outputs, dict):
        outputs = {name: output for name, output in outputs.items() if name in losses}
        losses = {name: losses[name] for name in outputs}  # only outputs with a loss have targets
    elif isinstance(losses, dict):
        flat = keras.tree.flatten(outputs)
        losses = (
            [losses.get(name) for name in model.output_names]
            if len(flat) == len(model.output_names)
            else [None]
        )
    targets = [
        _target(t, name, size, rng)
        for t, name in zip(keras.tree.flatten(outputs), keras.tree.flatten(losses), strict=True)
    ]
    return x, keras.tree.pack_sequence_as(outputs, targets)


def _computes_its_loss(model: Any) -> bool:
    """Returns whether a model overrides ``train_step`` or ``compute_loss``, so that its targets are
    unknown."""
    import keras

    return any(is_own(model, name, keras.Model) for name in ("train_step", "compute_loss"))


def _target(output: Any, loss: Any, size: int, rng: np.random.Generator | None) -> np.ndarray:
    name = (
        loss
        if isinstance(loss, str)
        else getattr(loss, "name", None) or getattr(loss, "__name__", None)
    )
    shape = (size, *output.shape[1:])
    if name == "sparse_categorical_crossentropy":
        return _random(shape[:-1], "int32", rng, high=int(shape[-1] or 2))
    if name not in _SAME_SHAPE:
        reason = f"the target of loss {name!r} does not follow from the model"
        if loss is None:
            reason = "no targets follow from a model without a loss, or with one of its own"
        raise UnknownBatchError(reason, _GIVE_A_BATCH)
    return _random(shape, "float32", rng)
