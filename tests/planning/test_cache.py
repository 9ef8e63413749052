"""Plans that are kept for other fits: by graph, budget and setting; whole, or not at all."""

import os

import pytest
from fake_backend import chain_problem, quick_plan, store_all_peak
from own_process import output_of

from keras_remat.errors import InvalidProblemError
from keras_remat.planning.cache import PlanCache

SIZE = 64
PROBLEM = chain_problem(SIZE)
BUDGET = int(store_all_peak(SIZE) * 0.7)

_SCRIPT = """
import os, random, signal, sys, time
from pathlib import Path

from keras_remat import Problem, Profile, Schedule, Solution, Usage, simulate
from keras_remat.core.graph import chain_example
from keras_remat.planning.cache import PlanCache
from keras_remat.planning.plan import Plan

problem = Problem(chain_example(), Profile((1.0,) * 5, (0,) * 5, 0))

def plan(order):
    usage = simulate(problem, Schedule(order))
    solution = Solution(Schedule(order), "given", "feasible", 0.0, None, usage)
    store_all = Usage(5.0, 11)
    return Plan(problem.graph.fingerprint, 20, solution, store_all, usage, measured=usage)

plans = [plan((0, 1, 2, 3, 4)), plan((0, 1, 2, 3, 0, 4))]
cache = PlanCache(Path(sys.argv[1]), ("CPU:0",))

def compete(mine):
    while True:
        cache.keep(mine, problem.graph, 20)
        found = cache.read(problem, 20)
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
    found = cache.read(problem, 20)
    written += found is not None
    assert found is None or found.solution.schedule in [p.solution.schedule for p in plans]
print(written)
"""


def test_a_plan_is_found_by_graph_budget_and_setting(tmp_path):
    def find(problem=PROBLEM, budget=BUDGET, setting=("CPU:0", "1.0")):
        return PlanCache(tmp_path / "plans", setting).read(problem, budget)

    assert find() is None
    plan = quick_plan(PROBLEM, BUDGET)
    PlanCache(tmp_path / "plans", ("CPU:0", "1.0")).keep(plan, PROBLEM.graph, BUDGET)
    assert find() == plan
    assert find(setting=("GPU:0", "1.0")) is find(setting=("CPU:0", "1.1")) is None
    assert find(budget=BUDGET + 1) is find(chain_problem(SIZE + 1)) is None


def test_what_is_no_plan_of_this_graph_is_refused(tmp_path):
    cache = PlanCache(tmp_path, ())
    cache.keep(quick_plan(chain_problem(SIZE + 1), BUDGET), PROBLEM.graph, BUDGET)
    with pytest.raises(InvalidProblemError, match=cache.path(PROBLEM.graph, BUDGET).name):
        cache.read(PROBLEM, BUDGET)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
def test_no_plan_is_half_there_however_processes_are_killed(tmp_path):
    runs = 100
    assert int(output_of("-c", _SCRIPT, tmp_path, runs)) > runs // 2
