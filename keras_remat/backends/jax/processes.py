"""Lets processes of ``jax.distributed`` exchange values by its key-value store.

The first process collects what the others send, and sends all of it to all. So the processes stay
in step without a program on the devices, and a process that does not answer is an error and no
hang. A process that fails leaves its reason under a key that every waiting process looks at. A
process that waits inside of a program on the devices cannot look. A thread of its own does, and
ends the process, as ``jax.distributed`` does if a process is gone.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any, TypeVar

import jax

from keras_remat.backends.jax import private
from keras_remat.backends.processes import Processes
from keras_remat.errors import ProcessFailedError, RematError, UnsupportedModelError

Result = TypeVar("Result")

#: Seconds to wait for a process that does not come, or does not answer: it may read its data, or
#: compile.
_MEETING_S, _PATIENCE_S = 300.0, 900.0
#: Seconds between two looks at whether a process has failed.
_LOOK_S = 1.0
#: Seconds that a process has to end by itself after another one has failed.
_GRACE_S = 15.0
#: Every fit has a number, the same in all processes, since they run the same script.
_FITS = count()


class JaxProcesses(Processes):
    """Stands for the processes of one ``fit``; see
    :class:`keras_remat.backends.processes.Processes`.

    Args:
        client: client of the key-value store.
        rank: this process's number; the first has 0.
        count: how many there are.
        leave: ends this process.
    """

    def __init__(
        self,
        client: Any = None,
        rank: int | None = None,
        count: int | None = None,
        leave: Callable[[str], None] | None = None,
    ):
        self._client = private.distributed_client() if client is None else client
        self._rank = jax.process_index() if rank is None else rank
        self.count = jax.process_count() if count is None else count
        self._leave = _leave if leave is None else leave
        self._fit, self._messages = "", 0
        self._sent: list[str] = []  # keys of messages that others may still have to read
        self._ended = threading.Event()
        self._decides = False  # whether this process is deciding for all

    def begin(self, setting: Mapping[str, str]) -> None:
        self._fit, self._messages = f"keras_remat/{next(_FITS)}", 0
        self._sent = []
        self._ended.clear()
        first, *others = self._all(setting, _MEETING_S)
        for at, other in enumerate(others, 1):
            differ = [f"{name}={other[name]} and not {first[name]}"
                      for name in first if other[name] != first[name]]  # fmt: skip
            if differ:
                raise UnsupportedModelError(
                    f"Process {at} of {self.count} trains with other options than process 0: "
                    f"{', '.join(differ)}. Give all the same."
                )
        threading.Thread(target=self._watch, daemon=True).start()

    def end(self) -> None:
        self._ended.set()

    def fail(self, error: BaseException) -> None:
        """Tells the others that this process ends the ``fit``, and why."""
        if self._ended.is_set():
            return
        self._ended.set()
        why = f"{type(error).__name__}: {str(error)[:500]}"
        if not isinstance(error, ProcessFailedError):
            self._client.key_value_set(f"{self._fit}/failed/{self._rank}", why)

    def most(self, *numbers: int) -> list[int]:
        return [max(of_all) for of_all in zip(*self._all(numbers), strict=True)]

    def least(self, *numbers: int) -> list[int]:
        return [min(of_all) for of_all in zip(*self._all(numbers), strict=True)]

    def of_first(self, make: Callable[[], Result]) -> Result:
        if self._decides:
            return make()
        self._messages += 1
        if self._rank != 0:
            result, error = self._receive(0, _PATIENCE_S)
        else:
            result, error = self._outcome(make)
            self._send((result, error))
        if error is not None:
            raise error
        decided: Result = result
        return decided

    def _outcome(self, make: Callable[[], Any]) -> tuple[Any, Exception | None]:
        """Returns a decision's result, or its error in a form that can be sent."""
        self._decides = True
        try:
            return make(), None
        except Exception as error:
            try:
                pickle.loads(pickle.dumps(error))
            except Exception:
                return None, RuntimeError(f"{type(error).__name__}: {error}")
            return None, error
        finally:
            self._decides = False

    def of_all(self, make: Callable[[], Result]) -> Result:
        error: RematError | None = None
        try:
            made = make()
        except RematError as cannot:
            error = cannot
        for other in self._all(error):
            if other is not None:
                raise other
        return made

    # ---------------------------------------------------------------- messages

    def _all(self, value: Result, patience_s: float = _PATIENCE_S) -> list[Result]:
        """Returns the values of all, by rank: the first process collects and sends them."""
        self._messages += 1
        before, self._sent = self._sent, []
        if self._rank == 0:
            others = (self._receive(rank, patience_s) for rank in range(1, self.count))
            values = [value, *others]
            self._send(values)
        else:
            self._send(value)
            values = self._receive(0, patience_s)
        for key in before:  # all have come here, so all have read it
            self._client.key_value_delete(key)
        return values

    def _key(self, rank: int, message: int) -> str:
        return f"{self._fit}/{message}/{rank}"

    def _send(self, value: Any) -> None:
        key = self._key(self._rank, self._messages)
        self._client.key_value_set_bytes(key, pickle.dumps(value))
        self._sent.append(key)

    def _receive(self, rank: int, patience_s: float) -> Any:
        """Returns what another process has sent.

        Raises:
            ProcessFailedError: it has failed, or does not answer.
        """
        deadline_s = time.monotonic() + patience_s
        while True:
            try:
                sent = self._client.blocking_key_value_get_bytes(
                    self._key(rank, self._messages), int(1000 * _LOOK_S)
                )
                return pickle.loads(sent)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
            failure = self._failure()
            if failure is not None:
                raise failure
            if time.monotonic() > deadline_s:
                raise ProcessFailedError(rank, f"it does not answer in {patience_s:.0f} s")

    def _failure(self) -> ProcessFailedError | None:
        """Returns why another process has failed; ``None`` where none has."""
        for key, why in self._client.key_value_dir_get(f"{self._fit}/failed"):
            return ProcessFailedError(int(key.rpartition("/")[2]), why)
        return None

    def _watch(self) -> None:
        """Ends this process if another has failed and this one waits inside of a program."""
        while not self._ended.wait(_LOOK_S):
            failure = self._failure()
            if failure is not None:
                if not self._ended.wait(_GRACE_S):
                    self._leave(str(failure))
                return


def _leave(why: str) -> None:
    """Ends this process with a reason, and tells the others that it leaves."""
    print(f"keras_remat: {why}", file=sys.stderr, flush=True)
    leaving = threading.Thread(target=jax.distributed.shutdown, daemon=True)
    leaving.start()
    leaving.join(_GRACE_S)
    os._exit(1)
