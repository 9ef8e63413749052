"""What a person reads: the right numbers, on one line each, printable."""

import re
from dataclasses import replace

import pytest

from keras_remat.core.graph import Graph, Op, Value, chain_example
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule, Solution, Usage
from keras_remat.core.simulate import simulate
from keras_remat.planning.plan import Plan
from keras_remat.reporting import text as show
from keras_remat.reporting.tables import summary_text

CHAIN = Problem(
    chain_example(),
    Profile((1.0, 2.0, 3.0, 4.0, 5.0), (0,) * 5, 0, "estimated", "CPU:0"),
    8,
    "chain",
)
STORE_ALL, RECOMPUTE_A = Schedule(range(5)), Schedule((0, 1, 2, 3, 0, 4))
NASTY = "<script>alert(1)</script>&\"'\x1b[31m\n\ud800]]>"


def named(name):
    """A problem whose every name is ``name``."""
    ops = tuple(Op(i, name, name, (i - 1,) if i else (), (i,)) for i in range(2))
    graph = Graph(ops, tuple(Value(i, name, 4, (1,), name, i) for i in range(2)), (1,))
    return Problem(graph, Profile((1.0, 1.0), (0, 0), 3, device=name), 20, name)


def test_problem_text_says_the_numbers():
    lines = show.problem_text(CHAIN).splitlines()
    assert lines[0] == "chain: 5 ops (5 forward), 5 values, 1 output"
    assert "costs      estimated on CPU:0" in lines
    assert "store-all  peak 11 B at position 2 of 5, op c; time 15 s" in lines
    assert "floor      7 B, set by op c" in lines
    assert "budget     8 B, 72.7 % of the store-all peak" in lines
    assert lines[lines.index("largest values") + 1 :][:2] == ["  6 B  c", "  4 B  a"]
    assert lines[lines.index("slowest ops") + 1 :][:2] == ["  5 s  e", "  4 s  d"]


def test_problem_text_of_a_floor_that_the_outputs_set():
    graph = replace(CHAIN.graph, outputs=tuple(range(len(CHAIN.graph.values))))
    lines = show.problem_text(replace(CHAIN, graph=graph))
    assert f"floor      {sum(v.nbytes for v in graph.values)} B, set by the outputs, all" in lines


def test_problem_text_without_a_budget_below_the_floor_and_empty():
    assert "budget     none" in show.problem_text(CHAIN.with_budget(None))
    assert "below the floor: infeasible" in show.problem_text(CHAIN.with_budget(6))
    empty = show.problem_text(Problem(Graph((), (), ()), Profile((), (), 0)))
    assert empty.splitlines()[0] == "problem: 0 ops, 0 values, 0 outputs"
    assert "slowest" not in empty


def test_problem_text_counts_phases_and_fixed_ops():
    ops = (
        Op(0, "f", "K", (), (), "forward"),
        Op(1, "b", "K", (), (), "backward"),
        Op(2, "u", "K", (), (), "update", False),
    )
    text = show.problem_text(Problem(Graph(ops, (), ()), Profile((0.0,) * 3, (0,) * 3, 5)))
    assert "3 ops (1 forward, 1 backward, 1 update)" in text
    assert "1 ops are not recomputable" in text


def test_top_limits_the_lists():
    assert (
        len(show.problem_text(CHAIN, top=1).splitlines())
        == len(show.problem_text(CHAIN, top=3).splitlines()) - 4
    )


def test_recomputed_text_counts_ops_runs_and_seconds():
    ops = tuple(Op(i, f"op{i}", "Relu" if i < 2 else "Conv", (), (i,)) for i in range(3))
    graph = Graph(ops, tuple(Value(i, "v", 1, producer=i) for i in range(3)), (0, 1, 2))
    problem = Problem(graph, Profile((1.0, 1.0, 5.0), (0,) * 3, 0))
    again = show.recomputed_text(problem, Schedule((0, 0, 0, 1, 1, 2, 2)))
    assert again == "recomputed 3 of 3 ops, 4 extra runs, 8 s"
    assert show.recomputed_text(problem, Schedule((0, 1, 2))) == "recomputed nothing"


def plan(schedule=RECOMPUTE_A, *, bound=None, measured=None, problem=CHAIN, budget=8):
    solution = Solution(schedule, "greedy", "feasible", 0.5, bound, simulate(CHAIN, schedule))
    return Plan(
        "f" * 64,
        budget,
        solution,
        Usage(15.0, 11),
        Usage(16.0, 7),
        measured,
        name="chain",
        problem=problem,
    )


def test_plan_text_compares_predicted_with_measured():
    text = show.plan_text(plan(bound=12.0, measured=Usage(18.0, 8)))
    assert "solver    greedy in 500 ms; at most 33.3 % slower than the best possible" in text
    rows = {
        line.split()[0]: line.split()[1:]
        for line in text.splitlines()
        if line.startswith(("store", "predicted ", "measured"))
    }
    assert rows["store-all"] == ["11", "B", "138", "%", "15", "s", "-"]
    assert rows["measured"] == ["8", "B", "100", "%", "18", "s", "20", "%"]
    assert "predicted  7 B   87.5 %     16 s  6.67 %" in text
    assert "predicted peak is 12.5 % below the measured one" in text
    assert "recomputed 1 of 5 ops, 1 extra run, 1 s" in text


def test_plan_text_before_measuring_and_without_the_problem():
    text = show.plan_text(plan(problem=None))
    assert "not measured yet" in text
    assert "how far from the best possible is not known" in text
    assert text.endswith("recomputed 1 op")
    assert show.plan_text(plan(STORE_ALL, problem=None)).endswith("recomputed nothing")


def test_status_says_what_is_proved():
    proved = replace(plan().solution, status="optimal")
    assert show.status_text(proved) == "greedy in 500 ms; proved to be the best possible"
    unknown = replace(proved, solve_time_s=0.0)
    assert show.status_text(unknown) == "greedy; proved to be the best possible"


@pytest.mark.parametrize("name", [NASTY, "x" * 1000, "", "模型/conv", "a\r\nb\tc\u2028d\u202e"])
def test_names_stay_on_their_line(name):
    problem = named(name)
    again = Schedule((0, 0, 1))
    plain = len(show.problem_text(named("n")).splitlines())
    text = show.problem_text(problem)
    assert len(text.splitlines()) == plain
    assert all(len(line) < 300 for line in text.splitlines())
    for out in (
        text,
        show.recomputed_text(problem, again),
        summary_text(problem, again),
        summary_text(problem, again, "op"),
    ):
        out.encode("utf-8")
        assert not re.search(r"[\x00-\x09\x0b-\x1f\u2028\u202e]", out)


@pytest.mark.parametrize(
    ("ratio", "text"), [(2e-16, "0 %"), (-2e-16, "0 %"), (0.1234, "12.3 %"), (12.0, "1,200 %")]
)
def test_what_rounding_leaves_of_a_difference_is_none(ratio, text):
    assert show._percent(ratio) == text
