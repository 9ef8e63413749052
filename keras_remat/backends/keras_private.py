"""Wraps Keras's private API, which may change and every backend needs."""

from __future__ import annotations

import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

from keras_remat.backends.batches import as_specs

#: Name of Keras's seed generator among its global attributes; newer versions have a constant for
#: it.
GLOBAL_SEED_GENERATOR = "global_seed_generator"


def layers(model: Any) -> list[Any]:
    """Returns the layers of a model, nested ones too."""
    return list(model._flatten_layers())


def build(model: Any, batch: Any) -> None:
    """Builds model, losses, metrics and optimizer for a batch of arrays or specs.

    ``fit`` does the same before its first step. Where Keras cannot build the model (without a
    ``call``), it marks it as built anyway; the mark is undone.
    """
    was_built = model.built
    try:
        model._symbolic_build(data_batch=batch)
    except Exception:
        model.built = was_built
        raise


def has_its_metrics(model: Any) -> bool:
    """Returns whether a model's compiled metrics are built."""
    metrics = model._compile_metrics
    return metrics is None or bool(metrics.built)


def build_losses_and_metrics(model: Any, batch: Any) -> None:
    """Builds a compiled model's losses and metrics, as its first step would.

    Left out are models whose outputs are known only when called, since a call may have effects, and
    models that override the step, the loss or the metrics. They build them in their first step.

    Args:
        model: a compiled model.
        batch: specs of the batch, in ``fit``'s structure.
    """
    import keras
    from keras.src.models.functional import Functional

    steps = ("train_step", "compute_loss", "compute_metrics")
    if any(is_own(model, name, keras.Model) for name in steps):
        return
    if isinstance(model, keras.Sequential) and not is_own(model, "call", keras.Sequential):
        if not hasattr(model, "outputs"):  # the model is not built yet
            return
        outputs = model.outputs[0]
    elif isinstance(model, Functional) and not is_own(model, "call", Functional):
        outputs = model.output
    else:
        return
    targets = keras.utils.unpack_x_y_sample_weight(batch)[1]
    if targets is None:
        return
    targets = as_specs(targets)
    losses, metrics = model._compile_loss, model._compile_metrics
    for_losses = _in_structure_of(outputs, targets)
    if losses is not None and not losses.built and for_losses is not None:
        with keras.name_scope(losses.name):  # the scope of its call
            losses.build(for_losses, outputs)
    if metrics is not None and not metrics.built:
        metrics.build(targets, outputs)


def _in_structure_of(outputs: Any, targets: Any) -> Any:
    """Returns targets in the structure for which Keras builds losses; ``None`` where targets and
    outputs differ in structure, such as a ``dict`` for a ``list``, which Keras resolves itself."""
    import keras

    def is_sequence(given: Any) -> bool:
        return isinstance(given, (list, tuple)) and not any(map(keras.tree.is_nested, given))

    if is_sequence(outputs) and is_sequence(targets) and len(outputs) == len(targets):
        return keras.tree.pack_sequence_as(outputs, list(targets))
    try:
        keras.tree.assert_same_structure(outputs, targets)
    except ValueError:
        return None
    return targets


def is_own(model: Any, name: str, base: type) -> bool:
    """Returns whether a model overrides the method ``name`` of Keras's class ``base``."""
    return name in vars(model) or getattr(type(model), name, None) is not getattr(base, name, None)


@contextmanager
def seed_generator_in_place() -> Iterator[None]:
    """Makes Keras's global seed generator at the start, if there is none yet.

    Otherwise a first draw inside the context would make it from stand-ins for arrays. If nothing
    draws from it, it is removed at the end, and Python's random state and the counter of names are
    restored.
    """
    from keras.src.backend.common import global_state
    from keras.src.random import seed_generator

    name = GLOBAL_SEED_GENERATOR
    if global_state.get_global_attribute(name) is not None:
        yield
        return
    before = random.getstate()
    names = global_state.get_global_attribute("object_name_uids", defaultdict(int), True)
    numbers = dict(names)
    generator = seed_generator.global_seed_generator()
    with_its_own = dict(names)
    is_used = False

    def drawn(draw: Callable[..., Any], **options: Any) -> Any:
        nonlocal is_used
        is_used = True
        return draw(**options)

    try:
        with wrapped(generator, "next", drawn):
            yield
    finally:
        if not is_used:
            global_state.set_global_attribute(name, None)
            random.setstate(before)
            if names == with_its_own:  # nothing was named since
                names.clear()
                names.update(numbers)


def masks(arrays: Any) -> list[Any]:
    """Returns one mask for each array in a structure, ``None`` for an array without one."""
    import keras
    from keras.src.backend import get_keras_mask

    return [get_keras_mask(leaf) for leaf in keras.tree.flatten(arrays)]


def as_fit_converts(array: Any) -> np.ndarray | None:
    """Returns an array as ``fit`` passes it to a step; ``None`` for values that ``fit`` does not
    accept as arrays (a number, a list).

    Floats get Keras's float type, and a Series becomes a column. A tensor of TensorFlow keeps its
    dtype, like the elements of a ``tf.data.Dataset``.
    """
    from keras.src.trainers.data_adapters import array_slicing, data_adapter_utils

    if not array_slicing.can_slice_array(array):
        return None
    of_data_set = data_adapter_utils.is_tensorflow_tensor(array)
    if of_data_set or not array.shape or _is_text(array):
        return np.asarray(array)
    sliceable = array_slicing.convert_to_sliceable(array)
    if isinstance(array, np.ndarray):
        return np.asarray(sliceable.array)
    return np.asarray(sliceable.convert_to_numpy(sliceable[slice(0, array.shape[0])]))


def _is_text(array: Any) -> bool:
    return isinstance(array, np.ndarray) and array.dtype.kind in "OSU"


def records_steps(callback: Any) -> bool:
    """Returns whether a callback is a ``TensorBoard`` that records steps, now or later."""
    if not getattr(callback, "_should_trace", False):
        return False
    is_later = getattr(callback, "_global_train_batch", 0) <= getattr(callback, "_stop_batch", 0)
    return is_later or getattr(callback, "_is_tracing", False)


def replaced_machinery(model: Any, function: Any) -> str | None:
    """Returns the name of a method or function that replaces Keras's own between a batch and
    ``train_step``; ``None`` where none does.

    Args:
        model: the model.
        function: the model's train function; ``None`` where it was not made yet.
    """
    for name in ("make_train_function", "_make_function"):
        owner = next((kind for kind in type(model).__mro__ if name in vars(kind)), None)
        if name in vars(model):
            return name
        if owner is not None and not owner.__module__.startswith("keras."):
            return f"{owner.__name__}.{name}"
    function = getattr(function, "python_function", function)  # of a tf.function
    module = getattr(function, "__module__", None) or ""
    is_kerass = function is None or module.startswith("keras.src.")
    return None if is_kerass else "a train_function that was set by hand"


def call_for_training(model: Any, x: Any) -> Any:
    """Returns a model's predictions, as its own ``train_step`` makes them."""
    return model(x, training=True) if model._call_has_training_arg else model(x)


def track_loss(model: Any, loss: Any, samples: int) -> None:
    """Adds the loss of some samples to the mean in the logs."""
    model._loss_tracker.update_state(loss, sample_weight=samples)


def trainable_flags(model: Any) -> dict[str, bool]:
    """Returns path of a layer → whether the layer is trainable."""
    return {layer.path: bool(layer.trainable) for layer in layers(model)}


def batches_may_grow(epoch_iterator: Any) -> bool:
    """Returns whether a later batch of an epoch's data may be larger than the first one.

    Arrays give batches of one size, and a smaller last one. So does a ``tf.data`` pipeline whose
    samples have one shape, unless it joins pipelines of several batch sizes.
    """
    import keras
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
    from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter

    adapter = getattr(epoch_iterator, "data_adapter", None)
    if isinstance(adapter, ArrayDataAdapter):
        return False
    if not isinstance(adapter, TFDatasetAdapter):
        return True
    specs = keras.tree.flatten(adapter.get_tf_dataset().element_spec)
    return not all(map(_has_samples_of_one_shape, specs))


def _has_samples_of_one_shape(spec: Any) -> bool:
    is_dense = type(spec).__name__ == "TensorSpec" and spec.shape.rank is not None
    return is_dense and None not in list(spec.shape)[1:]


def samples_of_batches(epoch_iterator: Any, batches: int) -> tuple[int, int] | None:
    """Returns how many samples the first batches of an epoch have, and how many batches they are.

    There may be fewer than ``batches``. Returns ``None`` for data other than arrays, whose batches
    are not known in advance.
    """
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

    adapter = getattr(epoch_iterator, "data_adapter", None)
    if not isinstance(adapter, ArrayDataAdapter):
        return None
    batches, last = min(batches, adapter.num_batches), adapter.partial_batch_size
    lacking = adapter.batch_size - last if last and batches == adapter.num_batches else 0
    return batches * adapter.batch_size - lacking, batches


def validation_batch_size(model: Any) -> int | None:
    """Returns the size of the largest batch that ``fit`` is about to validate with; ``None`` where
    unknown."""
    adapter = getattr(getattr(model, "_eval_epoch_iterator", None), "data_adapter", None)
    size = getattr(adapter, "batch_size", None)
    if not isinstance(size, int) or size <= 0:
        return None
    only = getattr(adapter, "num_batches", None) == 1  # a single batch may be smaller
    return getattr(adapter, "partial_batch_size", None) or size if only else size


def validation_samples(model: Any) -> int | None:
    """Returns how many samples ``fit`` is about to validate with; ``None`` for data other than
    arrays."""
    told = samples_of_batches(model._eval_epoch_iterator, sys.maxsize)
    return None if told is None else told[0]


def validate_in(model: Any, data: tuple[Any, ...], batch_size: int) -> None:
    """Makes ``fit`` validate in batches of another size, as its ``validation_batch_size`` would.

    Args:
        model: a model about to validate; Keras has not asked for the first batch yet.
        data: inputs, targets and weights of the validation.
        batch_size: new size of the batches, in samples.
    """
    iterator, (x, y, sample_weight) = model._eval_epoch_iterator, data
    strategy = getattr(model, "distribute_strategy", None)  # on TensorFlow
    of_backend = {} if strategy is None else {"distribute_strategy": strategy}
    type(iterator).__init__(
        iterator, x=x, y=y, sample_weight=sample_weight, batch_size=batch_size,
        steps_per_execution=model.steps_per_execution, shuffle=False, **of_backend,
    )  # fmt: skip


def metric_functions(model: Any) -> list[Any]:
    """Returns the metrics of a model's validation, and the functions that they average."""
    held = [one for metric in model.metrics for one in getattr(metric, "metrics", [metric])]
    return held + [one._fn for one in held if hasattr(one, "_fn")]


def is_on_one_device(model: Any) -> bool:
    """Returns whether no batch of a model is divided among devices."""
    import keras

    strategy = getattr(model, "distribute_strategy", None)  # on TensorFlow
    is_shared = strategy is not None and strategy.num_replicas_in_sync > 1
    return not is_shared and keras.distribution.distribution() is None


def trains_always(layer: Any) -> bool:
    """Returns whether a model calls a layer with ``training=True``, also in validation."""
    nodes = getattr(layer, "_inbound_nodes", ())
    return any(node.arguments.kwargs.get("training") for node in nodes)


def samples_counted(model: Any) -> int | None:
    """Returns the count of samples in the loss since the metrics were reset; ``None`` where the
    model's step does not count samples, or while its variables have no values."""
    count = getattr(getattr(model, "_loss_tracker", None), "count", None)
    if count is None or getattr(count, "_value", None) is None:
        return None
    return int(count.numpy())


def attention_layers(model: Any) -> dict[Any, bool | None]:
    """Returns layers that may use a library's kernel for attention (flash attention) → whether they
    ask for it; ``None`` where Keras decides."""
    chosen = {layer: getattr(layer, "_flash_attention", False) for layer in layers(model)}
    return {layer: asks for layer, asks in chosen.items() if asks is not False}


def cudnn_lstms(model: Any) -> list[Any]:
    """Returns the LSTM layers of a model that cuDNN may compute as a whole on a GPU."""
    import keras

    return [
        layer
        for layer in layers(model)
        if isinstance(layer, keras.layers.LSTM)
        and layer.use_cudnn in ("auto", True)
        and not (layer.recurrent_dropout or layer.unroll)
        and layer.use_bias
        and layer.activation is keras.activations.tanh
        and layer.recurrent_activation is keras.activations.sigmoid
    ]


@contextmanager
def without_cudnn(model: Any) -> Iterator[None]:
    """Makes a model's layers compute attention and LSTMs without cuDNN or flash attention."""
    attending = attention_layers(model)
    recurrent = {layer: layer.use_cudnn for layer in cudnn_lstms(model)}
    try:
        for layer in attending:
            layer._flash_attention = False
        for layer in recurrent:
            layer.use_cudnn = False
        yield
    finally:
        for layer, chosen in attending.items():
            layer._flash_attention = chosen
        for layer, chosen in recurrent.items():
            layer.use_cudnn = chosen


def wrapped(owner: Any, name: str, replacement: Callable[..., Any]) -> AbstractContextManager[None]:
    """Replaces a method inside by ``replacement``, whose first argument is the original method."""
    original = getattr(owner, name)

    def method(*args: Any, **options: Any) -> Any:
        return replacement(original, *args, **options)

    return replaced(owner, name, method)


@contextmanager
def replaced(owner: Any, name: str, new: Any) -> Iterator[None]:
    """Gives an attribute of an object, class or module another value inside."""
    own = vars(owner).get(name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
