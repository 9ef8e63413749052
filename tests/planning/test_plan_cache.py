"""Two processes on one plan cache, killed at any moment: a plan is there whole, or not at all."""

import os

import pytest
from own_process import output_of

_SCRIPT = """
import os, random, signal, sys, time
from pathlib import Path

from keras_remat import Problem, Profile, Schedule, Solution, Usage, simulate
from keras_remat.core.graph import chain_example
from keras_remat.planning.plan import Plan, cached_plan

problem = Problem(chain_example(), Profile((1.0,) * 5, (0,) * 5, 0))

def plan(order):
    usage = simulate(problem, Schedule(order))
    solution = Solution(Schedule(order), "given", "feasible", 0.0, None, usage)
    store_all = Usage(5.0, 11)
    return Plan(problem.graph.fingerprint, 20, solution, store_all, usage, measured=usage)

plans = [plan((0, 1, 2, 3, 4)), plan((0, 1, 2, 3, 0, 4))]
path = Path(sys.argv[1]) / "plan.json"

def compete(mine):
    while True:
        mine.save(path)
        found = cached_plan(path, problem)
        schedules = [plan.solution.schedule for plan in plans]
        if found is not None and found.solution.schedule not in schedules:
            os._exit(3)

source = random.Random(0)
written = 0
for _ in range(int(sys.argv[2])):
    children = []
    for mine in plans:
        child = os.fork()
        if child == 0:
            try:
                compete(mine)
            finally:
                os._exit(4)
        children.append(child)
    time.sleep(source.uniform(0.001, 0.03))
    for child in children:
        os.kill(child, signal.SIGKILL)
    for child in children:
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), os.waitstatus_to_exitcode(status)
    found = cached_plan(path, problem)
    written += found is not None
    assert found is None or found.solution.schedule in [p.solution.schedule for p in plans]
print(written)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
def test_no_plan_is_half_there_however_processes_are_killed(tmp_path):
    runs = 100
    assert int(output_of("-c", _SCRIPT, tmp_path, runs)) > runs // 2
