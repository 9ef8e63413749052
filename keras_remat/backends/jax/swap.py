"""The compiled step inside ``fit``: installed as the model's train function, guarded, taken out again.

Keras looks ``model.train_function`` up at every step, so replacing it takes effect on the next one. It is called with the trainer's whole
state (weights, seeds and moving averages, optimizer slots, metrics) and returns the new one, so swapping loses nothing.

The state is donated: when a step fails, its input is gone. The first calls are therefore *guarded*: the state is copied to the
host, the result is waited for (JAX reports out of memory asynchronously, and ``fit(verbose=0)`` might never look), and on failure the same
batch is given to the model's own step with the state as it was. Batches of another shape (an odd last batch) always go to the
model's own step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from keras_remat.backends.jax import private
from keras_remat.backends.jax.trace import JaxTracedStep, as_specs


class RematTrainFunction:
    """What ``model.train_function`` is while a plan is installed: ``(state, iterator) → (logs, state)``.

    Args:
        model: the model whose step was traced.
        traced: its traced step.
        compiled: a compiled schedule of it.
        original: the train function to fall back to and to restore.
        guarded_steps: calls of the compiled step that are guarded.
        on_failure: called with the error when a guarded step failed; the original step has taken over for good then.
        is_current: asked before every call; when it says ``False``, the ``fit`` this was made for has ended without notice (an
            exception, Ctrl-C), the original train function comes back and takes the call.
    """

    def __init__(
        self,
        model: Any,
        traced: JaxTracedStep,
        compiled: Any,
        original: Callable[..., Any],
        *,
        guarded_steps: int = 1,
        on_failure: Callable[[Exception], None] | None = None,
        is_current: Callable[[], bool] = lambda: True,
    ):
        self._model = model
        self._is_current = is_current
        self.traced = traced
        self.compiled = compiled
        self.original = original
        self.failure: Exception | None = None
        self.steps = 0
        self._specs = (jax.tree.structure(traced.batch_specs), jax.tree.leaves(traced.batch_specs))
        self._guarded_steps = guarded_steps
        self._on_failure = on_failure
        self._function = private.make_function(model, self._step)

    def __call__(self, state: Any, iterator: Iterator[Any]) -> Any:
        if not self._is_current():
            self.restore()
            return self.original(state, iterator)
        try:
            return self._function(state, iterator)
        except StopIteration:
            raise
        except BaseException:
            self.restore()
            raise

    def run_plain(self, state: Any, batch: Any) -> Any:
        """Runs Keras's own step on one batch."""
        return self.original(state, iter([batch]))

    def restore(self) -> None:
        """Puts the original train function back, unless somebody else has replaced this one meanwhile."""
        if self._model.train_function is self:
            self._model.train_function = self.original

    def _step(self, state: Any, batch: Any) -> Any:
        specs = as_specs(batch)
        if self.failure is not None or (jax.tree.structure(specs), jax.tree.leaves(specs)) != self._specs:
            return self.run_plain(state, batch)
        batch = jax.tree.map(jnp.asarray, batch)
        if self.steps >= self._guarded_steps:
            self.steps += 1
            return self.compiled(state, batch)
        kept = host_copy(state)
        try:
            result = jax.block_until_ready(self.compiled(state, batch))
        except jax.errors.JaxRuntimeError as error:
            self.failure = error
            if self._on_failure is not None:
                self._on_failure(error)
            return self.run_plain(jax.tree.map(jnp.asarray, kept), batch)
        self.steps += 1
        return result


def host_copy(state: Any) -> Any:
    """Returns the state as NumPy arrays that share no memory with the device's."""
    return jax.tree.map(lambda x: np.array(x, copy=True), state)


def swap(model: Any, traced: JaxTracedStep, compiled: Any, **options: Any) -> RematTrainFunction:
    """Installs a compiled step as the model's train function and returns it; one installed before is replaced.

    Args:
        model: the traced model.
        traced: its traced step.
        compiled: from :func:`~keras_remat.backends.jax.fit_budget.compile_within` or :func:`~keras_remat.backends.jax.lower.lower`.
        options: ``guarded_steps``, ``on_failure`` and ``is_current`` of :class:`RematTrainFunction`.
    """
    restore(model)
    model.make_train_function()
    function = RematTrainFunction(model, traced, compiled, model.train_function, **options)
    model.train_function = function
    return function


def restore(model: Any) -> None:
    """Gives the model its own train function back; does nothing when none is installed."""
    while isinstance(model.train_function, RematTrainFunction):
        model.train_function = model.train_function.original
