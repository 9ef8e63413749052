"""Targets, what the allocator needs above them, compiled peaks, and patience."""

import math
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
from fake_backend import FakeBackend, chain_problem, quick_plan, store_all_peak

from keras_remat.backends.xla.compiled_memory import CompiledMemory
from keras_remat.core.schedule import Schedule, Usage
from keras_remat.core.simulate import simulate
from keras_remat.errors import InfeasibleBudgetError, ScheduleNotFoundError
from keras_remat.planning import budget_search, calibrated_solve, compilations
from keras_remat.planning.budget_candidate import known_order
from keras_remat.solvers import solve

SIZE = 64
PROBLEM = chain_problem(SIZE)
PLAIN = store_all_peak(SIZE)
BUDGET = int(PLAIN * 0.7)
STORE_ALL = Schedule.store_all(PROBLEM.graph)
RESIDENT = PROBLEM.profile.resident_bytes


class Compiling(FakeBackend):
    """Tells the peak of a schedule when it is compiled, ``ratio`` times the bytes alive.

    Attributes:
        compiled: the schedules, in order.
    """

    auto_solver = "greedy"

    def __init__(self, ratio, **options):
        super().__init__(**options)
        self.ratio, self.compiled = ratio, []
        self.memory.compiled_peak_bytes = self.compiled_peak_bytes

    def compiled_peak_bytes(self, problem, schedule):
        self.compiled.append(schedule)
        return int(self.ratio(schedule) * simulate(problem, schedule).peak_bytes)


def planned(backend, budget):
    return quick_plan(PROBLEM, budget, backend, solver="auto")


def test_a_step_that_recomputes_nothing_may_fit_where_keras_own_does_not():
    """Predicted for it is what Keras's own step needs."""
    plain_is = Compiling(
        lambda schedule: 1.0,
        allocator_bytes=lambda problem, s: PLAIN if s == STORE_ALL else 0,
    )
    plan = planned(plain_is, int(1.2 * PLAIN))
    assert plan.predicted.peak_bytes == PLAIN
    assert not plan.recomputes


def test_what_is_predicted_not_to_fit_is_compiled_at_last():
    """Predictions are twice of what compiling tells, so no target gives one that is promising."""
    backend = Compiling(
        lambda schedule: 1.3 if schedule == STORE_ALL else 1.0,
        allocator_bytes=lambda problem, s: simulate(problem, s).peak_bytes,
    )
    budget = int(0.9 * PLAIN)
    assert planned(backend, budget).predicted.peak_bytes <= budget


@pytest.fixture
def closed():
    """Orders whose gaps are closed, by one op more, and a memory where gaps are as large as all
    that plain has alive."""
    orders = set()
    backend = FakeBackend(allocator_bytes=lambda problem, s: 0 if s in orders else PLAIN)

    def with_fewer_gaps(problem, schedule, deadline_s):
        assert problem.budget_bytes == int(0.8 * PLAIN)
        if schedule in orders:
            return None
        orders.add(other := Schedule((0, *schedule.order)))
        return other

    backend.memory.with_fewer_gaps = with_fewer_gaps
    return orders, backend.memory


def test_what_does_not_fit_is_tried_with_fewer_gaps(closed):
    orders, memory = closed
    budget = int(0.8 * PLAIN)
    found = calibrated_solve.within_budget(PROBLEM, budget, memory, solver="greedy")
    assert found.schedule in orders
    assert found.peak_bytes <= budget


def test_a_known_order_that_does_not_fit_is_tried_with_fewer_gaps(closed):
    orders, memory = closed
    budget = int(0.8 * PLAIN)
    known = solve(PROBLEM.with_budget(budget), solver="greedy", seed=0).schedule
    found = known_order(PROBLEM, known, budget, memory)
    assert found.schedule == Schedule((0, *known.order)) in orders
    assert found.peak_bytes <= budget


def test_what_needs_least_of_all_that_were_compiled_is_told():
    backend = Compiling(lambda schedule: 1.0 + 0.1 * len(schedule.order) / len(STORE_ALL.order))
    floor = PROBLEM.floor_bytes
    with pytest.raises(ScheduleNotFoundError, match="auto: no schedule found") as caught:
        planned(backend, floor)
    peaks = [backend.compiled_peak_bytes(PROBLEM, s) for s in list(backend.compiled)]
    assert caught.value.best_peak_bytes == min(peaks) > floor
    assert caught.value.least_over_limit.peak_bytes == min(peaks)


def test_a_schedule_that_is_known_to_take_more_is_written_anew_for_a_lower_limit():
    """Loosely, every schedule takes three times as much, so none keeps to it."""

    def compiled(problem, schedule):
        added = simulate(problem, schedule or STORE_ALL).peak_bytes - RESIDENT
        is_loose = problem.room_bytes is None or 3 * added <= problem.room_bytes
        return 3 * added if schedule is not None and is_loose else added

    memory = CompiledMemory(compiled, on_gpu=True, rewrites=True)
    known = solve(PROBLEM.with_budget(BUDGET), solver="greedy", seed=0)
    budget = simulate(PROBLEM, known.schedule).peak_bytes
    assert memory.compiled_peak_bytes(PROBLEM, known.schedule) > budget
    found = calibrated_solve.within_budget(PROBLEM, budget, memory, solver="greedy")
    assert found.is_exact
    assert found.peak_bytes == memory.peak_bytes(PROBLEM, found.schedule) <= budget


def written(monkeypatch, least=0.0, next_adds=None, next_takes=0.0, next_factor=1.0, **options):
    """Returns what is found under a budget where schedules are written in three ways, the schedules
    that were written in the last one, and the first that was asked for.

    Args:
        least: schedules take 6 % more than predicted in the quickest way, this share of the budget
            at least.
        next_adds: to the step's time, as a share of store-all, in the next way, in which schedules
            take what is predicted; not known where ``None``.
        next_takes, next_factor: they take this share of the budget at least, and so many times
            what is predicted.
        options: of compilations.
    """
    monkeypatch.setattr(compilations, "OPTIONS", replace(compilations.OPTIONS, **options))
    budget = int(0.8 * PLAIN)
    room, ways, asked = budget - RESIDENT, {}, []

    def compiled(problem, schedule):
        added = simulate(problem, schedule or STORE_ALL).peak_bytes - RESIDENT
        if schedule is None:
            return added
        asked.append(schedule)
        loosely = max(int(1.06 * added), int(least * 1.1 * room))
        takes = loosely, max(int(next_factor * added), int(next_takes * room))
        for way in range(ways.get(schedule, 0), 3):
            ways[schedule] = way
            if way == 2 or problem.room_bytes is None or takes[way] <= problem.room_bytes:
                break
        return added if way == 2 else takes[way]

    def compiled_time_s(problem, schedule):
        if next_adds is None:
            return None
        added_s = next_adds * PROBLEM.store_all_time_s if ways.get(schedule) else 0.0
        return simulate(problem, schedule or STORE_ALL).time_s + added_s

    memory = CompiledMemory(compiled, on_gpu=True, rewrites=True, compiled_time_s=compiled_time_s)
    found = calibrated_solve.within_budget(PROBLEM, budget, memory, solver="greedy")
    assert found.is_exact
    assert found.peak_bytes <= budget
    return ways[found.schedule], [one for one, way in ways.items() if way == 2], asked[0], found


@pytest.mark.parametrize("adds", [None, 0.0], ids=["not known", "nothing"])
def test_a_schedule_that_misses_by_little_is_written_in_the_next_way(monkeypatch, adds):
    """Where that adds nothing, or it is not known what."""
    way, last, first, found = written(monkeypatch, next_adds=adds)
    assert (way, last, found.schedule) == (1, [], first)


@pytest.mark.parametrize(
    ("least", "adds", "way"),
    [(0.0, 9.0, 0), (1.0, 9.0, 1), (0.0, 0.03, 1)],
    ids=["it is quicker", "it misses, too", "it recomputes more than that"],
)
def test_where_the_next_way_adds_time_a_schedule_for_less_is_tried(monkeypatch, least, adds, way):
    """What it adds in the quickest way decides."""
    taken, last, first, found = written(monkeypatch, least, adds)
    assert (taken, last) == (way, [])
    assert (found.schedule == first) == bool(way)


@pytest.mark.parametrize(
    ("least", "slower_way_share", "is_last"),
    [(0.0, 9.0, False), (1.0, 9.0, True), (0.0, 0.0, True)],
    ids=["another is found", "none is", "another is too dear"],
)
def test_a_schedule_that_misses_in_the_next_way_waits(
    monkeypatch, least, slower_way_share, is_last
):
    """The slower ways are left for when a schedule for less misses, too, or is too dear."""
    way, last, first, _ = written(
        monkeypatch, least, next_takes=1.02, slower_way_share=slower_way_share
    )
    assert (way == 2) == bool(last) == is_last
    if is_last:  # the first one recomputes least
        assert last == [first]


def test_what_is_far_over_in_the_quickest_way_waits_in_the_next(monkeypatch):
    """Values are held only where a schedule for less misses in that way, too."""
    way, last, first, found = written(
        monkeypatch, least=2.0, next_factor=1.03, slower_way_share=9.0
    )
    assert (way, last) == (1, [])
    assert found.schedule != first


def test_so_many_are_compiled_and_no_more(monkeypatch):
    sure = compilations.OPTIONS.sure
    monkeypatch.setattr(compilations, "OPTIONS", replace(compilations.OPTIONS, most=sure))
    backend = Compiling(lambda schedule: 3.0)
    with pytest.raises(ScheduleNotFoundError):
        planned(backend, int(0.9 * PLAIN))
    assert len(set(backend.compiled)) == sure


@pytest.mark.parametrize("clock_s", [math.inf, 10.0], ids=["no end", "an end"])
def test_compiling_takes_no_time_from_solving(monkeypatch, clock_s):
    """Every compilation takes an hour by the clock, and solving none. Past the end only as many are
    compiled as always."""
    now, hour, sure = [0.0], 3600.0, compilations.OPTIONS.sure
    for module in (calibrated_solve, budget_search, compilations):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    backend = Compiling(lambda schedule: 3.0)
    told = backend.memory.compiled_peak_bytes

    def compiled(problem, schedule):
        now[0] += hour
        return told(problem, schedule)

    backend.memory.compiled_peak_bytes = compiled
    with pytest.raises(ScheduleNotFoundError):
        calibrated_solve.within_budget(
            PROBLEM, int(0.9 * PLAIN), backend.memory,
            solver="greedy", time_limit_s=20.0, clock_s=clock_s,
        )  # fmt: skip
    assert (len(set(backend.compiled)) > sure) == (clock_s == math.inf)


# ------------------------------------------------------------------ what the allocator needs


def test_allocators_overhead_is_made_up_for():
    """The allocator needs one value more than simulated, so schedules are solved for less until
    that fits."""
    extra = SIZE * 1024
    backend = FakeBackend(allocator_bytes=lambda problem, schedule: extra)
    plan = quick_plan(PROBLEM, BUDGET, backend=backend)
    simulated = simulate(PROBLEM, plan.solution.schedule).peak_bytes
    assert plan.predicted.peak_bytes == simulated + extra <= BUDGET
    assert plan.budget_bytes == BUDGET
    assert plan.store_all == Usage(16.0, PLAIN + extra)
    assert quick_plan(PROBLEM, BUDGET).predicted.time_s <= plan.predicted.time_s


def test_a_lowered_step_over_the_budget_is_planned_again():
    """Where lowering tells the peak, it decides, and not the prediction that the schedule was found
    by."""
    backend = FakeBackend()
    backend.memory.compiled_peak_bytes = lambda problem, schedule: int(
        1.1 * simulate(problem, schedule).peak_bytes
    )
    made = quick_plan(PROBLEM, BUDGET, backend=backend)
    assert made.predicted.peak_bytes == backend.memory.compiled_peak_bytes(
        PROBLEM, made.solution.schedule
    )
    assert made.predicted.peak_bytes <= BUDGET


@pytest.mark.parametrize("error", [ScheduleNotFoundError, InfeasibleBudgetError])
def test_target_between_is_tried_where_the_full_correction_is_unreachable(monkeypatch, error):
    """The allocator needs more for the first order only; a solver that finds nothing at the lower
    target, or proves that there is nothing, is asked in between."""
    asked = []
    real = budget_search.solve

    def solve(problem, **options):
        asked.append(problem.budget_bytes)
        if len(asked) == 2:
            raise error(problem.budget_bytes, problem.floor_bytes)
        return real(problem, **options)

    monkeypatch.setattr(budget_search, "solve", solve)
    backend = FakeBackend(
        allocator_bytes=lambda problem, schedule: 2 * SIZE * 1024 if len(asked) == 1 else 0
    )
    plan = quick_plan(PROBLEM, BUDGET, backend=backend)
    assert asked[0] == BUDGET > asked[2] > asked[1]
    assert len(asked) == 3
    assert plan.predicted.peak_bytes <= BUDGET


def test_budget_below_the_floor_is_refused_before_solving(monkeypatch):
    monkeypatch.setattr(
        "keras_remat.planning.budget_search.solve",
        lambda *args, **options: pytest.fail("solved"),
    )
    with pytest.raises(InfeasibleBudgetError) as caught:
        quick_plan(PROBLEM, PROBLEM.floor_bytes - 1)
    assert (caught.value.budget_bytes, caught.value.floor_bytes) == (
        PROBLEM.floor_bytes - 1,
        PROBLEM.floor_bytes,
    )


def test_what_is_proved_of_a_lower_target_is_not_said_of_the_budget(monkeypatch):
    """With what the allocator wastes nothing fits, though the bytes alive would."""
    real = budget_search.solve

    def solve(problem, **options):
        if problem.budget_bytes < BUDGET:
            raise InfeasibleBudgetError(problem.budget_bytes, problem.budget_bytes + 1)
        return real(problem, **options)

    monkeypatch.setattr(budget_search, "solve", solve)
    waste = SIZE * 512
    backend = FakeBackend(allocator_bytes=lambda problem, schedule: waste)
    with pytest.raises(ScheduleNotFoundError) as caught:
        quick_plan(PROBLEM, BUDGET, backend=backend)
    assert caught.value.budget_bytes == BUDGET < caught.value.best_peak_bytes


def test_allocator_that_always_needs_more_ends_in_not_found():
    backend = FakeBackend(allocator_bytes=lambda problem, schedule: PLAIN)
    with pytest.raises(ScheduleNotFoundError) as caught:
        quick_plan(PROBLEM, BUDGET, backend=backend)
    assert caught.value.budget_bytes == BUDGET
    assert caught.value.best_peak_bytes > PLAIN
    assert caught.value.floor_bytes == PROBLEM.floor_bytes


def test_targets_that_hardly_differ_are_not_tried_where_all_of_them_miss_by_far(monkeypatch):
    asked = []
    real = budget_search.solve

    def solve(problem, **options):
        asked.append(problem.budget_bytes)
        return real(problem, **options)

    monkeypatch.setattr(budget_search, "solve", solve)
    backend = FakeBackend(allocator_bytes=lambda problem, schedule: PLAIN)
    with pytest.raises(ScheduleNotFoundError):
        quick_plan(PROBLEM, BUDGET, backend=backend)
    least = budget_search.OPTIONS.least_step * (BUDGET - PROBLEM.floor_bytes)
    assert asked[0] == BUDGET
    assert all(higher - lower > least for higher, lower in pairwise(asked))
    assert PROBLEM.floor_bytes < asked[-1] < PROBLEM.floor_bytes + 3 * least


@pytest.mark.parametrize("last_miss", [0.04, 0.06])
def test_a_neighbour_of_a_target_that_hardly_missed_is_tried(monkeypatch, last_miss):
    """Of one that missed by more, none is. Misses are shares of the room above the floor."""
    room, floor, asked = BUDGET - PROBLEM.floor_bytes, PROBLEM.floor_bytes, []
    misses = {0: 1.0, 2: 0.3, 4: last_miss, 5: last_miss, 6: 0.3}
    real = budget_search.solve

    def solve(problem, **options):
        asked.append(problem.budget_bytes)
        if problem.budget_bytes < floor + 0.65 * room:
            raise ScheduleNotFoundError(problem.budget_bytes, floor)
        return real(problem.with_budget(BUDGET), **options)

    def extra(problem, schedule):
        missed = misses.get(len(asked) - 1)
        peak = simulate(problem, schedule).peak_bytes
        return 0 if missed is None else BUDGET + int(missed * room) - peak

    monkeypatch.setattr(budget_search, "solve", solve)
    memory = FakeBackend(allocator_bytes=extra).memory
    memory.order_matters = True
    search = budget_search.BudgetSearch(PROBLEM, BUDGET, memory, "greedy", seed=0)
    if last_miss > budget_search.OPTIONS.least_step:
        with pytest.raises(ScheduleNotFoundError):
            search.run(BUDGET, deadline_s=0.0)
        assert len(asked) < budget_search.OPTIONS.corrections
    else:
        found, target = search.run(BUDGET, deadline_s=0.0)
        assert found.peak_bytes <= BUDGET
        assert asked[-1] == target > asked[-2] > asked[-3]
        assert len(asked) == 8


@pytest.mark.parametrize("error", [ScheduleNotFoundError, InfeasibleBudgetError])
def test_known_order_is_the_plan_where_the_solver_finds_none_and_tells_what_the_allocator_wastes(
    monkeypatch, error
):
    waste = SIZE * 512
    backend = FakeBackend(allocator_bytes=lambda problem, schedule: waste)
    known = quick_plan(PROBLEM, BUDGET, backend=backend).solution.schedule
    asked = []

    def solve(problem, *, solver, **options):
        asked.append((solver, problem.budget_bytes))
        raise error(problem.budget_bytes, problem.floor_bytes)

    monkeypatch.setattr(budget_search, "solve", solve)
    plan = quick_plan(PROBLEM, BUDGET, backend=backend, solver="auto", known=known)
    assert asked == [("auto", BUDGET - waste)]
    assert plan.solution.schedule == known
    assert plan.predicted.peak_bytes <= BUDGET


def test_known_order_over_the_budget_is_left_out():
    known = Schedule.store_all(PROBLEM.graph)
    plan = quick_plan(PROBLEM, BUDGET, solver="auto", known=known)
    assert plan.solution.schedule != known
    assert plan.predicted.peak_bytes <= BUDGET


def test_solver_that_finds_nothing_at_all_is_not_asked_again(monkeypatch):
    asked = []

    def solve(problem, **options):
        asked.append(problem.budget_bytes)
        raise ScheduleNotFoundError(problem.budget_bytes, problem.floor_bytes)

    monkeypatch.setattr(budget_search, "solve", solve)
    with pytest.raises(ScheduleNotFoundError):
        quick_plan(PROBLEM, BUDGET)
    assert asked == [BUDGET]


@pytest.mark.parametrize("solver", ["auto", "greedy"])
def test_a_plan_is_looked_for_however_little_time_there_is(solver):
    plan = quick_plan(PROBLEM, PLAIN, solver=solver, time_limit_s=1e-9)
    assert plan.predicted.peak_bytes <= PLAIN


@pytest.mark.parametrize(
    ("patient", "deadline_s", "solves"), [(True, 2.5, 2), (True, -1e6, 2), (False, 2.5, 1)]
)
def test_patience_is_what_comes_after_the_deadline(monkeypatch, patient, deadline_s, solves):
    """With nothing found that the allocator agrees to, the target is corrected once more, unless
    something runs already; also where the time was over before anything began."""
    asked, late_s = [], 5.0
    clock = {"s": 0.0}
    monkeypatch.setattr(
        "keras_remat.planning.calibrated_solve.time.perf_counter", lambda: clock["s"]
    )
    real = budget_search.solve

    def solve(problem, **options):
        asked.append(problem.budget_bytes)
        clock["s"] += late_s
        return real(problem, **{**options, "time_limit_s": 1.0})

    monkeypatch.setattr(budget_search, "solve", solve)
    backend = FakeBackend(
        allocator_bytes=lambda problem, schedule: 2 * SIZE * 1024 if len(asked) < 2 else 0
    )
    way = budget_search.BudgetSearch(PROBLEM, BUDGET, backend.memory, "greedy", 0)
    if patient:
        assert way.run(BUDGET, deadline_s)[0].peak_bytes <= BUDGET
    else:
        with pytest.raises(ScheduleNotFoundError):
            way.run(BUDGET, deadline_s, sure=1)
    assert len(asked) == solves


@pytest.mark.parametrize(("clock_s", "last_s"), [(0.0, 0.5), (2.0, 1.4), (math.inf, 5.6)])
def test_the_clock_ends_what_improves_a_plan(monkeypatch, clock_s, last_s):
    """A first one is looked for all the same."""
    given, clock = [], {"s": 0.0}
    module, real = "keras_remat.planning.budget_search", budget_search.solve

    def solve(problem, *, solver, time_limit_s, **options):
        given.append((solver, time_limit_s))
        return real(problem, solver="greedy", time_limit_s=1.0, **options)

    monkeypatch.setattr(f"{module}.time.perf_counter", lambda: clock["s"])
    monkeypatch.setattr(f"{module}.solve", solve)
    memory = FakeBackend().memory
    found = calibrated_solve.within_budget(
        PROBLEM, BUDGET, memory, time_limit_s=8.0, clock_s=clock_s
    )
    assert found.peak_bytes <= BUDGET
    assert [solver for solver, _ in given] == ["greedy_first", "auto"]
    assert given[-1][1] == pytest.approx(last_s)
