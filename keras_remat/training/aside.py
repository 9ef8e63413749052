"""Stands aside while nothing is to be done: the batches stay as they are given, and the plain step
fits with room to spare.

The train function is then Keras's own again, called by ``fit`` with the user's own iterator. What
its steps take is watched from the callback's hooks. Where a step comes near the limit, the
installed train function takes its place again.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from keras_remat.backends.installed import Installed
from keras_remat.backends.keras_private import samples_counted, samples_of_batches
from keras_remat.core.schedule import Usage
from keras_remat.training import driver, steps
from keras_remat.training.fit_state import FitState
from keras_remat.training.shape_state import PlainShape
from keras_remat.training.tools import running_tools
from keras_remat.training.watch import Watch, Watched


class Aside:
    """Watches the steps that Keras's own train function trains, and counts them.

    Args:
        installed: the train function, which stands aside from now on.
        fit: state of the ``fit`` that would train them otherwise.
        loader_size: samples of a batch.
        ended: gets the numbers of the batches that Keras has trained, the newest ones at least.
        may_grow: whether larger batches may come.

    Attributes:
        stays: whether there is still nothing to be done.
    """

    def __init__(
        self,
        installed: Installed,
        fit: FitState,
        loader_size: int,
        ended: deque[int],
        may_grow: bool,
    ):
        installed.stand_aside()
        self.stays = True
        self._installed, self._fit, self._may_grow = installed, fit, may_grow
        self._a_call = fit.model.steps_per_execution  # batches
        self._loader_size = loader_size
        device = running_tools(fit).backend.device
        self._watch = Watch(installed, device, fit.options.profile_steps)
        self._newest_begun = -1
        self._ended = ended
        self._counted: int | None = None
        self._counted_before = 0  # of validation, where the model does not reset its loss

    def epoch_begins(self) -> None:
        """Begins to count an epoch's samples."""
        self._newest_begun, self._counted = -1, None
        self._counted_before = samples_counted(self._fit.model) or 0
        self._ended.clear()

    def passes(self, batch: int) -> bool:
        """Notes a batch, if no look is due; returns whether that is so."""
        if not (self.stays and self._installed.is_aside and self._watch.passes()):
            return False
        self._newest_begun = batch
        return True

    def batch_begins(self, batch: int) -> None:
        """Notes that Keras announces a batch, and looks at those before it where that is due."""
        self._newest_begun = batch
        watched = self._watch.step_begins()
        if watched is not None:
            self._take(watched)

    def pauses(self) -> None:
        """Looks at the steps before something that is no training."""
        if self._watch.steps:
            self._counted = samples_counted(self._fit.model)
            self._take(self._watch.look())

    def epoch_ends(self, epoch_iterator: Any) -> None:
        """Corrects the count: the last call may have got fewer samples than others, or none.

        Args:
            epoch_iterator: Keras's, of the epoch; ``None`` where it is not known.
        """
        self.pauses()
        if self._newest_begun < 0:
            return
        begun = self._newest_begun + self._a_call
        known = samples_of_batches(epoch_iterator, begun)
        if known is None:
            missing = self._missing_of_the_last_call(is_loop=epoch_iterator is None)
        else:
            samples, batches = known
            missing = begun * self._loader_size - samples, begun - batches
        self._fit.count_watched(-missing[1], -missing[0], Usage(0.0, 0))

    def _missing_of_the_last_call(self, *, is_loop: bool) -> tuple[int, int]:
        """Returns how many samples and steps fewer the last call got than others, by Keras's count.

        The count is too low if another callback resets Keras's metrics in mid-epoch: where batches
        have one size, the call then counts as any other.

        Args:
            is_loop: whether a loop of the user's own trains. Its ``train_on_batch`` resets the
                metrics, so the count is the last batch's; in some Keras versions it does not.
        """
        fit, size = self._fit, self._loader_size
        is_empty = not any(batch >= self._newest_begun for batch in self._ended)
        samples, steps = (size * self._a_call, self._a_call) if is_empty else (0, 0)
        counted = self._counted or 0
        is_last = is_loop and counted <= size
        counted -= 0 if is_last else self._counted_before
        if counted <= 0:  # a step of the model's own counts none
            return samples, steps
        less = fit.counter.samples - samples - counted
        if is_last and counted <= size <= less:
            return size - counted, 0
        if self._may_grow:
            return samples + less, steps
        return (samples + less, steps + less // size) if 0 <= less < size * self._a_call else (
            samples, steps
        )  # fmt: skip

    def _take(self, watched: Watched) -> None:
        """Counts the steps that were watched, and checks whether they came near the limit."""
        count = self._a_call * watched.steps
        usage = Usage(watched.usage.time_s / self._a_call, watched.usage.peak_bytes)
        self._fit.count_watched(count, self._loader_size * count, usage)
        is_near = not self._fit.limit.fits(usage.peak_bytes)
        shape = self._fit.record.running.reference_shape
        # where batches may grow, one of another shape may have had this peak
        if isinstance(shape, PlainShape) and not (is_near and self._may_grow):
            driver.watched(self._fit, shape, usage)
        self.stays = not is_near and steps.runs_plain(self._fit, may_grow=self._may_grow)
        self._watch.look_ends()
