"""Processes that train one model stay in step, and end together.

Here threads stand for processes and a dictionary for the key-value store that they share; real
processes (``processes_case.py``) are slow tests.
"""

import itertools
import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import pytest
from own_process import TIMEOUT_S, environment, free_port

from keras_remat.backends.jax import JaxBackend, processes
from keras_remat.backends.jax.processes import JaxProcesses
from keras_remat.backends.processes import Processes, decided_once, made_by_all
from keras_remat.errors import ProcessFailedError, ScheduleNotFoundError, UnsupportedModelError

COUNT = 3


class Store:
    """A key-value store that all threads share; waiting ends when it is told to."""

    def __init__(self):
        self.kept, self._changed = {}, threading.Condition()

    def key_value_set(self, key, value):
        with self._changed:
            self.kept[key] = value
            self._changed.notify_all()

    key_value_set_bytes = key_value_set

    def blocking_key_value_get_bytes(self, key, timeout_in_ms):
        with self._changed:
            if not self._changed.wait_for(lambda: key in self.kept, timeout_in_ms / 1000):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: it did not come")
            return self.kept[key]

    def key_value_delete(self, key):
        with self._changed:
            del self.kept[key]

    def key_value_dir_get(self, directory):
        with self._changed:
            return [(k, v) for k, v in self.kept.items() if k.startswith(directory + "/")]


class World:
    """Runs a function in every process, and notes which of them were ended from within."""

    def __init__(self):
        self.store, self.left = Store(), {}
        self.all = [
            JaxProcesses(
                self.store, rank, COUNT, lambda why, rank=rank: self.left.update({rank: why})
            )
            for rank in range(COUNT)
        ]

    def run(self, function):
        """Returns what came of every process: a result, or the error that it raised."""

        def outcome(one, rank):
            try:
                one.begin({"seed": "0"})
                return function(one, rank)
            except Exception as error:
                one.fail(error)
                return error

        with ThreadPoolExecutor(COUNT) as pool:
            return list(pool.map(outcome, self.all, range(COUNT)))


@pytest.fixture
def world(monkeypatch):
    monkeypatch.setattr(processes, "_FITS", itertools.repeat(0))  # each process has its own
    monkeypatch.setattr(processes, "_LOOK_S", 0.05)
    monkeypatch.setattr(processes, "_GRACE_S", 0.2)
    world = World()
    yield world
    for one in world.all:
        one.end()


def test_all_get_the_most_and_the_least_of_every_number(world):
    came = world.run(lambda one, rank: (one.most(rank, 7 - rank), one.least(rank, 7 - rank)))
    assert came == [([2, 7], [0, 5])] * COUNT


def test_the_first_decides_and_the_others_make_nothing(world):
    made = []

    def decide(one, rank):
        return one.of_first(lambda: made.append(rank) or f"made by {rank}")

    assert world.run(decide) == ["made by 0"] * COUNT
    assert made == [0]


def test_decisions_inside_of_decisions_are_the_first_one_s_own(world):
    def decide(one, rank):
        inner = one.of_first(lambda: one.of_first(lambda: rank) + 10)
        return inner, one.most(rank)

    assert world.run(decide) == [(10, [2])] * COUNT


def test_an_error_of_the_first_is_everybody_s_with_its_numbers(world):
    def refuse():
        raise ScheduleNotFoundError(100, 40, 120, solver="auto")

    came = world.run(lambda one, rank: one.of_first(refuse))
    assert [type(error) for error in came] == [ScheduleNotFoundError] * COUNT
    assert {(error.budget_bytes, error.floor_bytes) for error in came} == {(100, 40)}


class Unsendable(Exception):
    """Cannot be pickled."""

    def __init__(self, one, other):
        super().__init__(f"{one} and {other}")


@pytest.mark.parametrize(
    ("error", "kind"), [(OSError("disk full"), OSError), (Unsendable("a", "b"), RuntimeError)]
)
def test_any_error_of_a_decision_is_everybody_s(world, error, kind):
    """What the caller handles is handled in all, and nobody waits for a decision."""

    def refuse():
        raise error

    came = world.run(lambda one, rank: one.of_first(refuse))
    assert [type(raised) for raised in came] == [kind] * COUNT
    assert all(str(error) in str(raised) for raised in came)


def test_what_one_cannot_make_none_has(world):
    def make(rank):
        if rank == 1:
            raise UnsupportedModelError("not here")
        return rank

    came = world.run(lambda one, rank: one.of_all(lambda: make(rank)))
    assert [str(error) for error in came] == ["not here"] * COUNT
    assert all(isinstance(error, UnsupportedModelError) for error in came)


def test_what_all_can_make_is_each_one_s_own(world):
    assert world.run(lambda one, rank: one.of_all(lambda: rank)) == list(range(COUNT))


def test_messages_that_all_have_read_are_taken_back(world):
    def talk(one, rank):
        for number in range(50):
            one.most(number)
            one.of_first(lambda number=number: number)

    assert world.run(talk) == [None] * COUNT
    assert len(world.store.kept) <= 3 * COUNT


def test_options_have_to_be_the_same_in_all(world):
    came = []

    def begin(one, rank):
        try:
            one.begin({"solver": "'auto'", "seed": "7" if rank == 2 else "0"})
        except UnsupportedModelError as error:
            came.append(str(error))

    with ThreadPoolExecutor(COUNT) as pool:
        list(pool.map(begin, world.all, range(COUNT)))
    assert (
        came
        == [
            "Process 2 of 3 trains with other options than process 0: seed=7 and not 0. "
            "Give all the same."
        ]
        * COUNT
    )


def test_those_who_wait_for_one_that_failed_end_with_its_reason(world):
    def fail(one, rank):
        if rank == 1:
            raise MemoryError("nothing left")
        return one.most(rank)

    came = world.run(fail)
    assert isinstance(came[1], MemoryError)
    for error in (came[0], came[2]):
        assert isinstance(error, ProcessFailedError)
        assert error.process == 1
        assert "MemoryError: nothing left" in str(error)
    assert world.left == {}


def test_one_that_waits_inside_of_a_program_is_ended(world):
    ended = threading.Event()
    world.all[2]._leave = lambda why: (world.left.update({2: why}), ended.set())

    def fail(one, rank):
        if rank == 1:
            raise MemoryError("nothing left")
        return ended.wait(30) if rank == 2 else one.most(rank)

    world.run(fail)
    assert list(world.left) == [2]
    assert "Process 1 has failed" in world.left[2]


def test_one_that_does_not_come_is_an_error(world, monkeypatch):
    monkeypatch.setattr(processes, "_MEETING_S", 0.2)
    with pytest.raises(ProcessFailedError, match="it does not answer"):
        world.all[0].begin({})


def test_a_fit_that_has_ended_tells_of_no_failure(world):
    def end(one, rank):
        one.most(rank)
        one.end()
        one.fail(ValueError("later"))

    assert world.run(end) == [None] * COUNT
    assert not [key for key in world.store.kept if "failed" in key]


class Decides:
    """Has a backend whose processes are given."""

    def __init__(self, one):
        self._backend = type("Backend", (), {"processes": one})()

    @decided_once
    def decided(self, value, *, more=0):
        """Adds."""
        return value + more

    @made_by_all
    def made(self, value):
        return value


def test_methods_are_decided_once_or_made_by_all(world):
    came = world.run(
        lambda one, rank: (Decides(one).decided(rank, more=5), Decides(one).made(rank))
    )
    assert came == [(5, 0), (5, 1), (5, 2)]
    assert Decides.decided.__doc__ == "Adds."


def test_one_process_decides_alone():
    alone = Processes()
    alone.begin({})
    assert (alone.most(1, 2), alone.least(3)) == ([1, 2], [3])
    assert Decides(alone).decided(1, more=2) == 3
    alone.fail(ValueError())
    alone.end()


def test_in_several_processes_nothing_is_planned_outside_of_fit_and_batches_stay(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    backend = JaxBackend()
    with pytest.raises(UnsupportedModelError, match="inside of fit"):
        backend.example_batch(None, 4)
    with pytest.raises(UnsupportedModelError, match="the batch stays as it is"):
        backend.resized_spec((jax.numpy.zeros((4, 2)),), 8)


# ------------------------------------------------------------------ real processes


def outcomes(fault="nowhere:0:0:"):
    """Exit status, what was printed last, and what was complained of, of both processes."""
    port = str(free_port())
    script = str(Path(__file__).parent / "processes_case.py")
    both = [
        subprocess.Popen(
            [sys.executable, script, str(rank), port, fault],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [one.communicate(timeout=TIMEOUT_S) for one in both]
    finally:
        for one in both:
            one.kill()
    return [
        (one.returncode, json.loads(out.splitlines()[-1]) if one.returncode == 0 else None, err)
        for one, (out, err) in zip(both, said, strict=True)
    ]


@pytest.mark.slow
def test_two_processes_train_under_one_plan_with_plain_s_losses():
    came = [result for _, result, _ in outcomes()]
    for one in came:
        assert one["losses"] == pytest.approx(one["plain"], rel=1e-6)
        assert one["peak"] <= one["limit"] == one["smallest_limit"] < one["plain_peak"]
        assert any("No larger batch" in event for event in one["events"])
    assert came[0]["order"] == came[1]["order"] is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    ["options:0:1:", "trace:1:1:unsupported", "trace:1:0:unsupported", "lower:1:1:unsupported"],
)
def test_all_go_on_unmodified_where_one_cannot_be_modified(fault):
    for _, one, _ in outcomes(fault):
        assert one["losses"] == one["plain"]
        assert len(one["said"]) == 1
        assert "training goes on unmodified" in one["said"][0]


@pytest.mark.slow
def test_a_planner_that_fails_elsewhere_is_not_asked():
    came = [result for _, result, _ in outcomes("solve:1:1:bug")]
    assert came[0]["order"] == came[1]["order"] is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        "solve:1:0:bug", "keep:1:0:bug", "trace:1:0:bug", "lower:1:0:bug", "lower:1:1:oom",
        "run:1:1:oom", "run:3:0:oom", "run:6:1:oom", "run:2:1:bug", "run:4:0:interrupt",
        "run:5:1:interrupt", "data:2:1:bug", "data:5:0:bug", "data:7:1:interrupt",
        "data:3:1:oom", "run:9:0:oom",
    ],
)  # fmt: skip
def test_where_one_fails_all_end_with_its_reason(fault):
    at = int(fault.split(":")[2])
    came = outcomes(fault)
    failed, other = came[at], came[1 - at]
    assert failed[0] != 0
    assert other[0] != 0
    reason = "KeyboardInterrupt" if fault.endswith("interrupt") else "injected"
    assert reason in other[2]
