"""Compiles steps for cards that are not there, until their buffers are assigned.

``python -m keras_remat.backends.jax.hlo FOLDER`` is the process that does it;
:mod:`keras_remat.backends.xla.card_compiler` asks it. It reads pickled pairs of a target and a
module from its standard input, and answers each with a pickled
:class:`~keras_remat.backends.xla.card_compiler.CardStep`, or with the exception. It ends when its
input ends, and removes the folder.

XLA has no option that ends a compilation when buffers are assigned. So every module is compiled in
a fork of this process, which has loaded JAX and begun nothing. The fork reads the files that XLA
writes on its way before XLA writes the first kernel, and ends there.

A module is StableHLO bytecode, or the HLO that TensorFlow gives for its CPU. Neither contains
anything of a device before it is compiled.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax

from keras_remat.backends.jax import absent_device, private
from keras_remat.backends.jax.measure import refused
from keras_remat.backends.xla.card_compiler import CardStep
from keras_remat.core.target import Target
from keras_remat.errors import RematError, UnsupportedModelError

_POLL_S = 0.02
_ALLOCATION = re.compile(r"^allocation \d+: size (\d+), (?:page \d+, )?(.*)$", re.MULTILINE)
#: Endings of file names: the module, its buffers, and a file that XLA writes anew after both and
#: before the first kernel (JAX 0.10.2 and 0.11.2; where it does not, a step is compiled to its
#: end).
_OPTIMIZED, _NEXT = "gpu_after_optimizations.txt", "debug_options"
_ASSIGNED = "gpu_after_optimizations-buffer-assignment.txt"
#: XLA's error if Triton's tiles do not fit a product and the ops fused with it. XLA tries no other
#: tiles for a card that is not there, so the products of such a step are left to cuBLAS.
_NO_TILES, _WITHOUT_TRITON = "output tile sizes", {"xla_gpu_enable_triton_gemm": False}


def compiled_to_the_end(module: bytes, target: Target, written: Path | None = None) -> Any:
    """Compiles a module for a card that is not there, kernels included, and returns its memory
    analysis.

    Args:
        module: StableHLO bytecode, or a serialized ``HloModuleProto``.
        target: the card.
        written: folder for the files that XLA writes on its way.

    Raises:
        MissingPackageError: the compiler is not installed.
        UnsupportedModelError: the compiler does not take the card, or the step.
    """
    try:
        with absent_device.compiler_options(written) as options:
            return _compiled(module, absent_device.device(target), options)
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # the front end's is a ValueError
        raise UnsupportedModelError(refused(error, "XLA:GPU")) from error


def _compiled(module: bytes, card: Any, options: dict[str, Any]) -> Any:
    try:
        return private.compile_module(module, card, options)
    except jax.errors.JaxRuntimeError as error:
        if _NO_TILES not in str(error):
            raise
        return private.compile_module(module, card, options | _WITHOUT_TRITON)


def step_in(written: Path) -> CardStep:
    """Reads a step's memory and module from the files XLA wrote once its buffers were assigned.

    Args:
        written: the folder.

    Raises:
        UnsupportedModelError: XLA wrote other files than are known.
    """
    sizes: Counter[str] = Counter()
    for nbytes, of in _ALLOCATION.findall(_read(written, _ASSIGNED)):
        is_argument, is_result = of.startswith("parameter"), "maybe-live-out" in of
        sizes["argument"] += is_argument * int(nbytes)
        sizes["output"] += is_result * int(nbytes)
        sizes["alias"] += (is_argument and is_result) * int(nbytes)
        sizes["temp"] += ("preallocated-temp" in of and not is_result) * int(nbytes)
    return CardStep(
        argument_size_in_bytes=sizes["argument"],
        output_size_in_bytes=sizes["output"],
        alias_size_in_bytes=sizes["alias"],
        temp_size_in_bytes=sizes["temp"],
        text=_read(written, _OPTIMIZED),
    )


def _read(written: Path, name: str) -> str:
    paths = list(written.glob(f"*{name}"))
    if len(paths) != 1:
        raise UnsupportedModelError(
            f"XLA of JAX {jax.__version__} wrote {len(paths)} files *{name} of a step, and one is "
            "read: its bytes are not known."
        )
    return paths[0].read_text(encoding="utf-8", errors="replace")


def _is_written(written: Path) -> bool:
    """Returns whether XLA has finished the files that :func:`step_in` reads."""
    read = [*written.glob(f"*{_OPTIMIZED}"), *written.glob(f"*{_ASSIGNED}")]
    newest_ns = max((path.stat().st_mtime_ns for path in read), default=0)
    return len(read) > 1 and any(
        path.stat().st_mtime_ns > newest_ns for path in written.glob(f"*{_NEXT}")
    )


def _answer(module: bytes, target: Target, written: Path) -> Any:
    """Returns a step's memory and module, or the error, as soon as it is known."""
    ended: list[Any] = []

    def compile_step() -> None:
        try:
            ended.append(compiled_to_the_end(module, target, written))
        except Exception as error:  # whatever a compiler raises
            known = isinstance(error, RematError)
            ended.append(error if known else UnsupportedModelError(refused(error, "XLA:GPU")))

    compiling = threading.Thread(target=compile_step, daemon=True)
    compiling.start()
    while compiling.is_alive() and not _is_written(written):
        time.sleep(_POLL_S)
    if ended and isinstance(ended[0], Exception):
        return ended[0]
    try:
        return step_in(written)
    except UnsupportedModelError as error:
        return error


def _in_a_fork(module: bytes, target: Target) -> Any:
    """Returns the answer of a fork of this process; the fork ends with it."""
    told, tell = os.pipe()
    with TemporaryDirectory(prefix="keras_remat_") as written:
        fork = os.fork()
        if not fork:
            try:
                os.close(told)
                with os.fdopen(tell, "wb") as answer:
                    pickle.dump(_answer(module, target, Path(written)), answer)
            finally:
                os._exit(0)
        os.close(tell)
        with os.fdopen(told, "rb") as answer:
            pickled = answer.read()
        os.waitpid(fork, 0)
    if not pickled:
        return UnsupportedModelError(
            "The process that compiles for cards ended, for want of memory for instance."
        )
    return pickle.loads(pickled)


def main(folder: Path) -> None:
    """Answers until its input ends."""
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # a compiler's output is no answer
        while True:
            try:
                target, module = pickle.load(sys.stdin.buffer)
            except EOFError:
                break
            pickle.dump(_in_a_fork(module, target), answers)
            answers.flush()
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
