"""Delays Ctrl-C where it would do damage.

*While PyTorch records a step*, its C++ asks Python how to make each call, and no exception may pass
there. Ctrl-C at that moment ends the process and loses the training (at 4 of 120 random moments of
a small model's recording, PyTorch 2.13). In the callback of a tensor that is freed, Python drops
Ctrl-C.

*While JAX runs a step*, the step consumes the old state. Python handles Ctrl-C when the call
returns, and drops the new state with it: all weights were lost at 4 of 10 random moments of a small
model's plan. Keras's own fit lost them at 7 of 11 (JAX 0.10.2).
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def put_off() -> Iterator[None]:
    """Delays Ctrl-C until the context ends. Pressed a second time, it takes effect at once.

    Known limit: it does nothing outside of Python's main thread, which alone receives Ctrl-C.
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
