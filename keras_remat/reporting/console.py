"""Shows progress on a terminal, in a file or in a notebook while a ``fit`` runs.

Keras redraws its progress bar in place: it goes back to the start of the line and writes over it.
So on a terminal this module takes the line the cursor is in, and leaves the cursor at the start of
an empty one; Keras's bar then comes back as it was. A file and a notebook keep all that is written,
so they get whole lines, and only for tasks that take long.

* A task is drawn when it begins and ticks twice a second, from a thread: a long task is often one
  call into a framework.
* Tasks that have ended are summed up in one line when the step is swapped, or when ``fit`` ends.
* Lines are under 80 columns wide, on a wider terminal 100, and never wider than it.

Known limit: a bar that was drawn into a file before a task began has its line ended there, and
Keras draws it again on the next one.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TextIO

from tqdm import tqdm

from keras_remat.core.plan_record import PlanRecord
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Solution
from keras_remat.reporting.fit_report import WIDTH, AutotuneReport
from keras_remat.reporting.text import percent_over
from keras_remat.units import byte_unit, format_seconds

#: Most columns on a terminal.
_MOST = 100
_NAME = "keras_remat  "
#: Seconds between two drawings on a terminal, before a file's first line, and between its later
#: lines.
_TICK_S, _LONG_S, _AGAIN_S = 0.5, 1.0, 30.0
#: Tasks that took fewer seconds are left out of the summary.
_SHORT_S = 0.05


class Console:
    """Shows tasks, the swap and the verdict of one ``fit``.

    Args:
        stream: the stream to write to; ``None`` is standard output, where Keras's bar is.
        verbose: 0 shows nothing, 1 tasks, swap and verdict, 2 every event instead of tasks.
        ticking: whether a thread draws the running task again and again.

    Attributes:
        bar_is_open: whether Keras's bar stands in the current line; the callback sets it. A file or
            a notebook then gets a line break first.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        verbose: int = 1,
        *,
        clock: Callable[[], float] = time.perf_counter,
        ticking: bool = True,
    ):
        self._stream = sys.stdout if stream is None else stream
        self._verbose, self._clock, self._ticking = verbose, clock, ticking
        self._live = _is_terminal(self._stream)
        self._lock = threading.Lock()
        self._running: list[_Task] = []
        self._done: dict[str, float] = {}
        self.bar_is_open = False

    def __reduce__(self) -> tuple[type[Console], tuple[None, int]]:
        """Gives a copy a console of its own.

        Searches over hyperparameters copy callbacks, and send them to other processes.
        """
        return Console, (None, self._verbose)

    # ---------------------------------------------------------------- tasks

    @contextmanager
    def task(self, text: str) -> Iterator[None]:
        """Shows that something takes time, from now until the block is left.

        Args:
            text: what is being done, such as ``"solving for the schedule"``. The summary shows its
                first word, or ``"planning"`` where that word does not end in "ing".
        """
        task = _Task(text, self._clock())
        self._running.append(task)
        ended = threading.Event()
        if self._verbose == 1:
            self.tick()
            if self._ticking:
                with suppress(RuntimeError):  # without room for a thread, nothing ticks
                    threading.Thread(
                        target=self._tick_until, args=(ended,), name="keras_remat", daemon=True
                    ).start()
        try:
            yield
        finally:
            ended.set()
            with self._lock:
                self._running.remove(task)
                seconds = self._clock() - task.began_s
                if not self._running:  # an inner task is a part of the outer one
                    first = text.split()[0]
                    word = first if first.endswith("ing") else "planning"
                    self._done[word] = self._done.get(word, 0.0) + seconds
                self._clear()

    def tick(self) -> None:
        """Draws the running task as it is now; a file gets a line only if the task takes long."""
        with self._lock:
            if self._verbose != 1 or not self._running:
                return
            task = self._running[-1]
            seconds = self._clock() - task.began_s
            if self._live:
                self._clear()
                self._write(self._cut(f"{_NAME}{task.text} {format_seconds(round(seconds, 1))}"))
            elif seconds >= task.next_line_s:
                task.next_line_s = seconds + _AGAIN_S
                self._line(f"{_NAME}{task.text} … {format_seconds(round(seconds))}")

    def _tick_until(self, ended: threading.Event) -> None:
        while not ended.wait(_TICK_S):
            self.tick()

    # ---------------------------------------------------------------- lines that stay

    def swap_line(self, plan: PlanRecord, limit_bytes: int) -> None:
        """Shows the tasks' times, and the predicted peak and time of a new plan's step."""
        self.tasks_line()
        plain_bytes, plan_bytes = plan.store_all.peak_bytes, plan.predicted.peak_bytes
        name, unit = byte_unit(max(plain_bytes, plan_bytes))
        peaks = f"{plain_bytes / unit:.1f} -> {plan_bytes / unit:.1f} {name}"
        schedule = plan.solution.schedule
        recomputed, ops = len(schedule.recomputed), len(set(schedule.order))
        again = f"{recomputed} of {ops} ops run again" if recomputed else "no op runs again"
        self._say(
            f"{peaks} (limit {limit_bytes / unit:.1f}) · predicted {100 * plan.overhead:+.0f} % "
            f"time · {again}"
        )

    def tasks_line(self) -> None:
        """Shows one line with the tasks since the last such line, if there were any."""
        parts = [
            f"{word} {format_seconds(float(f'{seconds:.2g}'))}"
            for word, seconds in self._done.items()
            if seconds >= _SHORT_S
        ]
        self._done.clear()
        if parts:
            self._say(" · ".join(parts))

    def event(self, step: int, kind: str, message: str) -> None:
        """Shows an event, if all events are shown."""
        if self._verbose == 2:
            self._say(f"step {step}: {kind}: {message}")

    def verdict(self, report: AutotuneReport) -> None:
        """Says how the ``fit`` ended: plain step and final step side by side."""
        self.tasks_line()
        for line in report.verdict().splitlines():
            if self._verbose:
                self._line(self._cut(line))

    def _say(self, text: str) -> None:
        """Prints lines that begin with the package's name, and wraps those that are too long."""
        if not self._verbose:
            return
        indent = " " * len(_NAME)
        width = max(self._width, 2 * len(_NAME))  # a terminal that is narrower wraps by itself
        for line in textwrap.wrap(
            text, width, initial_indent=_NAME, subsequent_indent=indent,
            break_on_hyphens=False,
        ):  # fmt: skip
            self._line(line)

    # ---------------------------------------------------------------- the stream

    @property
    def _width(self) -> int:
        if not self._live:
            return WIDTH
        return min(_MOST, shutil.get_terminal_size((80, 24)).columns - 1)

    def _cut(self, text: str) -> str:
        return text if len(text) <= self._width else text[: self._width - 1] + "…"

    def _clear(self) -> None:
        """Empties the cursor's line on a terminal; Keras's bar comes back by itself."""
        if self._live and self._verbose:
            self._write("\r\x1b[2K")

    def _line(self, text: str) -> None:
        if self._live:
            self._clear()
        elif self.bar_is_open:
            self._write("\n")
        self.bar_is_open = False
        self._write(f"{text}\n")

    def _write(self, text: str) -> None:
        """Writes text; a stream that is closed, full or gone must not cost the user the
        training."""
        if self._stream is None:
            return
        with suppress(OSError, ValueError):
            try:
                self._stream.write(text)
            except UnicodeEncodeError:  # a console of another encoding
                self._stream.write(text.encode("ascii", "replace").decode())
            self._stream.flush()


def _is_terminal(stream: TextIO | None) -> bool:
    """Returns whether a person sees a stream; a daemon has none, or a closed one."""
    try:
        return stream is not None and stream.isatty()
    except (AttributeError, ValueError):
        return False


@dataclass(eq=False)
class _Task:
    """Holds a running task, and the seconds after which a file gets the next line on it."""

    text: str
    began_s: float
    next_line_s: float = _LONG_S


class SearchLine:
    """Shows the best overhead and bound while a solver runs: a bar over the time limit on a
    terminal, else a line per improvement."""

    def __init__(self, stream: TextIO, problem: Problem, time_limit_s: float):
        self._stream, self._problem, self._time_limit_s = stream, problem, time_limit_s
        self._bar = tqdm(
            total=time_limit_s,
            bar_format="{desc} [{elapsed} of " + f"{time_limit_s:g} s]",
            desc="searching",
            leave=False,
            file=stream,
            disable=not stream.isatty(),
        )

    def __enter__(self) -> SearchLine:
        return self

    def update(self, solution: Solution) -> None:
        """Shows a solution."""
        best_s = None if solution.usage is None else solution.usage.time_s
        text = (
            f"best overhead {percent_over(self._problem, best_s)}, "
            f"bound {percent_over(self._problem, solution.lower_bound_s)}"
        )
        text += "" if solution.gap is None else f", gap {100 * solution.gap:.2f}%"
        if self._bar.disable:
            print(f"{solution.solve_time_s:6.1f} s  {text}", file=self._stream, flush=True)
        else:
            self._bar.set_description_str(text)
            self._bar.n = min(solution.solve_time_s, self._time_limit_s)
            self._bar.refresh()

    def __exit__(self, *details: object) -> None:
        self._bar.close()
