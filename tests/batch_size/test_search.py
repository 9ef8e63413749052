"""The batch search: exact scaling, and the largest batch for which a schedule fits."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
from fake_backend import (
    SAMPLE_BYTES,
    FakeBackend,
    chain_graph,
    chain_problem,
    quick_plan,
    scaling_of,
    store_all_peak,
)
from tight_limit import with_margin

from keras_remat.batch_size import search as searching
from keras_remat.batch_size.find import find_max_batch_size
from keras_remat.batch_size.found import overhead_bound
from keras_remat.batch_size.search import SizeSearch, search_batch_size
from keras_remat.batch_size.search_work import OPTIONS, SearchWork
from keras_remat.core.limit import Limit
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate
from keras_remat.errors import (
    InfeasibleBudgetError,
    RematError,
    ScheduleNotFoundError,
    UnsupportedModelError,
)
from keras_remat.solvers.engines import native
from keras_remat.solvers.search import greedy
from keras_remat.units import MIB

# ------------------------------------------------------------------ the search


def search(budget, *, start=4, backend=None, **options):
    return search_batch_size(
        scaling_of(),
        start,
        Limit(budget),
        backend or FakeBackend(),
        **{"time_limit_s": 30.0, **options},
    )


def fits(size, budget, backend=None):
    """Whether a schedule is found for a batch, by itself."""
    try:
        quick_plan(chain_problem(size), budget, backend)
    except (InfeasibleBudgetError, ScheduleNotFoundError):
        return False
    return True


@pytest.fixture
def in_python(monkeypatch):
    """No search waits until its moves are machine code."""
    monkeypatch.setattr(native, "is_compiled", lambda wait_s=0.0: False)


@pytest.mark.parametrize("multiple", [2, 3, 8])
def test_every_size_is_one_that_the_devices_divide(multiple):
    budget = store_all_peak(40)
    found = search(budget, start=2 * multiple, multiple=multiple, at_most=1000)
    one = search(budget, start=2 * multiple, at_most=1000)
    assert all(probe.batch_size % multiple == 0 for probe in found.probes)
    assert found.plain_batch_size == 40 - 40 % multiple
    assert found.max_batch_size >= 0.9 * one.max_batch_size
    assert found.plan.problem.graph == chain_graph(found.max_batch_size)
    rates = {p.batch_size: p.samples_per_s for p in found.probes if p.plan is not None}
    assert rates[found.max_batch_size] == found.max_batch_size / found.plan.predicted.time_s


def test_gaps_that_the_best_order_leaves_are_closed_as_long_as_it_reaches_further_then():
    """Here every order leaves gaps of a tenth of what is alive, until an op runs once more."""
    closed = set()

    def gaps_bytes(problem, schedule):
        return 0 if schedule in closed else simulate(problem, schedule).peak_bytes // 10

    def with_fewer_gaps(problem, schedule, deadline_s):
        assert problem.budget_bytes == budget
        if schedule in closed:
            return None
        closed.add(other := Schedule((0, *schedule.order)))
        return other

    backend, budget = FakeBackend(allocator_bytes=gaps_bytes), store_all_peak(400)
    before = search(budget, backend=backend, max_overhead=None)
    backend.memory.with_fewer_gaps = with_fewer_gaps
    found = search(budget, backend=backend, max_overhead=None)
    assert len(closed) == 1
    assert found.plan.solution.schedule in closed
    assert found.max_batch_size > 1.05 * before.max_batch_size
    assert found.plan.predicted.peak_bytes <= budget
    bounded = search(budget, backend=backend, max_overhead=0.0)  # an op more is over the bound
    assert bounded.plan.solution.schedule not in closed


@pytest.mark.parametrize("start", [1, 4, 37, 400])
def test_largest_batch_is_found_from_anywhere(start):
    budget = store_all_peak(40)
    found = search(budget, start=start, max_overhead=None)
    assert found.plain_batch_size == 40
    assert fits(found.max_batch_size, budget)
    assert not fits(found.max_batch_size + max(1, found.max_batch_size // 100), budget)
    assert found.max_batch_size > 60
    assert found.plan.predicted.peak_bytes <= budget
    assert all((p.reason == "") == (p.plan is not None) for p in found.probes)


def test_plan_of_the_search_is_for_the_found_size():
    found = search(store_all_peak(40))
    found.plan.check(chain_problem(found.max_batch_size))
    usage = simulate(chain_problem(found.max_batch_size), found.plan.solution.schedule)
    assert usage.peak_bytes == found.plan.predicted.peak_bytes
    assert str(found.max_batch_size) in str(found)


@pytest.mark.parametrize("multiple", [1, 2])
def test_a_search_that_knows_an_order_begins_where_it_reaches(multiple):
    """A second search by better costs made the solves of the first one again."""
    first = search(store_all_peak(40), start=4, multiple=multiple)
    order = first.plan.solution.schedule
    known = first.max_batch_size // multiple, order
    again = search(store_all_peak(40), start=4, multiple=multiple, known=known)
    assert again.max_batch_size >= first.max_batch_size > first.plain_batch_size
    sizes = [probe.batch_size for probe in again.probes]
    assert sizes[:2] == [first.plain_batch_size, first.max_batch_size]
    assert len(sizes) < len(first.probes)


def test_the_fastest_size_is_the_best_of_the_probes():
    found = search(store_all_peak(40))
    best = max(found.probes, key=lambda p: p.samples_per_s)
    assert found.fastest_batch_size == best.batch_size


@pytest.mark.parametrize("at_most", [1, 3, 4, 30, 50])
def test_no_size_above_at_most_is_tried(at_most):
    found = search(store_all_peak(64), at_most=at_most)
    assert found.max_batch_size == at_most
    assert max(p.batch_size for p in found.probes) == at_most


def test_overhead_bound_holds_and_costs_batch_size():
    budget = store_all_peak(40)
    plain, forward, free = (search(budget, max_overhead=bound) for bound in (0, "forward", None))
    assert plain.max_batch_size == 40
    assert plain.plan.overhead == 0.0
    assert overhead_bound(chain_problem(4), "forward") == 0.5
    assert forward.plan.overhead <= 0.5
    assert 40 < forward.max_batch_size <= free.max_batch_size
    refused = [p for p in plain.probes if p.plan is None]
    assert refused
    assert any("over the bound of 0.0% (max_overhead)" in p.reason for p in refused)


def test_where_the_bound_alone_is_in_the_way_the_error_says_so():
    """One sample fits, but not without recomputation."""
    with pytest.raises(ScheduleNotFoundError, match="max_overhead"):
        search(store_all_peak(1) - 1, start=8, max_overhead=0)


def test_feasibility_that_is_not_monotone_never_ends_on_a_batch_that_does_not_fit():
    """The allocator wastes much at sizes that are no multiple of 4, so large ones fit where smaller
    ones do not."""
    budget = store_all_peak(40)

    def waste(problem, schedule):
        size = problem.graph.values[0].shape[0]
        return 0 if size % 4 == 0 else 6 * size * SAMPLE_BYTES

    backend = FakeBackend(allocator_bytes=waste)
    found = search(budget, backend=backend, max_overhead=None)
    assert fits(found.max_batch_size, budget, backend)
    assert found.max_batch_size >= 40
    assert (
        backend.memory.peak_bytes(chain_problem(found.max_batch_size), found.plan.solution.schedule)
        <= budget
    )


def test_order_that_is_known_is_used_where_the_solver_fails(monkeypatch):
    """The solver works twice and then never again; the orders it found still carry smaller and
    slightly larger batches."""
    real, calls = searching.new_order, []

    def new_order(problem, budget, share, backend, **options):
        calls.append(problem.graph.values[0].shape[0])
        if len(calls) > 2:
            raise ScheduleNotFoundError(budget, problem.floor_bytes)
        return real(problem, budget, share, backend, **options)

    monkeypatch.setattr(searching, "new_order", new_order)
    found = search(store_all_peak(40), start=50, max_overhead=None)
    assert found.max_batch_size >= 50
    assert found.plan.recomputes
    assert len(calls) > 2


def test_an_order_that_reaches_less_than_it_was_made_for_closes_nothing(monkeypatch):
    """The allocator wastes a tenth of everything: at first no order reaches the size it was solved
    for, and still the search goes on above."""
    real, sizes = searching.new_order, []

    def new_order(problem, *arguments, **options):
        sizes.append(problem.graph.values[0].shape[0])
        return real(problem, *arguments, **options)

    monkeypatch.setattr(searching, "new_order", new_order)
    backend = FakeBackend(
        allocator_bytes=lambda problem, schedule: simulate(problem, schedule).peak_bytes // 10
    )
    found = search(store_all_peak(40), start=10, backend=backend, max_overhead=None)
    short = next(k for k, probe in enumerate(found.probes) if "is over" in probe.reason)
    reached = max(probe.batch_size for probe in found.probes[:short] if probe.plan is not None)
    assert found.probes[short].batch_size > reached
    assert max(sizes[1:]) >= found.probes[short].batch_size
    assert found.max_batch_size > reached


@pytest.mark.usefixtures("in_python")
def test_late_time_begins_with_the_best_known_order_and_ends(monkeypatch):
    starts, clock = [], [0.0]

    def new_order(problem, budget, *arguments, solver, time_limit_s, near=None, **options):
        clock[0] += time_limit_s
        starts.append((solver, near))
        raise ScheduleNotFoundError(budget, problem.floor_bytes)

    monkeypatch.setattr(searching, "new_order", new_order)
    monkeypatch.setattr(searching.time, "perf_counter", lambda: clock[0])
    found = search(store_all_peak(40), time_limit_s=10.0, late_time_limit_s=100.0)
    assert found.max_batch_size == 40
    assert {solver for solver, start in starts if start is None} == {
        "greedy",
        "greedy_first",
        "auto",
    }
    assert {start for solver, start in starts if solver == "nearby"} == {
        found.plan.solution.schedule
    }
    assert clock[0] <= found.time_limit_s == 110.0


@pytest.mark.usefixtures("in_python")
def test_what_is_found_depends_on_the_clock_only_where_that_ends_the_search(monkeypatch):
    """Every look at the clock, solvers' too, takes a time: that of an idle machine, ten times as
    long, or so long that the seconds are over before the work is."""
    backend = FakeBackend()
    backend.auto_solver = "greedy"

    def found(tick_s):
        clock = itertools.count(0.0, tick_s)
        monkeypatch.setattr(searching.time, "perf_counter", lambda: next(clock))
        found = search(store_all_peak(40), backend=backend, time_limit_s=1.0, late_time_limit_s=1.0)
        return found, next(clock)

    idle, looks = found(1e-9)
    tick_s = idle.time_limit_s / (looks / 1e-9)  # the whole search takes as long as it may
    slow, _ = found(0.1 * tick_s)
    slower, took_s = found(0.99 * tick_s)
    for one in (slow, slower):
        assert [p.batch_size for p in one.probes] == [p.batch_size for p in idle.probes]
        assert one.orders == idle.orders
        assert not one.ended_by_clock
    assert len(idle.probes) > 3
    assert took_s <= idle.time_limit_s
    slowest, _ = found(1e3 * tick_s)
    sure = [p.batch_size for p in idle.probes][: len(slowest.probes)]
    assert [p.batch_size for p in slowest.probes] == sure  # the first sizes are the same
    assert 40 < slowest.max_batch_size <= idle.max_batch_size
    assert slowest.ended_by_clock
    assert "its time was over" in str(slowest)


def test_no_clock_ends_the_first_sizes(monkeypatch):
    """They are bounded by a number of solves, each of few passes over the ops."""
    idle = search(store_all_peak(40), start=4, time_limit_s=1e-6)
    with monkeypatch.context() as patched:
        clock = itertools.count(0.0, 1e9)
        patched.setattr(searching.time, "perf_counter", lambda: next(clock))
        late = search(store_all_peak(40), start=4, time_limit_s=1e-6)
    assert [p.batch_size for p in late.probes] == [p.batch_size for p in idle.probes]
    assert late.orders == idle.orders
    assert late.max_batch_size >= 0.9 * search(store_all_peak(40), start=4).max_batch_size


def test_a_first_solve_is_sure_and_its_steps_end_it():
    problem, work = chain_problem(4), SearchWork(0.0, -math.inf, sure_solves=2)
    for _ in range(2):
        assert work.is_sure("greedy")
        solve_s, patience = work.take(problem, "greedy", 1e-9)
        assert solve_s == OPTIONS.sure_passes * len(problem.graph.ops) / greedy.OPTIONS.steps_per_s
        assert patience == math.inf
    assert not work.is_sure("greedy")
    assert work.take(problem, "greedy", 0.5) == (0.5, 1.0)


def test_a_solver_whose_steps_are_not_counted_is_not_sure():
    work = SearchWork(1.0, sure_solves=1)
    assert work.take(chain_problem(4), "auto", 1.0) == (1.0, OPTIONS.turns * OPTIONS.patience)
    assert work.take(chain_problem(4), "nearby", 1.0) == (1.0, OPTIONS.patience)
    assert not work.is_sure("auto")
    assert work.is_sure("greedy")


@pytest.mark.parametrize("start", [1, 7, 300])
@pytest.mark.parametrize("at_most", [60, 2**40])
def test_few_predictions_tell_how_far_an_order_reaches(start, at_most):
    """A peak that follows the size along a line takes few."""
    asked = []

    def waste(problem, schedule):
        asked.append(problem.graph.values[0].shape[0])
        return 0

    one = SizeSearch(
        chain_problem, Limit(store_all_peak(500)), FakeBackend(allocator_bytes=waste), None,
        at_most, 0, SearchWork(),
    )  # fmt: skip
    order = Schedule.store_all(chain_problem(4).graph)
    reached = one.largest_fitting(order, min(start, at_most))
    assert reached == min(at_most, 500) or 0.99 * 500 <= reached <= 500
    assert len(set(asked)) <= 6


@pytest.mark.usefixtures("in_python")
def test_a_deadline_that_passes_between_two_looks_at_the_clock_ends_no_search_in_an_error():
    class Passing(SearchWork):
        looks = 0

        def left_s(self):
            self.looks += 1
            return 1.0 if self.looks == 1 else 0.0

    one = SizeSearch(
        chain_problem, Limit(store_all_peak(40)), FakeBackend(), None, 1000, 0, Passing()
    )
    one.begin(4, "greedy", 1.0)
    one.improve_from_best(0.1)
    assert one.largest >= 40


@pytest.mark.usefixtures("in_python")
def test_steps_from_a_known_order_end_when_none_helps(monkeypatch):
    tried = []

    def new_order(problem, budget, *arguments, solver, **options):
        tried.append(solver)
        raise ScheduleNotFoundError(budget, problem.floor_bytes)

    monkeypatch.setattr(searching, "new_order", new_order)
    search(store_all_peak(40), late_time_limit_s=60.0)
    assert 0 < tried.count("nearby") < 20


@pytest.mark.parametrize("start", [1, 16])
def test_not_even_one_sample_fits(start):
    budget = chain_problem(1).floor_bytes - 1
    with pytest.raises(InfeasibleBudgetError) as caught:
        search(budget, start=start)
    assert caught.value.floor_bytes == budget + 1


def test_one_sample_over_the_overhead_bound_is_not_found():
    budget = int(store_all_peak(1) * 0.8)
    assert fits(1, budget)
    with pytest.raises(RematError):
        search(budget, start=1, max_overhead=0)


def test_work_ends_the_search_after_a_few_solves():
    """Every solve costs up to a quarter of the limit, and finds its first schedule all the same."""
    found = search(store_all_peak(40), start=40, time_limit_s=1e-9)
    assert found.plain_batch_size == 40
    assert found.max_batch_size >= 40
    assert len(found.probes) <= 10


# ------------------------------------------------------------------ on TensorFlow


@pytest.mark.parametrize("profile", ["measured", pytest.param("estimated", marks=pytest.mark.slow)])
def test_search_leaves_the_model_as_it_was_and_keeps_to_the_budget(models, profile):
    from keras_remat.backends.tensorflow import backend as tensorflow_backend

    model, batch = models.mlp(256, width=256, blocks=2, optimizer="sgd")
    tensorflow_backend().trace(model, batch)  # builds the optimizer and the metrics
    before = models.state_of(model)
    limit = with_margin(tensorflow_backend().device.in_use_bytes() + 24 * MIB)
    found = find_max_batch_size(model, batch, limit, profile=profile, time_limit_s=1.0)
    models.assert_same_bits(models.state_of(model), before)
    assert found.limit_bytes == limit
    assert found.plan.budget_bytes == int(limit * 0.95)
    if profile == "estimated":
        assert found.plan.predicted.peak_bytes <= found.plan.budget_bytes
    else:
        assert found.plan.measured.peak_bytes <= limit
    assert found.plan.profile_source == profile
    assert found.max_batch_size >= found.plain_batch_size > 256


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"memory_limit": "8Gb"}, ValueError, "GiB"),
        ({"memory_limit": -1}, ValueError, "positive"),
        ({"profile": "guessed"}, ValueError, "estimated"),
        ({"max_overhead": -0.5}, ValueError, "max_overhead"),
        ({"max_overhead": float("nan")}, ValueError, "max_overhead"),
        ({"max_overhead": "backward"}, ValueError, "max_overhead"),
        ({"margin": 1.0}, ValueError, "margin"),
        ({"seed": None}, TypeError, "seed"),
        ({"time_limit_s": "x"}, TypeError, "time_limit_s"),
        ({"batch": 0}, ValueError, "positive"),
        ({"batch": True}, TypeError, "batch"),
        ({"time_limit_s": 0}, ValueError, "time_limit_s"),
    ],
)
def test_wrong_arguments_say_what_is_accepted(models, arguments, error, says):
    model, batch = models.mlp(4, width=4, blocks=1)
    with pytest.raises(error, match=says):
        find_max_batch_size(
            model, **{"batch": batch, "memory_limit": "8GiB", "profile": "estimated", **arguments}
        )


def test_a_fixed_batch_is_named_instead_of_a_size_that_nobody_asked_for(models):
    inputs = models.keras.Input(batch_shape=(8, 5, 4), name="rows")
    outputs = models.keras.layers.SimpleRNN(2, stateful=True)(inputs)
    model = models.keras.Model(inputs, outputs)
    model.compile("sgd", "mse", jit_compile=False)
    x, y = np.ones((8, 5, 4), "float32"), np.ones((8, 2), "float32")
    fixed = r"batches of 8 samples only: its input 'rows' has the fixed shape \(8, 5, 4\)"
    for batch in (8, (x, y)):
        with pytest.raises(UnsupportedModelError, match=fixed):
            find_max_batch_size(model, batch, "8GiB", profile="estimated")
    with pytest.raises(ValueError, match=r"batch is 32.*fixed shape \(8, 5, 4\): give 8"):
        find_max_batch_size(model, 32, "8GiB", profile="estimated")
    with pytest.raises(RematError, match="A limit of"):  # no half of the batch can be tried
        find_max_batch_size(model, (x, y), "1KiB")


@pytest.mark.parametrize(("replays", "times"), [(True, 4), (False, 16)])
def test_a_simulated_peak_takes_less_work_than_a_replayed_one(replays, times):
    """A graph of 1,500 ops in a few seconds of work: there is time for solves beside it."""
    each, work = SimpleNamespace(graph=SimpleNamespace(ops=range(1250))), SearchWork(1.0)
    for _ in range(times - 1):
        work.predict(each, replays=replays)
        assert work.left_s() > 0
    work.predict(each, replays=replays)
    assert work.left_s() <= 1e-9
