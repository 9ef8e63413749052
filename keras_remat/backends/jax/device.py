"""Where the trainer's state is, what a step does to it, and what the device had in use meanwhile.

A compiled step takes the state, donates it, and gives a new one. Whoever runs a step does so
through :class:`Device`, which knows the current state: inside ``fit`` the one Keras handed to the
train function, else the one in the model's variables.

*Guard.* A step that fails has consumed its state, or a part of it. A step that runs right after
:meth:`Device.snapshot` gives the copy back as the state, whatever it failed of, and is waited for,
because JAX reports out of memory asynchronously. What it had not consumed stays where it is, and
what is put back takes the place of what is let go first: the device never holds the state twice.
Outside of ``fit``, where the model must come back as it was, arrays that somebody else holds (a
value that was kept, a teacher that got the student's by ``assign``) are copied before each step and
come back themselves.
XLA allocates all that a step needs when it starts, so one that ran once will run again.

*Peak.* On a CPU, where JAX keeps no statistics: bytes of all live arrays, plus what buffer
assignment says the step allocates beside its arguments, exact for what JAX allocates. On a GPU the
allocator's peak, where it rose during the step. It cannot be reset, so where it did not rise the
step took at most that, and the figure is made as on a CPU. So it is where a compilation came
between, or where a program ran for the first time: what kernels are chosen by is not the step's.
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
    StepMemory,
    counted_devices,
    device_statistic,
    first_device,
    memory,
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
    """Says what a step may move, from before it.

    Args:
        state: copies on the host.
        spared: by position in the state, arrays that no step consumes: somebody else holds them.
        refs: what the step refers to outside of the state, with copies of the values.
    """

    state: Any
    spared: dict[int, jax.Array]
    refs: list[tuple[Any, Any]]


class Device:
    """Stands for the devices of this process that train, with the state of the one model that
    trains on them.

    Args:
        processes: those that train it; of what they measure, the most is told.
    """

    has_statistics = True
    """Says that a step's peak can be told: on a CPU by buffer assignment, else by the allocator."""

    def __init__(self, processes: Processes | None = None) -> None:
        self.processes = processes or Processes()
        self.state: Any = None
        self.times_forgotten = 0
        self._own_step: Any = None
        self.step_times = StepTimes(estimated_profile)
        #: Of Keras's own step that ran, by the shapes of its batch, and the batch's bytes.
        self._plain: dict[Any, tuple[StepMemory, int]] = {}
        self._peak_before: int | None = None
        self._kept: _Kept | None = None  # of the state before the next step
        self._put_back: _Kept | None = None  # what the state is equal to, after a step that failed
        self._spared: dict[int, jax.Array] = {}  # by position in the state: held by others, too
        self._refs: dict[int, Any] = {}  # by id: what the traced steps refer to
        self._expected_peak_bytes, self._compile_s = 0, 0.0
        self._told_peak_bytes = 0  # what all processes know of the newest step that was waited for
        self._is_measuring = True  # whether what a step takes is asked for
        self._first_run = False  # whether a program ran for the first time since measuring began

    # ---------------------------------------------------------------- steps

    def run(
        self,
        model: Any,
        step: Callable[[Any, Any], Any],
        batch: Any,
        used: StepMemory,
        *,
        first: bool = False,
    ) -> Any:
        """Runs ``step(state, batch) → (logs, state)`` on the current state and returns its logs.

        Args:
            model: whose state it is.
            step: consumes the state and returns the new one, in the same containers.
            batch: what it trains.
            used: what it allocates.
            first: whether it has not run before.
        """
        kept, self._kept = self._kept, None
        self._put_back = None
        self._first_run |= first
        state = self._consumable(self.current_state(model))
        if self._is_measuring:
            self._expected_peak_bytes = max(
                self._expected_peak_bytes, self.in_use_bytes() + used.added_bytes
            )
        started = time.perf_counter()
        with interrupts.put_off():  # until what the step returns is kept
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
        """Copies the state, and what the traced steps refer to, to the host; what it returns puts
        them back. Outside of ``fit`` arrays that somebody else holds are not consumed meanwhile."""
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
        """Takes down what a step refers to: it is no part of the state, and moves with a step."""
        self._refs.update({id(c): c for c in traced.program.constants if private.is_ref(c)})

    def _restore(self, model: Any, kept: _Kept) -> None:
        """Gives every array of the state that was consumed its kept value, and those that were
        spared back."""
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
        """Returns a state without the arrays that are spared; their copies live as long as the
        step."""
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
            used = memory(
                compile_step(self.own_step(model), private.state_specs(model, self.state), specs)
            )
            batch_bytes = sum(
                math.prod(spec.shape) * spec.dtype.itemsize for spec in jax.tree.leaves(specs)
            )
            self._plain[key] = used, batch_bytes // len(counted_devices())
            self._compile_s += time.perf_counter() - started
        return self.run(
            model,
            lambda state, data: _as_before(state, *train_function(state, iter([data]))),
            batch,
            self._plain[key][0],
            first=first,
        )

    def own_step(self, model: Any) -> Callable[[Any, Any], Any]:
        """Returns the model's own ``train_step``, inside of a call of the train function always the
        same object.

        JAX finds what it traced and compiled of a method as long as the first object of it lives,
        under any that is equal to it. So it is kept while a train function stays, and no longer:
        the next one, made because the model has changed, would run the step of the one before.
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
        """Returns the most that Keras's own steps can have taken since then: the allocator's peak
        where it rose, else what is in use and what the largest of them adds to that."""
        added = max((used.added_bytes + batch for used, batch in self._plain.values()), default=0)
        expected, peak = self.in_use_bytes() + added, device_statistic("peak_bytes_in_use")
        if peak is None:
            return expected
        return peak if peak != self._peak_before else min(peak, expected)

    def phase_peak_bytes(self) -> int:
        """Returns the allocator's peak where it rose since then; else 0: it tells nothing of what
        took less, and nothing at all on a CPU."""
        peak = device_statistic("peak_bytes_in_use")
        return 0 if peak is None or peak == self._peak_before else peak

    # ---------------------------------------------------------------- memory

    @property
    def name(self) -> str:
        """Returns the first device, e.g. ``"gpu:0"``."""
        device = first_device()
        return f"{device.platform}:{device.id}"

    def measure(self, run: Callable[[], Result], *, wait: bool = True) -> tuple[Result, Usage]:
        """Runs once, waits for it, and returns its result with its time (compiling left out) and
        the peak; where it is not waited for, the peak is that of the last one that was."""
        if not wait:  # it costs no more than the step
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
        """Returns what the steps since :meth:`measure` began need, also when they failed, but no
        more than there is."""
        limit = device_statistic("bytes_limit")
        return self._expected_peak_bytes if limit is None else min(limit, self._expected_peak_bytes)

    def in_use_bytes(self) -> int:
        """Returns bytes of all arrays on the device, or what its allocator says."""
        counted = device_statistic("bytes_in_use")
        if counted is not None:
            return counted
        arrays = jax.live_arrays()
        return max(held_bytes(arrays, device) for device in counted_devices())

    def total_bytes(self) -> int:
        """Returns all the memory this process may use on the device; of the host's an equal part,
        where several devices share it."""
        limit, sharers = device_statistic("bytes_limit"), len(counted_devices())
        if limit is not None:
            return limit
        return host_memory_bytes(sharers * self.in_use_bytes()) // sharers

    def floor_advice(self, op: Op) -> str:
        """Returns no advice: nothing makes an op of XLA need less."""
        return ""


def _as_before(state: Any, logs: Any, new_state: Any) -> tuple[Any, Any]:
    """Returns logs, and a new state in the containers of the old one: a step is compiled for those
    that Keras makes."""
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
        """Returns what the driver calls it."""
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
