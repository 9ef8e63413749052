"""A plugin of pytest under which every ``fit`` of other people's tests has the callback.

    python -m pytest -p with_callback --pyargs keras.src.trainers.trainer_test

A ``fit`` is first asked for under a limit that nothing can meet, which is refused before anything
is trained, and then under a little more than the refusal says is needed: so a plan trains, where
the step can be planned. Data that can be read only once gets a wide limit. What ``fit`` came to is
told at the end. Keras's test of the keys of a history fails: the callback adds its own.
"""

from __future__ import annotations

from collections import Counter
from functools import wraps
from typing import Any

import keras
import pytest

import keras_remat

#: Over what a refusal says is needed, so that a schedule is found at once.
_ROOM = 1.05
#: The least limit in bytes that is taken, and how many limits are tried. Only the tiniest models on
#: PyTorch, whose bytes are not rounded up, keep it: they train plainly.
_TOO_SMALL, _LIMITS = 1024, 6
_came_to: Counter[str] = Counter()


def pytest_configure(config: pytest.Config) -> None:
    """Has every ``fit`` from here on trained with the callback."""
    of_backend = _trainer()
    of_backend.fit = _with_callback(of_backend.fit)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    told = ", ".join(f"{count} {what}" for what, count in _came_to.most_common())
    terminalreporter.write_line(f"fits with the callback: {told}")


def _trainer() -> Any:
    """Returns the class whose ``fit`` models of this backend have."""
    return next(one for one in keras.Model.__mro__ if "fit" in vars(one))


def _with_callback(fit: Any) -> Any:
    @wraps(fit)
    def trained(model: Any, x: Any = None, *args: Any, **options: Any) -> Any:
        given = options.pop("callbacks", None)
        if isinstance(given, keras.callbacks.CallbackList):
            return fit(model, x, *args, callbacks=given, **options)
        others = [] if given is None else list(keras.tree.flatten(given))
        limit: int | str = _TOO_SMALL if _can_be_read_again(x) else "64GiB"
        for _ in range(_LIMITS):
            remat = keras_remat.RematAutotune(limit, "keep", margin=0.0, verbose=0)
            try:
                history = fit(model, x, *args, callbacks=[*others, remat], **options)
            except (keras_remat.InfeasibleBudgetError, keras_remat.ScheduleNotFoundError) as error:
                needed = max(getattr(error, "best_peak_bytes", None) or 0, error.floor_bytes)
                limit = int(_ROOM * max(needed, error.budget_bytes)) + 1
                continue
            _came_to["planned" if remat.plan else "plain"] += 1
            return history
        _came_to["without a plan"] += 1
        return fit(model, x, *args, callbacks=others, **options)

    return trained


def _can_be_read_again(x: Any) -> bool:
    """Returns whether a ``fit`` that is refused leaves its data as they were."""
    return all(hasattr(leaf, "shape") for leaf in keras.tree.flatten(x))
