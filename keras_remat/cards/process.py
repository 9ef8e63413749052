"""Runs the process that compiles for cards: ``python -m keras_remat.cards.process FILE``.

In this process, Keras runs on JAX or on TensorFlow, on the CPU. It reads a pickled request from a
file and writes pickled messages to its standard output; all other prints go to its standard error.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.error import URLError

from keras_remat.backends.versions import check_card_compiler
from keras_remat.core import interpreter
from keras_remat.core.target import Target
from keras_remat.errors import RematError, UnsupportedModelError

#: Kinds of messages. The second half of a message is, in this order: the model's name and batch
#: size, a row, bytes by layer, an exception, the error of a model that does not run on this
#: framework, nothing. No message follows one of the last three.
BEGUN, ROW, LAYERS, FAILED, NOT_TAKEN, DONE = (
    "begun", "row", "layers", "failed", "not taken", "done",
)  # fmt: skip
Tell = Callable[[str, Any], None]


class NotTakenError(Exception):
    """A model does not run on the framework that was to compile it; the message is its error."""


@dataclass(frozen=True)
class ArraySpec:
    """Describes an array of a batch.

    Args:
        shape: shape of the array, the samples included.
        dtype: name of the array's dtype.
    """

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Request:
    """Holds a question: a model, a batch and cards.

    Args:
        model: a model as Keras serializes it, or the name of a file or function.
        batch: arrays as :class:`ArraySpec`, or a batch size; ``None`` where it follows from the
            model.
        targets: the cards.
        shapes, dtypes: as in :func:`keras_remat.planning.model_argument.model_and_batch`.
        margin, time_limit_s, seed: as in :func:`keras_remat.cards.will_it_fit.will_it_fit`.
        search_path: folders in which modules are found.
        settings: settings of Keras, as functions of ``keras.config`` → their argument.
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
        NotTakenError: the model does not run on the framework of this process.
        RematError, ValueError, OSError: the request cannot be answered.
    """
    if any(not target.is_live for target in request.targets):
        check_card_compiler()
    sys.path += [folder for folder in request.search_path if folder not in sys.path]
    import keras

    from keras_remat.backends.batches import batch_size_of
    from keras_remat.backends.example_batches import example_batch
    from keras_remat.cards.rows import AskedStep

    initialize_with_zeros()
    for name, value in request.settings.items():
        getattr(keras.config, name)(value)
    model, batch = _model_and_batch(request)
    model.run_eagerly, model.jit_compile = False, True  # the question is about the compiled step
    batch = example_batch(model, batch, seed=None)
    tell(BEGUN, (model.name, batch_size_of(batch)))
    step = AskedStep(
        model, batch, _card_backend(),
        margin=request.margin, time_limit_s=request.time_limit_s, seed=request.seed,
    )  # fmt: skip
    try:
        for row in step.rows(request.targets, lambda early: tell(ROW, early)):
            tell(ROW, row)
    except RematError:
        raise
    except Exception as error:  # whatever the layers of a user's model raise
        raise _not_taken(error) from error
    tell(LAYERS, step.layers)


def _model_and_batch(request: Request) -> tuple[Any, Any]:
    import keras

    from keras_remat.planning.model_argument import NamedModelError, model_and_batch

    if isinstance(request.model, str):
        try:
            return model_and_batch(request.model, request.batch, request.shapes, request.dtypes)
        except (RematError, NamedModelError):
            raise
        except Exception as error:  # whatever a user's function or layers raise
            if _wants_network(error):
                raise UnsupportedModelError(
                    f"{request.model!r} fetches what cannot be fetched here ({_told(error)}). "
                    "Weights do not change the answer: build the model without them, with "
                    "weights=None for instance; or build it once where there is a network, if it "
                    "keeps what it fetched."
                ) from error
            if isinstance(error, OSError):
                raise
            raise _not_taken(error) from error

    try:  # it is the caller's own model, so its functions are safe to load
        model = keras.saving.deserialize_keras_object(
            request.model, custom_objects=_own_classes(request.model), safe_mode=False
        )
    except Exception as error:  # whatever a user's classes raise
        raise _not_taken(error) from error
    if not getattr(model, "compiled", False):
        raise UnsupportedModelError(
            "The model came without its optimizer and loss to the process that compiles it: name "
            "a function that makes it, as package.module:function."
        )
    return model, request.batch


def _own_classes(config: Any) -> dict[str, Any]:
    """Returns name → class or function for all that a config names outside of Keras.

    Keras itself looks for registered ones only. Those that cannot be imported are left to it.
    """
    found: dict[str, Any] = {}
    if isinstance(config, (list, tuple)):
        for part in config:
            found |= _own_classes(part)
    if not isinstance(config, Mapping):
        return found
    for part in config.values():
        found |= _own_classes(part)
    module, name = config.get("module"), config.get("class_name")
    if name == "function":
        name = config.get("config")
    if isinstance(module, str) and isinstance(name, str) and module.split(".")[0] != "keras":
        with suppress(ImportError, AttributeError):
            found[config.get("registered_name") or name] = getattr(import_module(module), name)
    return found


def _wants_network(error: BaseException | None) -> bool:
    """Returns whether an exception, or what led to it, says that something was not fetched."""
    while error is not None:
        of_requests = type(error).__module__.split(".")[0] in ("requests", "httpx", "urllib3")
        if isinstance(error, (URLError, ConnectionError)) or of_requests:
            return True
        if "URL fetch failure" in str(error):  # keras.utils.get_file
            return True
        error = error.__cause__ or error.__context__
    return False


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _not_taken(error: Exception) -> NotTakenError:
    return NotTakenError(_told(error))


def _card_backend() -> Callable[[Target], Any]:
    """Returns a function that makes the backend for a card, on the framework that Keras runs on."""
    import keras

    if keras.backend.backend() == "jax":
        from keras_remat.backends.jax import JaxBackend

        return JaxBackend
    from keras_remat.backends.tensorflow.compiled import CompiledBackend
    from keras_remat.backends.xla.card_compiler import CardCompiler

    compiler = CardCompiler()
    return lambda target: CompiledBackend(target, compiler)


def initialize_with_zeros() -> None:
    """Makes all of Keras's initializers give zeros in this process.

    No weight is trained in it, and random ones take seconds.
    """
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

        interpreter.end_with_parent(path.parent)
        try:
            answer(pickle.loads(path.read_bytes()), tell)
        except NotTakenError as error:
            tell(NOT_TAKEN, str(error))
        except (RematError, ValueError, TypeError, ImportError, OSError) as error:
            tell(FAILED, error)
        else:
            tell(DONE, None)


if __name__ == "__main__":
    # classes are pickled by the name of their module, and this one is called __main__ here
    from keras_remat.cards import process

    process.main(Path(sys.argv[1]))
