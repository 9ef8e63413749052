"""Rules S1 to S4, each broken once, and the budget."""

import random

import pytest
from random_problems import mixed_problem
from random_schedules import random_schedule

from keras_remat.core.graph import Graph, Op, Value, chain_example
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate
from keras_remat.core.validate import check_rules, executed_peak_bytes, validate
from keras_remat.errors import InvalidScheduleError, PeakExceededError

CHAIN = Problem(chain_example(), Profile((1.0,) * 5, (0,) * 5, 0))


def update_problem():
    """``w`` is read by op 0; op 1 assigns it (an effect, after op 0 and after op 2); op 2 reads op
    0's value."""
    ops = (
        Op(0, "read", "K", (0,), (1,)),
        Op(1, "use", "K", (1,), (2,)),
        Op(2, "assign", "K", (2,), (), recomputable=False, after=(0,)),
    )
    values = (Value(0, "w", 8), Value(1, "r", 4, producer=0), Value(2, "u", 4, producer=1))
    return Problem(Graph(ops, values, ()), Profile((1.0,) * 3, (0,) * 3, 8))


BROKEN = {
    "S1 reads before it is computed": (CHAIN, (1, 0, 2, 3, 4), "S1", 0, 1),
    "S1 reads what is computed only later": (CHAIN, (0, 1, 3, 2, 4), "S1", 2, 3),
    "S2 a needed op is missing": (CHAIN, (0, 1, 2, 3), "S2", None, 4),
    "S2 the empty order": (CHAIN, (), "S2", None, 0),
    "S2 the effect is missing": (update_problem(), (0, 1), "S2", None, 2),
    "S2 unknown op": (CHAIN, (0, 1, 2, 3, 4, 5), "S2", 5, None),
    "S3 an effect twice": (update_problem(), (0, 1, 2, 2), "S3", 3, 2),
    "S4 a reader again after the assignment": (update_problem(), (0, 1, 2, 0), "S4", 3, 0),
}


@pytest.mark.parametrize(
    ("problem", "order", "rule", "position", "op_id"), BROKEN.values(), ids=BROKEN
)
def test_broken_rules_name_rule_position_and_op(problem, order, rule, position, op_id):
    with pytest.raises(InvalidScheduleError) as caught:
        validate(problem, Schedule(order))
    assert (caught.value.rule, caught.value.position, caught.value.op_id) == (rule, position, op_id)
    assert str(caught.value).startswith(f"{rule}: ")


def test_s4_first_runs_in_the_wrong_order():
    ops = (Op(0, "a", "K", (), (0,)), Op(1, "b", "K", (), (1,), after=(0,)))
    graph = Graph(ops, (Value(0, "a", 1, producer=0), Value(1, "b", 1, producer=1)), (0, 1))
    problem = Problem(graph, Profile((1.0, 1.0), (0, 0), 0))
    validate(problem, Schedule((0, 1, 1)))
    for order in ((1, 0), (0, 1, 0)):
        with pytest.raises(InvalidScheduleError, match="S4"):
            validate(problem, Schedule(order))


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 1, 0, 1, 2), (0, 0, 1, 2)])
def test_legal_orders_with_an_effect(order):
    validate(update_problem(), Schedule(order))


def test_an_op_nobody_needs_may_run():
    ops = (Op(0, "a", "K", (), (0,)), Op(1, "dead", "K", (0,), (1,)))
    graph = Graph(ops, (Value(0, "a", 1, producer=0), Value(1, "b", 5, producer=1)), (0,))
    problem = Problem(graph, Profile((1.0, 1.0), (0, 0), 0))
    validate(problem, Schedule((0, 1)))
    assert executed_peak_bytes(problem, Schedule((0, 1))) == 6


def test_budget_is_inclusive():
    validate(CHAIN.with_budget(11), Schedule(range(5)))
    validate(CHAIN.with_budget(7), Schedule((0, 1, 2, 3, 0, 4)))
    with pytest.raises(PeakExceededError) as caught:
        validate(CHAIN.with_budget(10), Schedule(range(5)))
    assert (caught.value.peak_bytes, caught.value.budget_bytes) == (11, 10)


def test_check_rules_ignores_the_budget():
    check_rules(CHAIN.with_budget(1), Schedule(range(5)))


def test_returns_none():
    assert validate(CHAIN, Schedule(range(5))) is None


def mutations(rng, order):
    """Orders next to ``order``: a swap, a removal, a repetition, a foreign id."""
    swapped, dropped, repeated = list(order), list(order), list(order)
    i, j = rng.randrange(len(order)), rng.randrange(len(order))
    swapped[i], swapped[j] = swapped[j], swapped[i]
    del dropped[i]
    repeated.insert(j, order[i])
    return swapped, dropped, repeated


def legal(graph, order):
    """S1 to S4 once more, as a definition and not as a program: every rule a statement over all
    pairs of positions."""
    at = {op.id: [k for k, i in enumerate(order) if i == op.id] for op in graph.ops}
    producers = {
        op.id: [p for v in op.inputs if (p := graph.values[v].producer) is not None]
        for op in graph.ops
    }
    s1 = all(at[p] and at[p][0] < k for k, i in enumerate(order) for p in producers[i])
    s2 = all(at[i] for i in graph.needed)
    s3 = all(len(at[op.id]) <= 1 for op in graph.ops if not op.recomputable)
    s4 = all(k < later for op in graph.ops for a in op.after for k in at[a] for later in at[op.id])
    return s1 and s2 and s3 and s4


def test_accepts_exactly_the_legal_orders():
    """On mutated schedules of random problems the verdict is that of the rules written as
    definitions."""
    verdicts = {True: 0, False: 0}
    for seed in range(1000):
        problem, rng = mixed_problem(seed, budget=False), random.Random(seed)
        schedule = random_schedule(rng, problem.graph)
        assert legal(problem.graph, schedule.order), seed
        for order in (schedule.order, *mutations(rng, schedule.order)):
            expected = legal(problem.graph, order)
            verdicts[expected] += 1
            if expected:
                validate(problem, Schedule(order))
            else:
                with pytest.raises(InvalidScheduleError):
                    validate(problem, Schedule(order))
    assert min(verdicts.values()) > 500


def test_budget_verdict_is_simulates():
    for seed in range(1000):
        problem = mixed_problem(seed)
        schedule = random_schedule(random.Random(seed), problem.graph, recompute=0.05)
        if simulate(problem, schedule).peak_bytes <= problem.budget_bytes:
            validate(problem, schedule)
        else:
            with pytest.raises(PeakExceededError):
                validate(problem, schedule)
