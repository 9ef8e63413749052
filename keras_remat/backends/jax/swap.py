"""Takes the place of Keras's train function while ``fit`` runs, and gives it back.

Keras looks ``model.train_function`` up at every step, so replacing the attribute takes effect with
the next one. On JAX it is called with the trainer's whole state (weights, seeds and moving
averages, optimizer slots, metrics) and returns the new one: ``(state, iterator) → (logs, state)``.
In between, the :class:`~keras_remat.backends.jax.device.Device` holds the state; every step takes
it from there and leaves the new one. So a call may run no step, one, or several, of whichever
function.

The state is donated, so after a step that raised, Keras holds arrays that are gone. Before the
error passes through, Keras is told which state is current: weights and slots are then those of the
last batch that was trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

from keras_remat.backends import keras_private
from keras_remat.backends.installed import Installed, StepRunner
from keras_remat.backends.jax import private
from keras_remat.backends.jax.device import Device
from keras_remat.backends.jax.sharding import laid_out
from keras_remat.errors import without_inner_frames


class InstalledTrainFunction(Installed):
    """Is the train function of one ``fit``, and asks ``runner`` for every batch.

    Args:
        model, runner: as in :class:`~keras_remat.backends.installed.Installed`.
        device: holds the state while a call runs.
    """

    returns_state = True

    def __init__(self, model: Any, runner: StepRunner, device: Device):
        super().__init__(model, runner)
        self._device = device
        self._is_anew = False  # whether the original was made anew since the last batch

    @without_inner_frames
    def __call__(  # type: ignore[override]  # on JAX Keras's own is called with the state, too
        self, state: private.State, iterator: Any
    ) -> tuple[Any, private.State]:
        caller = self._caller(iterator)
        if caller is None:
            result: tuple[Any, private.State] = self.original(state, iterator)
            return result
        device = self._device
        device.state = state
        try:
            return self._trained(iterator, caller), device.state
        except StopIteration:  # before anything of this call was trained
            raise
        except BaseException as error:
            private.publish_state(self._model, device.state)
            device.processes.fail(error)
            raise
        finally:
            device.state = None

    def _runs_eagerly(self) -> bool:
        return bool(jax.config.jax_disable_jit)

    def synchronize(self) -> None:
        private.wait_for_state(self._model)

    def take_place(self) -> bool:
        anew = super().take_place()
        if anew:
            self._device.forget()
            self._is_anew = True
        return anew

    def restore(self) -> None:
        super().restore()
        self._device.forget()

    def _prepared(self, batch: Any) -> Any:
        arrays = jax.tree.map(
            lambda leaf: leaf if isinstance(leaf, jax.Array) else jax.device_put(leaf), batch
        )
        if self._is_anew:
            self._is_anew = False
            self._build_metrics(arrays)
        return arrays

    def _build_metrics(self, batch: Any) -> None:
        """Builds the metrics of a model that was compiled anew in mid-fit. Keras would build them
        in its next step, but a step that makes variables returns another state than it gets."""
        if self._model.optimizer.built and not keras_private.has_its_metrics(self._model):
            with self.variables():
                keras_private.build(self._model, batch)

    def as_given(self, batch: Any) -> Any:
        """Makes JAX's arrays of a batch, laid over the devices of the active
        ``keras.distribution``."""
        return laid_out(batch)

    def run_plain(self, batch: Any) -> Any:
        return self._device.run_plain(self._model, self.original, batch)

    @contextmanager
    def variables(self) -> Iterator[None]:
        device = self._device
        if device.state is None:
            yield
            return
        private.assign_state(self._model, device.state)
        try:
            yield
        finally:
            device.state = private.state_values(self._model)
            private.purge_state(self._model)
