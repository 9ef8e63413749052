"""Keras on JAX: trace the trainer's step, plan what XLA will put into memory, run the plan as one compiled step.

The five verbs are :func:`~keras_remat.backends.jax.trace.trace`, :func:`~keras_remat.backends.jax.profile.profile`,
:func:`~keras_remat.backends.jax.lower.lower`, :func:`~keras_remat.backends.jax.measure.measure` and
:func:`~keras_remat.backends.jax.swap.restore`; :func:`~keras_remat.backends.jax.fit_budget.compile_within` joins them to a solver, and
:func:`~keras_remat.backends.jax.swap.swap` puts the result into ``fit``. Imports JAX and Keras, never TensorFlow.
"""

from keras_remat.backends.jax.fit_budget import Attempt, CompiledPlan, compile_within
from keras_remat.backends.jax.lower import lower, lower_plain
from keras_remat.backends.jax.measure import CompiledMemory, device_limit_bytes, device_peak_bytes, measure, memory
from keras_remat.backends.jax.profile import profile
from keras_remat.backends.jax.swap import RematTrainFunction, restore, swap
from keras_remat.backends.jax.trace import JaxTracedStep, trace

__all__ = [
    "Attempt",
    "CompiledMemory",
    "CompiledPlan",
    "JaxTracedStep",
    "RematTrainFunction",
    "compile_within",
    "device_limit_bytes",
    "device_peak_bytes",
    "lower",
    "lower_plain",
    "measure",
    "memory",
    "profile",
    "restore",
    "swap",
    "trace",
]
