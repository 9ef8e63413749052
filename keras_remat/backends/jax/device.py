"""Runs steps on the trainer's state, and measures what the device has in use meanwhile.

A compiled step takes the state, donates it, and gives a new one. Every step runs through
:class:`Device`, which knows the current state. Inside ``fit`` it is the state Keras handed to the
train function, else the one in the model's variables.

*Guard.* A step that fails has consumed its state, or a part of it. If it ran right after
:meth:`Device.snapshot`, the snapshot's copy becomes the state again, whatever the step failed of.
Such a step is waited for, because JAX reports out of memory asynchronously. Arrays that it had not
consumed stay where they are. Arrays that are put back take the place of arrays that are let go
first, so the device never holds the state twice. Outside of ``fit``, where the model must come back
as it was, arrays that somebody else holds (a value that was kept, a teacher that got the student's
by ``assign``) are copied before each step and come back themselves. XLA allocates all that a step
needs when it starts, so a step that ran once will run again.

*Peak.* On a CPU JAX keeps no statistics. The peak is the bytes of all live arrays plus the bytes
that, by buffer assignment, the step allocates beside its arguments; it is exact for what JAX
allocates. On a GPU the peak is the allocator's, if that rose during the step. It cannot be reset.
If it did not rise, the step took at most that, and the peak is found as on a CPU. So it is if a
compilation came between, or if a program ran for the first time: the memory with which kernels are
chosen is not the step's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from keras_remat.backends import interrupts
from keras_remat.backends.host import host_memory_bytes
from keras_remat.backends.jax import private
from keras_remat.backends.jax.lower import compile_step
from keras_remat.backends.jax.measure import (
    added_bytes,
    counted_devices,
    device_statistic,
    first_device,
)
from keras_remat.backends.jax.profile import estimated_profile
from keras_remat.backends.jax.sharding import held_bytes
from keras_remat.backends.jax.trace import JaxTracedStep, as_specs
from keras_remat.backends.processes import Processes
from keras_remat.backends.xla.step_times import StepTimes
from keras_remat.core.graph import Op
from keras_remat.core.schedule import Usage
from keras_remat.core.target import Target

Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class _Kept:
    """Holds what a step may change, as it was before the step.

    Args:
        state: copies of its arrays, on the host.
        spared: position in the state → array that no step consumes, because somebody else holds it.
        refs: mutable arrays outside of the state that the step refers to, with copies of their
            values.
    """

    state: Any
    spared: dict[int, jax.Array]
    refs: list[tuple[Any, Any]]


class Device:
    """Stands for the devices of this process that train, with the state of the one model that
    trains on them.

    Args:
        processes: the processes that train the model; the largest of their measurements counts.
    """

    has_statistics = True
    """Says that a step's peak is known: on a CPU by buffer assignment, else by the allocator."""

    def __init__(self, processes: Processes | None = None) -> None:
        self.processes = processes or Processes()
        self.state: Any = None
        self.times_forgotten = 0
        self._own_step: Any = None
        self.step_times = StepTimes(estimated_profile)
        #: Shapes of a batch → bytes that Keras's own step on it adds, and the batch's bytes.
        self._plain: dict[Any, tuple[int, int]] = {}
        self._peak_before: int | None = None
        self._kept: _Kept | None = None  # of the state before the next step
        self._put_back: _Kept | None = None  # the copies that the state equals after a failed step
        self._spared: dict[int, jax.Array] = {}  # position in the state → array held by others
        self._refs: dict[int, Any] = {}  # id → mutable array that traced steps refer to
        self._expected_peak_bytes, self._compile_s = 0, 0.0
        self._told_peak_bytes = 0  # of the newest step waited for, over all processes
        self._is_measuring = True  # whether the peak of a step is asked for
        self._first_run = False  # whether a program ran for the first time since measuring began

    # ---------------------------------------------------------------- steps

    def run(
        self,
        model: Any,
        step: Callable[[Any, Any], Any],
        batch: Any,
        needed_bytes: int,
        *,
        first: bool = False,
    ) -> Any:
        """Runs ``step(state, batch) → (logs, state)`` on the current state and returns its logs.

        Args:
            model: the model of the state.
            step: consumes the state and returns the new one, in the same containers.
            batch: the batch it trains.
            needed_bytes: bytes it needs beside state and batch.
            first: whether it has not run before.
        """
        kept, self._kept = self._kept, None
        self._put_back = None
        self._first_run |= first
        state = self._consumable(self.current_state(model))
        if self._is_measuring:
            self._expected_peak_bytes = max(
                self._expected_peak_bytes, self.in_use_bytes() + needed_bytes
            )
        started = time.perf_counter()
        with interrupts.put_off():  # until the new state is kept
            try:
                logs, new_state = step(state, batch)
                if kept is not None or self.step_times.times_s is not None:
                    jax.block_until_ready((logs, new_state))
            except BaseException:
                if kept is not None:
                    self._restore(model, kept)
                raise
            if self.step_times.times_s is not None:
                self.step_times.times_s.append(time.perf_counter() - started)
            self._keep(model, new_state)
        return logs

    def snapshot(self, model: Any) -> Callable[[], None]:
        """Copies the state, and mutable arrays that traced steps refer to, to the host. Returns a
        function that puts them back. Outside of ``fit``, steps do not consume arrays that somebody
        else holds until then."""
        spared = private.arrays_held_elsewhere(model) if self.state is None else {}
        state = jax.tree.map(lambda x: np.array(x, copy=True), self.current_state(model))
        kept = self._kept = _Kept(
            state, spared, [(ref, jax.device_get(ref[...])) for ref in self._refs.values()]
        )
        self._spared = spared

        def put_back() -> None:
            self._kept, self._spared = None, spared
            if self._put_back is not kept:
                for leaf in jax.tree.leaves(self.current_state(model)):
                    if not leaf.is_deleted() and not any(leaf is own for own in spared.values()):
                        leaf.delete()
                self._restore(model, kept)

        return put_back

    def note_refs(self, traced: JaxTracedStep) -> None:
        """Notes the mutable arrays a step refers to: they are not in the state, and the step
        changes them."""
        self._refs.update({id(c): c for c in traced.program.constants if private.is_ref(c)})

    def _restore(self, model: Any, kept: _Kept) -> None:
        """Gives consumed arrays of the state their kept values, and puts spared arrays back."""
        leaves, structure = jax.tree.flatten(self.current_state(model))
        copies = jax.tree.leaves(kept.state)
        state = [
            kept.spared.get(at, _uploaded(copy, old.sharding) if old.is_deleted() else old)
            for at, (old, copy) in enumerate(zip(leaves, copies, strict=True))
        ]
        self._keep(model, jax.tree.unflatten(structure, state))
        for ref, value in kept.refs:
            ref[...] = value
        self._put_back = kept

    def _consumable(self, state: Any) -> Any:
        """Returns the state with copies in place of the spared arrays; the copies live as long as
        the step."""
        if not self._spared:
            return state
        leaves, structure = jax.tree.flatten(state)
        copied = [jnp.copy(x) if x is self._spared.get(at) else x for at, x in enumerate(leaves)]
        return jax.tree.unflatten(structure, copied)

    def current_state(self, model: Any) -> Any:
        """Returns the state that the next step takes."""
        return private.state_values(model) if self.state is None else self.state

    def _keep(self, model: Any, state: Any) -> None:
        if self.state is None:
            private.assign_state(model, state)
        else:
            self.state = state

    def run_plain(self, model: Any, train_function: Callable[..., Any], batch: Any) -> Any:
        """Runs Keras's own train function on one batch and returns its logs."""
        specs = as_specs(batch)
        key = (jax.tree.structure(specs), *jax.tree.leaves(specs))
        first = key not in self._plain
        if first:
            # JAX compiles a program once: this is the executable that the train function will find
            started = time.perf_counter()
            state_specs = private.state_specs(model, self.state)
            added = added_bytes(compile_step(self.own_step(model), state_specs, specs))
            batch_bytes = sum(
                math.prod(spec.shape) * spec.dtype.itemsize for spec in jax.tree.leaves(specs)
            )
            self._plain[key] = added, batch_bytes // len(counted_devices())
            self._compile_s += time.perf_counter() - started
        return self.run(
            model,
            lambda state, data: _as_before(state, *train_function(state, iter([data]))),
            batch,
            self._plain[key][0],
            first=first,
        )

    def own_step(self, model: Any) -> Callable[[Any, Any], Any]:
        """Returns the model's own ``train_step``; in the train function always the same one.

        JAX finds the traces and compilations of a method as long as its first object lives, also by
        any equal object. So the object is kept while a train function stays, and no longer.
        Otherwise the next train function, made because the model has changed, would run the step of
        the one before.
        """
        own: Callable[[Any, Any], Any] = self._own_step or model.train_step
        if self.state is not None:
            self._own_step = own
        return own

    def forget(self) -> None:
        """Forgets the model's own step: its train function was given back, or made anew."""
        self._own_step = None
        self._plain.clear()
        self.times_forgotten += 1

    # ---------------------------------------------------------------- steps of others

    def begin_watch(self) -> None:
        """Notes the allocator's peak, where it has one: it cannot be reset."""
        self._peak_before = device_statistic("peak_bytes_in_use")

    def watched_peak_bytes(self) -> int:
        """Returns the most bytes that Keras's own steps can have taken since the watch began. It is
        the allocator's peak if that rose, else the bytes in use and the most that one of the steps
        adds to them."""
        added = max(map(sum, self._plain.values()), default=0)
        expected, peak = self.in_use_bytes() + added, device_statistic("peak_bytes_in_use")
        if peak is None:
            return expected
        return peak if peak != self._peak_before else min(peak, expected)

    def phase_peak_bytes(self) -> int:
        """Returns the allocator's peak if it rose since the watch began; else 0. It does not show a
        lower peak, and there is none on a CPU."""
        peak = device_statistic("peak_bytes_in_use")
        return 0 if peak is None or peak == self._peak_before else peak

    # ---------------------------------------------------------------- memory

    @property
    def name(self) -> str:
        """Returns the first device, e.g. ``"gpu:0"``."""
        device = first_device()
        return f"{device.platform}:{device.id}"

    def measure(self, run: Callable[[], Result], *, wait: bool = True) -> tuple[Result, Usage]:
        """Runs once, and returns the result with the time (without compiling) and the peak.

        If ``wait`` is false, the time is 0, and the peak is that of the last run that was waited
        for.
        """
        if not wait:  # nothing is measured: it costs no more than the step
            self._is_measuring = False
            try:
                return run(), Usage(0.0, self._told_peak_bytes)
            finally:
                self._is_measuring = True
        self._expected_peak_bytes, self._compile_s = self.in_use_bytes(), 0.0
        self._first_run = False
        before = device_statistic("peak_bytes_in_use")
        started = time.perf_counter()
        result = run()
        jax.block_until_ready((result, self.state))
        elapsed_s = time.perf_counter() - started
        after = device_statistic("peak_bytes_in_use")
        peak = self._expected_peak_bytes
        if after is not None:
            rose = after != before and not self._first_run
            peak = after if rose else min(after, peak)
        step_s = elapsed_s - self._compile_s
        step_ns, self._told_peak_bytes = self.processes.most(int(1e9 * step_s), peak)
        return result, Usage(step_ns / 1e9, self._told_peak_bytes)

    def peak_bytes(self) -> int:
        """Returns the bytes that the steps since :meth:`measure` began need, also if they failed,
        but no more than there are."""
        limit = device_statistic("bytes_limit")
        return self._expected_peak_bytes if limit is None else min(limit, self._expected_peak_bytes)

    def in_use_bytes(self) -> int:
        """Returns the allocator's bytes in use; without statistics, those of all arrays on the
        device."""
        counted = device_statistic("bytes_in_use")
        if counted is not None:
            return counted
        arrays = jax.live_arrays()
        return max(held_bytes(arrays, device) for device in counted_devices())

    def total_bytes(self) -> int:
        """Returns all the bytes this process may use on the device. Several devices on one host
        share its memory equally."""
        limit, sharers = device_statistic("bytes_limit"), len(counted_devices())
        if limit is not None:
            return limit
        return host_memory_bytes(sharers * self.in_use_bytes()) // sharers

    def floor_advice(self, op: Op) -> str:
        """Returns no advice: nothing makes an op of XLA need less."""
        return ""


def _as_before(state: Any, logs: Any, new_state: Any) -> tuple[Any, Any]:
    """Returns logs, and the new state in the containers of the old one: a step is compiled for the
    containers that Keras makes."""
    return logs, jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(new_state))


class AbsentDevice(Device):
    """Stands for a card that is not there: no step runs, and nothing of it is measured.

    Args:
        target: the card.
    """

    has_statistics = False

    def __init__(self, target: Target) -> None:
        super().__init__()
        self._target = target

    @property
    def name(self) -> str:
        """Returns the driver's name of the card."""
        return self._target.device

    def in_use_bytes(self) -> int:
        """Returns 0: nothing is in use."""
        return 0

    def total_bytes(self) -> int:
        """Returns all the memory of the card."""
        return self._target.memory_bytes


def _uploaded(value: Any, sharding: Any) -> jax.Array:
    """Returns a copy of an array on the host, lying on the device or devices as ``sharding``
    says."""
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):
        return jnp.array(value)
    return jax.device_put(value, sharding)
