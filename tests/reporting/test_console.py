"""What is seen while a ``fit`` runs, as golden texts: on terminals of 80 and 120 columns, in a
file, and in a notebook, with Keras's own bar between."""

import copy
import io
import pickle
import re
from types import SimpleNamespace

import pytest

from keras_remat.core.graph import chain_example
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule, Solution, Usage
from keras_remat.reporting.console import Console, SearchLine
from keras_remat.reporting.fit_report import AutotuneReport, EpochUsage, Event

MIB = 2**20


class Stream(io.StringIO):
    """A file, or a terminal that shows what was written."""

    def __init__(self, terminal):
        super().__init__()
        self.terminal = terminal

    def isatty(self):
        return self.terminal

    @property
    def screen(self):
        """The lines that stay: returns, backspaces and erased lines are carried out."""
        lines, at = [""], 0
        for part in re.findall(r"\x1b\[2K|.|\n", self.getvalue(), re.S):
            if part == "\n":
                lines.append("")
                at = 0
            elif part == "\r":
                at = 0
            elif part == "\b":
                at = max(0, at - 1)
            elif part == "\x1b[2K":
                lines[-1] = ""
            else:
                lines[-1] = lines[-1][:at].ljust(at) + part + lines[-1][at + 1 :]
                at += 1
        return [line.rstrip() for line in lines]


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


def keras_bar(stream, text, before=""):
    """Draws as Keras's Progbar does: back over the old text, then the new one."""
    stream.write("\b" * len(before) + "\r" + text)
    return text


def report(peak=26 * MIB, limit=28 * MIB, events=()):
    return AutotuneReport(
        limit_bytes=limit,
        batch_size=32,
        baseline=Usage(0.145, 37 * MIB),
        baseline_batch_size=32,
        baseline_source="predicted",
        epochs=[
            EpochUsage(0, 320, 10, 1.6, 67.0, 28 * MIB, 32),
            EpochUsage(1, 320, 10, 1.5, 0.0, peak, 32),
        ],
        events=list(events),
        plan=PLAN,
    )


def plan_like(plain_bytes, plan_bytes, overhead=0.0, order=(0, 1)):
    return SimpleNamespace(
        name="",
        measured=None,
        problem=None,
        store_all=Usage(1.0, plain_bytes),
        predicted=Usage(1.0 + overhead, plan_bytes),
        overhead=overhead,
        solution=Solution(Schedule(order), "greedy", "feasible", 0.0),
    )


PLAN = plan_like(37 * MIB, 26 * MIB, 0.03, (*range(1282), *range(8)))


def a_fit(stream, columns, monkeypatch, verbose=1, told=None):
    """Everything that a fit shows, in the order of a fit."""
    monkeypatch.setenv("COLUMNS", str(columns))
    clock = Clock()
    console = Console(stream, verbose, clock=clock, ticking=False)
    stream.write("Epoch 1/2\n")
    with console.task("tracing the train step"):
        for _ in range(2):
            clock.now_s += 2.05
            console.tick()
    bar = keras_bar(stream, "3/10 ━━━ 1s 145ms/step - loss: 0.7")
    console.bar_is_open = True
    with console.task("solving for the schedule"):
        clock.now_s += 12
        console.tick()
    console.swap_line(PLAN, 28 * MIB)
    console.event(4, "swap", "Swapped in.")
    keras_bar(stream, "10/10 ━━━ 2s 150ms/step - loss: 0.5\n", bar)
    console.bar_is_open = False
    console.verdict(told or report())


STAYS = """\
keras_remat  tracing 4.1 s · solving 12 s
keras_remat  37.0 -> 26.0 MiB (limit 28.0) · predicted +3 % time · 8 of 1282
             ops run again""".splitlines()
WIDE = """\
keras_remat  tracing 4.1 s · solving 12 s
keras_remat  37.0 -> 26.0 MiB (limit 28.0) · predicted +3 % time · 8 of 1282 ops run again
""".splitlines()
VERDICT = """\
                   peak     of limit     step     samples/s
  plain         37.0 MiB      132 %     145 ms       221      predicted
  remat         26.0 MiB       93 %     150 ms       213      limit KEPT
  set-up 1 min 7 s; details: print(callback.report)""".splitlines()


@pytest.mark.parametrize(("columns", "stays"), [(80, STAYS), (120, WIDE)])
def test_a_terminal_keeps_no_trace_of_progress_and_keras_bar_whole(columns, stays, monkeypatch):
    stream = Stream(terminal=True)
    a_fit(stream, columns, monkeypatch)
    assert stream.screen == [
        "Epoch 1/2",
        *stays,
        "10/10 ━━━ 2s 150ms/step - loss: 0.5",
        *VERDICT,
        "",
    ]
    assert all(len(line) < min(columns, 101) for line in stream.screen)


def test_a_terminal_sees_a_task_from_its_beginning(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    stream, clock = Stream(terminal=True), Clock()
    console = Console(stream, clock=clock, ticking=False)
    with console.task("tracing the train step"):
        assert stream.screen == ["keras_remat  tracing the train step 0 s"]
        clock.now_s = 2.34
        console.tick()
        assert stream.screen == ["keras_remat  tracing the train step 2.3 s"]
        with console.task("solving"):
            assert stream.screen == ["keras_remat  solving 0 s"]
    assert stream.screen == [""]


def test_a_narrow_terminal_cuts(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    stream = Stream(terminal=True)
    console = Console(stream, clock=Clock(), ticking=False)
    with console.task("searching the largest batch that fits"):
        assert stream.screen == ["keras_remat  searching the l…"]
    console.verdict(report())
    assert all(len(line) < 30 for line in stream.screen)


def test_a_terminal_narrower_than_the_name_gets_whole_words(monkeypatch):
    monkeypatch.setenv("COLUMNS", "1")
    stream = Stream(terminal=True)
    clock = Clock()
    console = Console(stream, clock=clock, ticking=False)
    with console.task("profiling"):
        clock.now_s = 30
    console.tasks_line()
    assert stream.screen == ["keras_remat  profiling 30", "             s", ""]


def test_a_file_gets_whole_lines_of_what_takes_long(monkeypatch):
    stream = Stream(terminal=False)
    a_fit(stream, 80, monkeypatch)
    assert "\x1b" not in stream.getvalue()
    bar, last = "3/10 ━━━ 1s 145ms/step - loss: 0.7", "10/10 ━━━ 2s 150ms/step - loss: 0.5"
    assert stream.getvalue().split("\n") == [
        "Epoch 1/2",
        "keras_remat  tracing the train step … 2 s",
        f"\r{bar}",
        "keras_remat  solving for the schedule … 12 s",
        *STAYS,
        "\b" * len(bar) + f"\r{last}",
        *VERDICT,
        "",
    ]


def test_a_notebook_shows_the_same(monkeypatch):
    stream = Stream(terminal=False)  # as ipykernel's stream: no terminal, but returns work
    a_fit(stream, 80, monkeypatch)
    assert stream.screen == [
        "Epoch 1/2",
        "keras_remat  tracing the train step … 2 s",
        "3/10 ━━━ 1s 145ms/step - loss: 0.7",
        "keras_remat  solving for the schedule … 12 s",
        *STAYS,
        "10/10 ━━━ 2s 150ms/step - loss: 0.5",
        *VERDICT,
        "",
    ]


def test_a_file_gets_another_line_when_it_takes_very_long():
    stream, clock = Stream(terminal=False), Clock()
    console = Console(stream, clock=clock, ticking=False)
    with console.task("solving"):
        for _ in range(130):
            clock.now_s += 0.5
            console.tick()
    assert [line.split("…")[1] for line in stream.getvalue().splitlines()] == [
        " 1 s",
        " 31 s",
        " 1 min 1 s",
    ]


def test_a_limit_that_was_not_kept_is_said_with_the_reason(monkeypatch):
    stream = Stream(terminal=False)
    kept = Event(
        9, "kept", "The plan that is running stays: greedy: no schedule found under 25 MiB."
    )
    a_fit(stream, 80, monkeypatch, told=report(peak=30 * MIB, events=[kept]))
    assert stream.screen[-6:-1] == [
        "  plain         37.0 MiB      132 %     145 ms       221      predicted",
        "  remat         30.0 MiB      107 %     150 ms       213      LIMIT NOT KEPT",
        "  2 MiB (7.1 %) over the limit: The plan that is running stays: greedy: no",
        "  schedule found under 25 MiB.",
        "  set-up 1 min 7 s; details: print(callback.report)",
    ]


def test_nothing_is_shown_where_nothing_is_wanted(monkeypatch):
    stream = Stream(terminal=True)
    a_fit(stream, 80, monkeypatch, verbose=0)
    assert "keras_remat" not in stream.getvalue()
    assert "remat" not in stream.getvalue()


def test_events_are_shown_where_everything_is_wanted(monkeypatch):
    stream = Stream(terminal=True)
    a_fit(stream, 80, monkeypatch, verbose=2)
    assert "keras_remat  step 4: swap: Swapped in." in stream.screen
    assert "tracing the train step" not in stream.getvalue()
    assert VERDICT[1] in stream.screen


def test_tasks_within_a_task_are_counted_once():
    stream, clock = Stream(terminal=False), Clock()
    console = Console(stream, clock=clock, ticking=False)
    with console.task("searching the largest batch"), console.task("solving"):
        clock.now_s = 0.9
    console.tasks_line()
    console.tasks_line()
    assert stream.getvalue() == "keras_remat  searching 0.9 s\n".replace("0.9 s", "900 ms")


def test_a_task_ticks_by_itself_and_ends_with_an_error():
    stream = Stream(terminal=True)
    console = Console(stream)
    with pytest.raises(RuntimeError), console.task("solving"):
        raise RuntimeError
    assert stream.screen == [""]


def test_a_console_that_cannot_write_our_characters_gets_others():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Console(stream).swap_line(plan_like(4, 2), 3)
    stream.seek(0)
    assert "4.0 -> 2.0 B (limit 3.0) ? predicted +0 % time ? no op" in stream.read()


class Full(io.StringIO):
    """A file on a full disk, or a terminal that has gone."""

    def write(self, text):
        raise OSError(28, "No space left on device")


def closed():
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [Full(), closed(), None], ids=["full", "closed", "none"])
def test_a_stream_that_takes_nothing_costs_no_training(stream, monkeypatch):
    monkeypatch.setattr("sys.stdout", stream)
    console = Console()
    with console.task("solving"):
        console.tick()
    console.swap_line(plan_like(4, 2), 3)


def test_a_process_without_room_for_a_thread_goes_on(monkeypatch):
    def none_left(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", none_left)
    console = Console(Stream(terminal=False))
    with console.task("solving"):
        console.tick()


def test_an_op_that_runs_three_times_is_not_said_to_run_twice():
    stream = Stream(terminal=False)
    Console(stream).swap_line(plan_like(4, 2, order=(0, 1, 0, 2, 0)), 3)
    assert " ".join(stream.getvalue().split()).endswith("1 of 3 ops run again")


def test_search_line_in_a_file_has_a_line_per_improvement():
    problem = Problem(chain_example(), Profile((1.0,) * 5, (0,) * 5, 0), 7)
    stream = Stream(terminal=False)
    with SearchLine(stream, problem, 3.0) as line:
        order = Schedule((0, 1, 2, 3, 0, 4))
        line.update(Solution(order, "greedy", "feasible", 0.5, 5.5, Usage(6.0, 7)))
    assert stream.getvalue() == "   0.5 s  best overhead 20.00%, bound 10.00%, gap 8.33%\n"


def test_a_task_that_names_no_doing_is_planning():
    stream, clock = Stream(terminal=False), Clock()
    console = Console(stream, clock=clock, ticking=False)
    for text in ("first plan, from estimated op times", "planning"):
        with console.task(text):
            clock.now_s += 0.3
    console.tasks_line()
    assert stream.getvalue() == "keras_remat  planning 600 ms\n"


def test_a_copy_is_a_console_of_its_own():
    """A search over hyperparameters copies callbacks deeply, or sends them to other processes."""
    console = Console(io.StringIO(), verbose=2)
    for copied in (copy.deepcopy(console), pickle.loads(pickle.dumps(console))):
        assert copied is not console
        assert copied._verbose == 2
