"""Keeps Keras's progress bar short: four more numbers would wrap every epoch's line.

History, and every other callback, gets all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import keras

#: Log keys that the bar does not show.
HIDDEN_KEYS = frozenset({"remat_batch_size", "remat_samples_per_s"})


def shorten_bars(callbacks: Iterable[Any]) -> Callable[[], None]:
    """Makes the bars among a ``fit``'s callbacks leave out some keys; returns an undo function."""
    bars = [one for one in callbacks if isinstance(one, keras.callbacks.ProgbarLogger)]
    for bar in bars:
        bar.on_epoch_end = partial(_end_epoch, bar.on_epoch_end)

    def undo() -> None:
        for bar in bars:
            vars(bar).pop("on_epoch_end", None)

    return undo


def _end_epoch(
    on_epoch_end: Callable[[int, Mapping[str, Any]], None],
    epoch: int,
    logs: Mapping[str, Any] | None = None,
) -> None:
    shown = {key: value for key, value in (logs or {}).items() if key not in HIDDEN_KEYS}
    on_epoch_end(epoch, shown)
