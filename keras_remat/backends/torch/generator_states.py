"""Records where a step saves the state of PyTorch's own generator, and restores it.

``torch.utils.checkpoint`` does so, and with it ``keras.RematScope``, so that a recomputation draws
the same numbers again. ``torch.random.fork_rng`` does so, too. Nothing is drawn while a step is
recorded. So a state stands for the place where it was saved, and a program goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from keras_remat.backends.keras_private import replaced
from keras_remat.backends.torch import private
from keras_remat.backends.torch.recorder import Move, Recorder
from keras_remat.errors import UnsupportedModelError

_SEEDS = (
    "The step seeds PyTorch's generator by torch.{name}. Seed it before fit, or draw by "
    "keras.random with a SeedGenerator."
)
_NOT_ITS_OWN = (
    "The step puts PyTorch's generator into a state that it has not taken down itself. Draw by "
    "keras.random with a SeedGenerator."
)
_IN_A_BRANCH = (
    "A branch of keras.ops.cond takes down, or puts back, the state of PyTorch's generator. Do it "
    "outside of the branch."
)


class _Generator:
    """Stands in for the state functions of one kind of device.

    Args:
        device: the kind of device.
        take: returns the state.
        recorder: notes what happens.
    """

    def __init__(self, device: str, take: Callable[..., torch.Tensor], recorder: Recorder):
        self._device, self._take, self._recorder = device, take, recorder
        self._taken: list[torch.Tensor] = []

    def get_rng_state(self, *given: Any, **options: Any) -> torch.Tensor:
        self._taken.append(self._take(*given, **options))
        self._note(len(self._taken) - 1, is_back=False)
        return self._taken[-1]

    def set_rng_state(self, new_state: torch.Tensor, *_: Any, **__: Any) -> None:
        marks = (mark for mark, taken in enumerate(self._taken) if taken is new_state)
        mark = next(marks, None)
        if mark is None:
            raise UnsupportedModelError(_NOT_ITS_OWN)
        self._note(mark, is_back=True)

    def _note(self, mark: int, *, is_back: bool) -> None:
        if self._recorder.predicate:
            raise UnsupportedModelError(_IN_A_BRANCH)
        recording = self._recorder.recording
        recording.moves.append(Move(len(recording.calls), self._device, mark, is_back))


def _refusing(name: str) -> Callable[..., Any]:
    def seeds(*_: Any, **__: Any) -> Any:
        raise UnsupportedModelError(_SEEDS.format(name=name))

    return seeds


@contextmanager
def recorded(recorder: Recorder) -> Iterator[None]:
    """Makes a recorder note states that a step saves and restores, and refuses seeding."""
    modules: dict[str, tuple[Any, ...]] = {"cpu": (torch, torch.random)}
    if private.device().type == "cuda":
        modules["cuda"] = (torch.cuda, torch.cuda.random)
    with ExitStack() as stack:
        for device, places in modules.items():
            own = _Generator(device, places[0].get_rng_state, recorder)
            new = {"get_rng_state": own.get_rng_state, "set_rng_state": own.set_rng_state}
            new |= {name: _refusing(name) for name in ("manual_seed", "seed")}
            if device == "cuda":
                new |= {name: _refusing(f"cuda.{name}") for name in ("manual_seed_all", "seed_all")}
            for place in places:
                for name, function in new.items():
                    stack.enter_context(replaced(place, name, function))
        yield
