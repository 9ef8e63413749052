"""The process that compiles for cards: ``python -m keras_remat.cards.process FILE``.

Keras runs on JAX in it, and JAX on the CPU. It reads a pickled request from a file, and writes
pickled messages to its standard output; what else is printed goes to its standard error.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keras_remat.backends.versions import check_card_compiler
from keras_remat.core.target import Target
from keras_remat.errors import RematError, UnsupportedModelError

#: What a message is; the second half of it is the name and the batch size, a row, bytes by layer,
#: or an exception. After ``DONE`` none follows.
BEGUN, ROW, LAYERS, FAILED, DONE = "begun", "row", "layers", "failed", "done"
Tell = Callable[[str, Any], None]


@dataclass(frozen=True)
class ArraySpec:
    """An array of a batch.

    Args:
        shape: with the samples.
        dtype: its name.
    """

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked.

    Args:
        model: as Keras serializes one, or the name of a file or function.
        batch: arrays as :class:`ArraySpec`, or a batch size; ``None`` follows from the model.
        targets: the cards.
        shapes, dtypes: as in :func:`keras_remat.planning.model_argument.model_and_batch`.
        margin, time_limit_s, seed: as in :func:`keras_remat.cards.will_it_fit.will_it_fit`.
        search_path: where modules are found.
        settings: of Keras: functions of ``keras.config`` → their argument.
    """

    model: Mapping[str, Any] | str
    batch: Any
    targets: tuple[Target, ...]
    shapes: Sequence[str] = ()
    dtypes: Sequence[str] = ()
    margin: float
    time_limit_s: float
    seed: int
    search_path: tuple[str, ...] = ()
    settings: Mapping[str, Any]


def answer(request: Request, tell: Tell) -> None:
    """Answers a request by messages.

    Raises:
        RematError, ValueError, OSError: it cannot be answered.
    """
    if any(not target.is_live for target in request.targets):
        check_card_compiler()
    sys.path += [folder for folder in request.search_path if folder not in sys.path]
    import keras

    from keras_remat.backends.batches import batch_size_of, example_batch
    from keras_remat.cards.rows import AskedStep

    initialize_with_zeros()
    for name, value in request.settings.items():
        getattr(keras.config, name)(value)
    model, batch = _model_and_batch(request)
    model.run_eagerly, model.jit_compile = False, True  # how Keras trains on JAX
    if isinstance(batch, int):
        batch = example_batch(model, batch, seed=None)
    tell(BEGUN, (model.name, batch_size_of(batch)))
    step = AskedStep(
        model, batch,
        margin=request.margin, time_limit_s=request.time_limit_s, seed=request.seed,
    )  # fmt: skip
    for target in request.targets:
        try:
            row = step.row(target, lambda early: tell(ROW, early))
        except (RematError, ValueError):
            raise
        except Exception as error:  # whatever the layers of a user's model raise
            raise _not_taken(error) from error
        tell(ROW, row)
    tell(LAYERS, step.layers)


def _model_and_batch(request: Request) -> tuple[Any, Any]:
    from keras_remat.planning.model_argument import model_and_batch

    if isinstance(request.model, str):
        return model_and_batch(request.model, request.batch, request.shapes, request.dtypes)
    import keras

    try:  # it is the caller's own model, so its functions are safe to load
        model = keras.saving.deserialize_keras_object(request.model, safe_mode=False)
    except Exception as error:  # whatever a user's classes raise
        raise _not_taken(error) from error
    if not getattr(model, "compiled", False):
        raise UnsupportedModelError(
            "The model came without its optimizer and loss to the process that compiles it: name "
            "a function that makes it, as package.module:function."
        )
    return model, request.batch


def _not_taken(error: Exception) -> UnsupportedModelError:
    told = " ".join(str(error).split())[:300]
    return UnsupportedModelError(
        f"The model does not run with Keras on JAX, which compiles it for a card: "
        f"{type(error).__name__}: {told}. Its layers, losses and metrics have to be written in "
        "Keras's own ops, and its own classes and functions lie in modules that can be imported "
        "(not in a script or notebook); or name a function that makes it, as "
        "package.module:function."
    )


def initialize_with_zeros() -> None:
    """Makes all of Keras's initializers give zeros in this process: no weight is trained in it, and
    random ones take seconds."""
    import keras
    import numpy as np

    def zeros(self: Any, shape: Any, dtype: Any = None, **more: Any) -> Any:
        return keras.ops.convert_to_tensor(np.zeros(shape, "float32"), dtype)

    method = "__call__"  # of classes, which mypy does not let assign
    kinds = [kind for kind in vars(keras.initializers).values() if isinstance(kind, type)]
    for kind in kinds:
        if issubclass(kind, keras.initializers.Initializer):
            setattr(kind, method, zeros)


def main(path: Path) -> None:
    """Answers the request in a file."""
    with os.fdopen(os.dup(1), "wb") as channel:
        os.dup2(2, 1)

        def tell(kind: str, what: Any) -> None:
            pickle.dump((kind, what), channel)
            channel.flush()

        try:
            answer(pickle.loads(path.read_bytes()), tell)
        except (RematError, ValueError, TypeError, ImportError, OSError) as error:
            tell(FAILED, error)
        else:
            tell(DONE, None)


if __name__ == "__main__":
    # classes are pickled by the name of their module, and this one is called __main__ here
    from keras_remat.cards import process

    process.main(Path(sys.argv[1]))
