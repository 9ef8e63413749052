"""Plans: files, the correction for what the allocator needs, the cache, and planning a Keras model
without training it."""

import json
import types
from dataclasses import replace

import pytest
from fake_backend import FakeBackend, chain_problem, store_all_peak

from keras_remat.core.graph import Graph, Op, Value
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule, Solution, Usage
from keras_remat.core.simulate import simulate
from keras_remat.errors import (
    InfeasibleBudgetError,
    InvalidProblemError,
    InvalidScheduleError,
    PlanMismatchError,
    ScheduleNotFoundError,
    UnsupportedModelError,
)
from keras_remat.planning import to_budget
from keras_remat.planning.make_plan import (
    advising,
    make_plan,
    plan_problem,
    usable_bytes,
)
from keras_remat.planning.plan import Plan, cache_path, cached_plan, load_plan

SIZE = 64
PROBLEM = chain_problem(SIZE)
PLAIN = store_all_peak(SIZE)
BUDGET = int(PLAIN * 0.7)


def quick(problem=PROBLEM, budget=BUDGET, backend=None, **options):
    return plan_problem(
        problem,
        budget,
        backend or FakeBackend(),
        **{"solver": "greedy", "time_limit_s": 5.0, **options},
    )


# ------------------------------------------------------------------ files

PLANS = {
    "as planned": quick(),
    "measured, no problem": replace(quick(), measured=Usage(0.1 + 0.2, 2**53 + 1), problem=None),
    "bound": Plan(
        "f" * 64,
        2**60,
        Solution(Schedule((0, 1, 0)), "auto", "optimal", 1e-9, 1 / 3, Usage(2 / 3, 7)),
        Usage(0.1, 3),
        Usage(2 / 3, 7),
        None,
        "measured",
        "GPU:0",
        "a model",
    ),
    "no usage, empty": Plan(
        "", 1, Solution(Schedule(()), "x", "feasible", 0.0), Usage(0.0, 0), Usage(0.0, 0)
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_saved_plan_comes_back_as_it_was(name, tmp_path):
    plan = PLANS[name]
    plan.save(tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json")
    assert loaded == plan
    assert loaded.problem == plan.problem
    assert loaded.to_dict() == plan.to_dict()


def edited(**changes):
    """The JSON object of a plan with fields replaced; ``solution__order`` means
    ``["solution"]["order"]``, ``...`` takes away."""
    document = json.loads(json.dumps(PLANS["as planned"].to_dict()))
    for path, value in changes.items():
        *outer, key = path.split("__")
        target = document
        for part in outer:
            target = target[part]
        if value is ...:
            del target[key]
        else:
            target[key] = value
    return document


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "keras_remat.problem"},
        {"version": 2},
        {"version": "1"},
        {"solution": ...},
        {"solution": []},
        {"solution": None},
        {"solution__order": ...},
        {"solution__order": 3},
        {"solution__order": [0, "1"]},
        {"solution__order": [0, -1]},
        {"solution__order": [0.5]},
        {"solution__order": [0, 99]},
        {"solution__order": [1, 0]},
        {"solution__status": "guessed"},
        {"solution__lower_bound_s": "soon"},
        {"solution__lower_bound_s": float("nan")},
        {"solution__usage": 5},
        {"fingerprint": ...},
        {"fingerprint": 12},
        {"budget_bytes": "8GiB"},
        {"budget_bytes": None},
        {"budget_bytes": 0},
        {"budget_bytes": float("inf")},
        {"store_all": None},
        {"predicted": {"time_s": 1.0}},
        {"predicted": {"time_s": 1.0, "peak_bytes": float("inf")}},
        {"predicted": {"time_s": float("nan"), "peak_bytes": 1}},
        {"measured": "yes"},
        {"profile_source": "guessed"},
        {"device": 0},
        {"name": None},
        {"problem": 3},
        {"problem__ops": None},
        {"problem__outputs": [10**6]},
    ],
    ids=str,
)
def test_malformed_plan_file_is_refused_by_name(changes, tmp_path):
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(edited(**changes)))
    with pytest.raises(InvalidProblemError, match=r"broken\.json"):
        load_plan(path)


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "\x00"])
def test_what_is_no_json_object_is_refused(text, tmp_path):
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(InvalidProblemError, match=r"broken\.json"):
        load_plan(path)


def test_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_plan(tmp_path / "nowhere.json")


# ------------------------------------------------------------------ a plan and its graph


def test_plan_fits_its_own_graph_only():
    plan = quick()
    plan.check(PROBLEM)
    with pytest.raises(PlanMismatchError) as caught:
        plan.check(chain_problem(SIZE + 1))
    assert caught.value.plan_fingerprint == PROBLEM.graph.fingerprint
    assert caught.value.graph_fingerprint == chain_problem(SIZE + 1).graph.fingerprint


def test_a_plan_for_other_dtypes_says_what_differs():
    def labelled(dtype):
        label = Value(0, "y", 64, (16,), dtype)
        loss = Op(0, "loss", "Loss", (0,), (1,))
        graph = Graph((loss,), (label, Value(1, "l", 4, (), None, 0)), (1,))
        return Problem(graph, Profile((1.0,), (0,), 100))

    plan = replace(quick(), fingerprint="other", problem=labelled("int32"))
    with pytest.raises(PlanMismatchError, match=r"reads int32 \(16,\) where .* int64 \(16,\)"):
        plan.check(labelled("int64"))


def test_order_that_is_not_legal_is_refused_under_the_right_fingerprint():
    plan = quick()
    broken = replace(
        plan, solution=replace(plan.solution, schedule=Schedule(tuple(reversed(range(16)))))
    )
    with pytest.raises(InvalidScheduleError, match="S1"):
        broken.check(PROBLEM)


def test_text_has_the_numbers_and_where_they_are_from():
    plan = quick()
    assert "not measured yet" in str(plan)
    assert "estimated" in str(plan)
    assert plan.recomputes
    assert plan.overhead == pytest.approx(plan.predicted.time_s / 16 - 1)
    assert "1 KiB measured" in str(replace(plan, measured=Usage(1.0, 1024)))


# ------------------------------------------------------------------ plan_problem


def test_allocators_overhead_is_made_up_for():
    """The allocator needs one value more than simulated, so schedules are solved for less until
    that fits."""
    extra = SIZE * 1024
    backend = FakeBackend(allocator_bytes=lambda problem, schedule: extra)
    plan = quick(backend=backend)
    simulated = simulate(PROBLEM, plan.solution.schedule).peak_bytes
    assert plan.predicted.peak_bytes == simulated + extra <= BUDGET
    assert plan.budget_bytes == BUDGET
    assert plan.store_all == Usage(16.0, PLAIN + extra)
    assert quick().predicted.time_s <= plan.predicted.time_s


def test_a_lowered_step_over_the_budget_is_planned_again():
    """Where lowering tells the peak, it decides, and not the prediction that the schedule was found
    by."""
    backend = FakeBackend()
    backend.memory.compiled_peak_bytes = lambda problem, schedule: int(
        1.1 * simulate(problem, schedule).peak_bytes
    )
    made = quick(backend=backend)
    assert made.predicted.peak_bytes == backend.memory.compiled_peak_bytes(
        PROBLEM, made.solution.schedule
    )
    assert made.predicted.peak_bytes <= BUDGET


@pytest.mark.parametrize("error", [ScheduleNotFoundError, InfeasibleBudgetError])
def test_target_between_is_tried_where_the_full_correction_is_unreachable(monkeypatch, error):
    """The allocator needs more for the first order only; a solver that finds nothing at the lower
    target, or proves that there is nothing, is asked in between."""
    asked = []
    real = to_budget.solve

    def solve(problem, **options):
        asked.append(problem.budget_bytes)
        if len(asked) == 2:
            raise error(problem.budget_bytes, problem.floor_bytes)
        return real(problem, **options)

    monkeypatch.setattr(to_budget, "solve", solve)
    backend = FakeBackend(
        allocator_bytes=lambda problem, schedule: 2 * SIZE * 1024 if len(asked) == 1 else 0
    )
    plan = quick(backend=backend)
    assert asked[0] == BUDGET > asked[2] > asked[1]
    assert len(asked) == 3
    assert plan.predicted.peak_bytes <= BUDGET


def test_budget_below_the_floor_is_refused_before_solving(monkeypatch):
    monkeypatch.setattr(
        "keras_remat.planning.to_budget.solve", lambda *args, **options: pytest.fail("solved")
    )
    with pytest.raises(InfeasibleBudgetError) as caught:
        quick(budget=PROBLEM.floor_bytes - 1)
    assert (caught.value.budget_bytes, caught.value.floor_bytes) == (
        PROBLEM.floor_bytes - 1,
        PROBLEM.floor_bytes,
    )


def test_what_is_proved_of_a_lower_target_is_not_said_of_the_budget(monkeypatch):
    """With what the allocator wastes nothing fits, though the bytes alive would."""
    real = to_budget.solve

    def solve(problem, **options):
        if problem.budget_bytes < BUDGET:
            raise InfeasibleBudgetError(problem.budget_bytes, problem.budget_bytes + 1)
        return real(problem, **options)

    monkeypatch.setattr(to_budget, "solve", solve)
    waste = SIZE * 512
    backend = FakeBackend(allocator_bytes=lambda problem, schedule: waste)
    with pytest.raises(ScheduleNotFoundError) as caught:
        quick(backend=backend)
    assert caught.value.budget_bytes == BUDGET < caught.value.best_peak_bytes


def test_allocator_that_always_needs_more_ends_in_not_found():
    backend = FakeBackend(allocator_bytes=lambda problem, schedule: PLAIN)
    with pytest.raises(ScheduleNotFoundError) as caught:
        quick(backend=backend)
    assert caught.value.budget_bytes == BUDGET
    assert caught.value.best_peak_bytes > PLAIN
    assert caught.value.floor_bytes == PROBLEM.floor_bytes


@pytest.mark.parametrize("error", [ScheduleNotFoundError, InfeasibleBudgetError])
def test_known_order_is_the_plan_where_the_solver_finds_none_and_tells_what_the_allocator_wastes(
    monkeypatch, error
):
    waste = SIZE * 512
    backend = FakeBackend(allocator_bytes=lambda problem, schedule: waste)
    known = quick(backend=backend).solution.schedule
    asked = []

    def solve(problem, *, solver, **options):
        asked.append((solver, problem.budget_bytes))
        raise error(problem.budget_bytes, problem.floor_bytes)

    monkeypatch.setattr("keras_remat.planning.to_budget.solve", solve)
    plan = quick(backend=backend, solver="auto", known=known)
    assert asked == [("auto", BUDGET - waste)]
    assert plan.solution.schedule == known
    assert plan.predicted.peak_bytes <= BUDGET


def test_known_order_over_the_budget_is_left_out():
    known = Schedule.store_all(PROBLEM.graph)
    plan = quick(solver="auto", known=known)
    assert plan.solution.schedule != known
    assert plan.predicted.peak_bytes <= BUDGET


def test_solver_that_finds_nothing_at_all_is_not_asked_again(monkeypatch):
    asked = []

    def solve(problem, **options):
        asked.append(problem.budget_bytes)
        raise ScheduleNotFoundError(problem.budget_bytes, problem.floor_bytes)

    monkeypatch.setattr("keras_remat.planning.to_budget.solve", solve)
    with pytest.raises(ScheduleNotFoundError):
        quick()
    assert asked == [BUDGET]


@pytest.mark.parametrize("solver", ["auto", "greedy"])
def test_a_plan_is_looked_for_however_little_time_there_is(solver):
    plan = quick(budget=PLAIN, solver=solver, time_limit_s=1e-9)
    assert plan.predicted.peak_bytes <= PLAIN


@pytest.mark.parametrize(("patient", "solves"), [(True, 2), (False, 1)])
def test_patience_is_what_comes_after_the_deadline(monkeypatch, patient, solves):
    """With nothing found that the allocator agrees to, the target is corrected once more, unless
    something runs already."""
    asked, late_s = [], 5.0
    clock = {"s": 0.0}
    monkeypatch.setattr("keras_remat.planning.to_budget.time.perf_counter", lambda: clock["s"])
    real = to_budget.solve

    def solve(problem, **options):
        asked.append(problem.budget_bytes)
        clock["s"] += late_s
        return real(problem, **{**options, "time_limit_s": 1.0})

    monkeypatch.setattr("keras_remat.planning.to_budget.solve", solve)
    backend = FakeBackend(
        allocator_bytes=lambda problem, schedule: 2 * SIZE * 1024 if len(asked) < 2 else 0
    )
    way = to_budget.BudgetSearch(PROBLEM, BUDGET, backend.memory, "greedy", 0)
    if patient:
        assert way.run(BUDGET, late_s / 2)[0].peak_bytes <= BUDGET
    else:
        with pytest.raises(ScheduleNotFoundError):
            way.run(BUDGET, late_s / 2, patient=False)
    assert len(asked) == solves


def told(error, batch_size=8, resident_bytes=100):
    """What is said of an error under a limit of 200."""
    problem = replace(PROBLEM, profile=replace(PROBLEM.profile, resident_bytes=resident_bytes))
    device = types.SimpleNamespace(floor_advice=lambda op: "")
    with pytest.raises(type(error)) as caught, advising(problem, 200, batch_size, device):
        raise error
    assert "your limit of 200 B less 5 % margin = 190 B" in str(caught.value)
    return str(caught.value)


def test_limit_error_says_what_would_do():
    """With a limit of 200 less 5 % margin and 100 resident, a batch of 8 needs 290."""
    error = InfeasibleBudgetError(190, 290, "conv")
    advice = "A limit of about 306 B, or a batch of about 3 instead of 8 would do."
    assert advice in told(error)
    assert "weights, slots and data alone" in told(error, resident_bytes=190)
    not_found = told(ScheduleNotFoundError(190, 150, 290, solver="dtr"))
    assert not_found.startswith("dtr: ")
    assert f"{advice} More solver time may do, too." in not_found
    assert "306 B" not in told(ScheduleNotFoundError(190, 150))


def test_advice_that_is_followed_is_smaller_than_what_was_asked_for():
    """The need is just above the budget: the same batch again would do nothing."""
    error = InfeasibleBudgetError(190, 191, "conv")
    assert "a batch of about 7 instead of 8" in told(error)
    assert "batch" not in told(error, batch_size=1)


def test_the_margin_is_a_share_of_the_limit():
    assert usable_bytes(1000, 0.25) == 750
    assert usable_bytes(1000, 0) == 1000


# ------------------------------------------------------------------ the cache


def test_cache_finds_a_plan_by_graph_and_budget(tmp_path):
    def find(folder, problem, budget, *setting):
        return cached_plan(cache_path(folder, problem.graph, budget, setting), problem)

    assert find(tmp_path / "missing", PROBLEM, BUDGET, "CPU:0", "1.0") is None
    plan = quick()
    plan.save(cache_path(tmp_path, PROBLEM.graph, BUDGET, ("CPU:0", "1.0")))
    assert find(tmp_path, PROBLEM, BUDGET, "CPU:0", "1.0") == plan
    assert find(tmp_path, PROBLEM, BUDGET, "GPU:0", "1.0") is None
    assert find(tmp_path, PROBLEM, BUDGET, "CPU:0", "1.1") is None
    assert find(tmp_path, PROBLEM, BUDGET + 1, "CPU:0", "1.0") is None
    assert find(tmp_path, chain_problem(SIZE + 1), BUDGET, "CPU:0", "1.0") is None


def test_cached_plan_of_another_graph_is_refused_by_name(tmp_path):
    other = chain_problem(SIZE + 1)
    path = cache_path(tmp_path, PROBLEM.graph, BUDGET, ())
    quick(other).save(path)
    with pytest.raises(InvalidProblemError, match=path.name):
        cached_plan(path, PROBLEM)


def test_cached_plan_with_a_negative_prediction_is_refused(tmp_path):
    path = tmp_path / "plan.json"
    plan = quick()
    replace(plan, predicted=replace(plan.predicted, peak_bytes=-1)).save(path)
    with pytest.raises(InvalidProblemError, match="negative"):
        cached_plan(path, PROBLEM)


# ------------------------------------------------------------------ make_plan


ROOMY = {"memory_limit": "8GiB", "solver": "greedy", "solver_time_limit_s": 5.0}


def planning_limit(model, batch, share):
    """A limit that leaves ``share`` of what the plain step takes above the resident bytes."""
    store_all = make_plan(model, batch, profile="estimated", margin=0.0, **ROOMY)
    resident = store_all.problem.profile.resident_bytes
    return int(resident + (store_all.store_all.peak_bytes - resident) * share)


@pytest.mark.parametrize("profile", ["measured", "estimated"])
def test_planning_leaves_the_model_as_it_was(models, profile):
    model, batch = models.convnet()
    model.fit(
        *batch, batch_size=8, verbose=0
    )  # optimizer slots, metrics and seeds are no longer at their start
    before = models.state_of(model)
    plan = make_plan(model, batch, profile=profile, **ROOMY)
    models.assert_same_bits(models.state_of(model), before)
    assert plan.profile_source == plan.problem.profile.source == profile
    assert plan.measured is None
    assert plan.device == "CPU:0" or plan.device.startswith("GPU")
    assert plan.predicted.peak_bytes <= plan.budget_bytes == int(8 * 2**30 * 0.95)
    assert not plan.recomputes


def test_unbuilt_optimizer_is_built_and_at_its_start(models):
    model, batch = models.mlp(8, width=8)
    weights = model.get_weights()
    make_plan(model, batch, **ROOMY)
    models.assert_same_bits(model.get_weights(), weights)
    assert int(model.optimizer.iterations.numpy()) == 0
    assert all(
        float(abs(v.numpy()).max()) == 0.0
        for v in model.optimizer.variables
        if "momentum" in v.path or "velocity" in v.path
    )


def test_int_specs_and_arrays_give_the_same_graph(models):
    import keras

    model, (x, y) = models.mlp(8, width=8)
    specs = (keras.KerasTensor(x.shape, "float32"), keras.KerasTensor(y.shape, "float32"))
    fingerprints = {
        make_plan(model, batch, profile="estimated", **ROOMY).fingerprint
        for batch in (8, specs, (x, y))
    }
    assert len(fingerprints) == 1
    assert make_plan(model, 9, profile="estimated", **ROOMY).fingerprint not in fingerprints


def test_plan_under_a_tight_limit_recomputes_and_is_legal(models):
    model, batch = models.mlp(512, width=512, blocks=4)
    limit = planning_limit(model, batch, 0.7)
    plan = make_plan(model, batch, limit, solver="greedy", profile="estimated", margin=0.0)
    assert plan.recomputes
    assert plan.predicted.peak_bytes <= limit < plan.store_all.peak_bytes
    plan.check(plan.problem)
    again = make_plan(model, batch, limit, solver="greedy", profile="estimated", margin=0.0)
    assert again.fingerprint == plan.fingerprint


def test_limit_below_the_floor_is_proved_infeasible(models):
    model, batch = models.mlp(512, width=512, blocks=1)
    with pytest.raises(InfeasibleBudgetError) as caught:
        make_plan(model, batch, "1KiB", profile="estimated", margin=0.0)
    assert caught.value.floor_bytes > caught.value.budget_bytes == 1024


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"memory_limit": "8Gb"}, ValueError, "GiB"),
        ({"memory_limit": 0}, ValueError, "positive"),
        ({"memory_limit": 8}, ValueError, 'did you mean "8GiB"'),
        ({"model": "model.keras"}, TypeError, "keras.saving.load_model"),
        ({"memory_limit": None}, TypeError, "memory_limit"),
        ({"profile": "guessed"}, ValueError, "estimated"),
        ({"solver": "magic"}, ValueError, "greedy"),
        ({"solver_time_limit_s": 0}, ValueError, "time_limit_s"),
        ({"solver_time_limit_s": float("inf")}, ValueError, "time_limit_s"),
        ({"solver_time_limit_s": None}, TypeError, "solver_time_limit_s"),
        ({"margin": 1.5}, ValueError, "margin"),
        ({"margin": "x"}, TypeError, "margin"),
        ({"seed": None}, TypeError, "seed"),
        ({"seed": -1}, ValueError, "seed"),
        ({"batch": 0}, ValueError, "positive"),
        ({"batch": "8"}, TypeError, "batch"),
        ({"batch": None}, TypeError, "batch"),
    ],
)
def test_wrong_arguments_say_what_is_accepted(models, arguments, error, says):
    model, batch = models.mlp(4, width=4, blocks=1)
    with pytest.raises(error, match=says):
        make_plan(
            **{
                "model": model, "batch": batch, "memory_limit": "8GiB", "profile": "estimated",
                **arguments,
            }
        )  # fmt: skip


def test_a_model_that_is_not_compiled_is_told():
    import keras

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    with pytest.raises(ValueError, match="compile"):
        make_plan(model, 8, "8GiB")


def test_models_that_cannot_be_planned_say_why(models):
    import keras

    model, batch = models.mlp(4, width=4, blocks=1)
    model.run_eagerly = True
    with pytest.raises(UnsupportedModelError, match="eagerly"):
        make_plan(model, batch, "8GiB")
    uncompiled = keras.Sequential([keras.layers.Input((16,)), keras.layers.Dense(1)])
    with pytest.raises(ValueError, match="compile"):
        make_plan(uncompiled, batch, "8GiB")
