"""The greedy solver: legal and within the budget on everything, and what its lookahead is for."""

from __future__ import annotations

import pytest
from random_problems import chain_problem, mixed_problem

from keras_remat.core.deadline import Deadline
from keras_remat.core.graph import Graph, Op, Value, chain_example
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate
from keras_remat.core.validate import check_rules, validate
from keras_remat.errors import ScheduleNotFoundError
from keras_remat.solvers.orders.reorder import memory_aware_order
from keras_remat.solvers.search import greedy


@pytest.mark.parametrize("seed", range(300))
def test_every_candidate_is_valid(seed: int) -> None:
    problem = mixed_problem(seed)
    for schedule in greedy.candidates(problem, deadline=Deadline(float("inf"))):
        validate(problem, schedule)


def test_running_example_recomputes_a() -> None:
    problem = Problem(chain_example(), Profile((1.0,) * 5, (0,) * 5, 0), budget_bytes=7)
    assert greedy.solve(problem).schedule.order == (0, 1, 2, 3, 0, 4)


def test_stuck_is_not_found() -> None:
    problem = Problem(chain_example(), Profile((1.0,) * 5, (0,) * 5, 0), budget_bytes=6)
    with pytest.raises(ScheduleNotFoundError) as caught:
        greedy.solve(problem)
    assert caught.value.budget_bytes == 6


def test_candidates_get_faster() -> None:
    problem = chain_problem(40)
    problem = problem.with_budget(20)
    times = [
        simulate(problem, s).time_s
        for s in greedy.candidates(problem, deadline=Deadline(float("inf")))
    ]
    assert times
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize("seed", range(40))
def test_first_finds_a_schedule_exactly_where_all_of_them_do(seed: int) -> None:
    problem = mixed_problem(seed)
    try:
        fastest = greedy.solve(problem)
    except ScheduleNotFoundError:
        with pytest.raises(ScheduleNotFoundError):
            greedy.solve_first(problem, seed=seed)
        return
    first = greedy.solve_first(problem, seed=seed)
    validate(problem, first.schedule)
    assert first.usage is not None
    assert fastest.usage is not None
    assert first.usage.time_s >= fastest.usage.time_s


def test_first_begins_with_another_policy_by_seed() -> None:
    problem = mixed_problem(31, "training").with_budget(None)
    problem = problem.with_budget(
        (problem.floor_bytes + simulate(problem, Schedule.store_all(problem.graph)).peak_bytes) // 2
    )
    found = {
        greedy.solve_first(problem, seed=seed).schedule for seed in range(len(greedy.POLICIES))
    }
    assert len(found) > 1


def updates_at_the_end(layers: int) -> Problem:
    """Gradients 0..layers-1, each 10 bytes and read by its own update (no output), all updates at
    the end."""
    gradients = [Op(i, f"g{i}", "Grad", (i - 1,) if i else (), (i,)) for i in range(layers)]
    updates = [
        Op(layers + i, f"u{i}", "Assign", (i,), (), recomputable=False, after=(i,))
        for i in range(layers)
    ]
    values = tuple(Value(i, f"g{i}", 10, producer=i) for i in range(layers))
    return Problem(
        Graph((*gradients, *updates), values, ()),
        Profile((1.0,) * 2 * layers, (0,) * 2 * layers, 0),
    )


def test_updates_follow_their_gradients() -> None:
    problem = updates_at_the_end(8)
    order = memory_aware_order(problem, sorted(problem.graph.needed))
    check_rules(problem, Schedule(order))
    assert simulate(problem, Schedule.store_all(problem.graph)).peak_bytes == 80
    assert simulate(problem, Schedule(order)).peak_bytes == 20


@pytest.mark.parametrize("seed", range(100))
def test_memory_aware_order_is_legal_and_no_worse(seed: int) -> None:
    problem = mixed_problem(seed, budget=False)
    base = Schedule.store_all(problem.graph)
    order = Schedule(memory_aware_order(problem, base.order))
    check_rules(problem, order)
    assert sorted(order.order) == list(base.order)
    assert simulate(problem, order).peak_bytes <= simulate(problem, base).peak_bytes


@pytest.mark.parametrize("momentum", [False, True])
def test_updates_run_early_though_they_read_a_value_computed_late(momentum: bool) -> None:
    """The learning rate is read once per weight, after everything; each update takes its read
    along, and so the momentum times its decay."""
    weights = 4
    ops: list[Op] = []
    values: list[Value] = []

    def add(name: str, nbytes: int, inputs: tuple[int, ...], **options: object) -> int:
        at = len(values)
        values.append(Value(at, name, nbytes, producer=len(ops)))
        ops.append(Op(len(ops), name, name, inputs, (at,), **options))  # type: ignore[arg-type]
        return at

    chain = add("x", 10, ())
    gradients = []
    for _ in range(weights):
        chain = add("backward", 10, (chain,))
        gradients.append(add("gradient", 100, (chain,)))
    for gradient in gradients:
        rate = add("rate", 1, ())
        scaled = add("scaled", 100, (gradient, rate), may_reuse=(gradient,))
        if momentum:
            decayed = add("decayed", 100, ())
            scaled = add("slot", 100, (scaled, decayed), may_reuse=(scaled, decayed))
        add("assign", 0, (scaled,), recomputable=False)
    graph = Graph(tuple(ops), tuple(values), (chain,))
    problem = Problem(graph, Profile((1.0,) * len(ops), (0,) * len(ops), 0))
    before = simulate(problem, Schedule.store_all(graph)).peak_bytes
    after = simulate(problem, Schedule(memory_aware_order(problem, range(len(ops))))).peak_bytes
    assert before > 400
    assert after < (350 if momentum else 250)


class Builder:
    """A graph written op by op; every op has one output."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.values: list[Value] = []

    def add(self, name: str, nbytes: int, inputs: tuple[int, ...] = (), **options: object) -> int:
        at = len(self.values)
        self.values.append(Value(at, name, nbytes, producer=len(self.ops)))
        self.ops.append(Op(len(self.ops), name, name, inputs, (at,), **options))  # type: ignore[arg-type]
        return at

    def problem(
        self,
        outputs: tuple[int, ...],
        budget_bytes: int | None = None,
        times: tuple[float, ...] = (),
    ) -> Problem:
        costs = Profile(times or (1.0,) * len(self.ops), (0,) * len(self.ops), 0)
        return Problem(Graph(tuple(self.ops), tuple(self.values), outputs), costs, budget_bytes)


def test_many_quick_updates_do_not_keep_the_order_as_it_is() -> None:
    """Updates that run early are many ops where much is alive; what counts is how long that
    lasts."""
    builder = Builder()
    chain = builder.add("x", 100)
    activations = [chain := builder.add("forward", 100, (chain,)) for _ in range(4)]
    gradients = []
    for activation in reversed(activations):
        chain = builder.add("backward", 100, (chain, activation))
        gradients.append(builder.add("gradient", 30, (chain,)))
    quick = len(builder.ops)
    for gradient in gradients:
        for _ in range(10):
            gradient = builder.add("scaled", 30, (gradient,))
        builder.add("assign", 0, (gradient,), recomputable=False)
    problem = builder.problem((chain,), 250, (1.0,) * quick + (1e-6,) * (len(builder.ops) - quick))
    order = memory_aware_order(problem, range(len(problem.graph.ops)))
    assert order.index(gradients[-1]) > max(order.index(i) for i in range(quick, quick + 11))


def test_a_reduction_runs_at_once_and_an_expansion_late() -> None:
    builder = Builder()
    gradient = builder.add("gradient", 100)
    spread = builder.add("spread", 100)
    other = builder.add("to input", 100, (gradient,))
    small = builder.add("to weight", 5, (gradient,))
    result = builder.add("sum", 100, (other, spread))
    problem = builder.problem((small, result), 250)
    assert memory_aware_order(problem, range(5)) == (gradient, small, other, spread, result)


def test_an_input_goes_where_its_buffer_is_taken_over() -> None:
    """b takes the buffer of a over, which is computed again for e: without that, a and b are alive
    at once beside x."""
    builder = Builder()
    x = builder.add("x", 10, (), recomputable=False)
    a = builder.add("a", 10, (x,))
    b = builder.add("b", 10, (a,), may_reuse=(a,))
    c = builder.add("c", 1, (b,))
    e = builder.add("e", 1, (a, c))
    problem = builder.problem((x, e), 22)
    assert greedy.solve(problem).schedule.order == (x, a, b, c, a, e)


def test_small_values_stay_for_recomputations() -> None:
    """The mean is gone when it was read last, but what was spread out from it can only be computed
    again while it is there."""
    builder = Builder()
    x = builder.add("x", 1000, (), recomputable=False)
    mean = builder.add("mean", 1, (x,))
    spread = builder.add("spread", 1000, (mean,))
    first = builder.add("first", 1, (spread,))
    other = builder.add("other", 1500, (first,))
    second = builder.add("second", 1, (other,))
    result = builder.add("result", 1, (spread, second))
    problem = builder.problem((result,), 2100)
    assert greedy.solve(problem).schedule.order == (
        x,
        mean,
        spread,
        first,
        other,
        second,
        spread,
        result,
    )
