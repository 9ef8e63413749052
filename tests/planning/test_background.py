"""A process of its own solves: the same plan, no framework, and nothing is left behind."""

import gc
import os
import pickle
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from fake_backend import chain_problem, store_all_peak

from keras_remat.backends.memory import SimulatedMemory
from keras_remat.backends.tensorflow.memory.replayed import ReplayedMemory
from keras_remat.core.limit import Limit
from keras_remat.core.schedule import Schedule
from keras_remat.errors import InfeasibleBudgetError
from keras_remat.planning.background import PlanProcess, PlanProcessError
from keras_remat.planning.request import PlanRequest, plan_for

PROBLEM = chain_problem(64, layers=12)
PEAK = store_all_peak(64, layers=12)
TIGHT = int(0.6 * PEAK)
STORE_ALL = Schedule.store_all(PROBLEM.graph)


def request(limit=TIGHT, **more):
    options = {
        "memory": ReplayedMemory(smallest_bytes=0),
        "auto_solver": "auto",
        "solver": "greedy",
        "seconds": 5.0,
    }
    limit = Limit(limit)
    return PlanRequest(problem=PROBLEM, batch_size=64, limit=limit, **{**options, **more})


def folder_of(process):
    return Path(process._folder.name)


@pytest.mark.parametrize("memory", [ReplayedMemory(smallest_bytes=0), SimulatedMemory()])
def test_a_process_finds_the_plan_that_would_be_found_here(memory):
    memory.observe(PROBLEM, STORE_ALL, int(1.02 * PEAK))
    asked = request(memory=memory)
    process = PlanProcess(asked)
    folder = folder_of(process)
    assert folder.stat().st_mode & 0o077 == 0, "nobody else can read or change what is unpickled"
    found, here = process.answer(), plan_for(asked)
    assert found.problem is PROBLEM
    assert found.solution.schedule == here.solution.schedule
    assert found.predicted == here.predicted
    assert found.predicted.peak_bytes <= TIGHT
    assert not folder.exists()
    process.end()


def test_headroom_that_no_schedule_leaves_is_given_up():
    roomy = TIGHT - PROBLEM.floor_bytes + 1
    assert PlanProcess(request(headroom_bytes=roomy)).answer().budget_bytes == TIGHT


def test_that_there_is_no_plan_is_an_answer():
    with pytest.raises(InfeasibleBudgetError):
        PlanProcess(request(PROBLEM.floor_bytes - 1)).answer()


def test_it_is_known_when_the_answer_is_there():
    process = PlanProcess(request())
    assert not process.has_ended, "a fresh interpreter has not answered at once"
    while not process.has_ended:
        time.sleep(0.01)
    assert process.answer() is not None


def test_a_process_without_an_answer_tells_why():
    with pytest.raises(PlanProcessError, match="no_such_solver"):
        PlanProcess(request(solver="no_such_solver")).answer()


def test_an_answer_that_is_gone_is_no_answer():
    process = PlanProcess(request())
    process._process.wait()
    (folder_of(process) / "answer").unlink()
    with pytest.raises(PlanProcessError, match=r"cannot be read: .*answer"):
        process.answer()


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("how", ["end", "forgotten"])
def test_a_process_that_is_not_wanted_any_more_is_gone_with_its_files(how):
    process = PlanProcess(request(solver="auto", seconds=60.0))
    pid, folder = process._process.pid, folder_of(process)
    assert is_alive(pid)
    if how == "end":
        process.end()
        process.end()
    else:
        del process
        gc.collect()
    assert not is_alive(pid)
    assert not folder.exists()


def test_it_ends_with_the_process_that_started_it_and_tidies_up(tmp_path):
    """Killed, that one cannot."""
    asked = tmp_path / "asked"
    asked.write_bytes(pickle.dumps(request(solver="auto", seconds=60.0)))
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import pickle, pathlib, sys, time\n"
            "from keras_remat.planning.background import PlanProcess\n"
            f"process = PlanProcess(pickle.loads(pathlib.Path({str(asked)!r}).read_bytes()))\n"
            "print(process._process.pid, process._folder.name, flush=True)\n"
            "time.sleep(600)\n",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    pid, folder = parent.stdout.readline().split()
    pid = int(pid)
    assert is_alive(pid)
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 60
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(pid)
    assert not Path(folder).exists()


def test_no_framework_is_imported(tmp_path):
    (tmp_path / "request").write_bytes(pickle.dumps(request()))
    stays_open, _ = ends = os.pipe()
    subprocess.run(
        [
            sys.executable,
            "-c",
            "import pathlib, sys\n"
            "from keras_remat.planning import background\n"
            f"background.main(pathlib.Path({str(tmp_path)!r}))\n"
            "assert not {'tensorflow', 'keras', 'jax', 'torch'} & set(sys.modules)\n",
        ],
        check=True,
        stdin=stays_open,
    )
    for end in ends:
        os.close(end)
    answer = pickle.loads((tmp_path / "answer").read_bytes())
    assert answer == replace(plan_for(request()), problem=None, solution=answer.solution)
