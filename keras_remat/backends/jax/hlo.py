"""Compile what another framework has lowered to HLO, for a card that is not there.

``python -m keras_remat.backends.jax.hlo`` is the process in which that happens: Keras on TensorFlow
asks it (:mod:`keras_remat.backends.tensorflow.compiled.card_compiler`), so JAX is never loaded
beside TensorFlow. It reads pickled pairs of a target and a serialized module from its standard
input, and answers each with a pickled :class:`~keras_remat.backends.jax.measure.StepMemory`, or
with the exception. The end of its input ends it.

The HLO is what TensorFlow gives for its CPU. Nothing of a device is in it before it is compiled.
"""

from __future__ import annotations

import os
import pickle
import sys
from typing import Any

import jax

from keras_remat.backends.jax import absent_device, private
from keras_remat.backends.jax.measure import StepMemory, is_out_of_memory, memory_of
from keras_remat.core.target import Target
from keras_remat.errors import RematError, UnsupportedModelError


def compiled_memory(module: bytes, target: Target) -> StepMemory:
    """Returns what a step takes on a card that is not there.

    Args:
        module: a serialized ``HloModuleProto``.
        target: the card.

    Raises:
        MissingPackageError: the compiler is not installed.
        UnsupportedModelError: the compiler does not take the card, or the step.
    """
    (device,) = absent_device.sharding(target).device_set
    try:
        with absent_device.compiler_options() as options:
            return memory_of(private.compile_hlo(module, device, options))
    except jax.errors.JaxRuntimeError as error:
        if is_out_of_memory(error):
            return StepMemory(0, 0, 0, int(target.total_bytes or 0))
        raise UnsupportedModelError(_refused(error)) from error
    except ValueError as error:  # what the front end cannot read
        raise UnsupportedModelError(_refused(error)) from error


def _refused(error: Exception) -> str:
    told = str(error).strip().splitlines() or [type(error).__name__]
    return f"XLA:GPU does not compile the step: {told[0][:200]}"


def main() -> None:
    """Answers until its input ends."""
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # what a compiler prints is no answer
        while True:
            try:
                target, module = pickle.load(sys.stdin.buffer)
            except EOFError:
                return
            answer: Any
            try:
                answer = compiled_memory(module, target)
            except RematError as error:
                answer = error
            pickle.dump(answer, answers)
            answers.flush()


if __name__ == "__main__":
    main()
