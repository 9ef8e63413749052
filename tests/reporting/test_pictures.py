"""Pictures: right numbers, units, the same colours, and a word where matplotlib is missing."""

from dataclasses import replace

import pytest

from keras_remat.core.graph import Graph, Op, Value, chain_example
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule, Solution, Usage
from keras_remat.core.simulate import simulate
from keras_remat.errors import MissingPackageError
from keras_remat.planning.plan import Plan, overheads
from keras_remat.reporting import chart, mpl, pictures, svg
from keras_remat.reporting.fit_report import AutotuneReport, EpochUsage, Event

pytest.importorskip("matplotlib")
CHAIN = Problem(chain_example(), Profile((1.0,) * 5, (0,) * 5, 0), 7, "a_$b$ model")


def plan_of(problem, order, budget=7):
    schedule = Schedule(order)
    usage, store_all = (simulate(problem, s) for s in (schedule, Schedule.store_all(problem.graph)))
    solution = Solution(schedule, "greedy", "feasible", 0.5, None, usage)
    return Plan("f", budget, solution, store_all, usage, name=problem.name, problem=problem)


PLAN = plan_of(CHAIN, (0, 1, 2, 3, 0, 4))


def wide_plan():
    """More ops than the stage × op picture takes."""
    n = pictures.SMALL_GRAPH + 1
    ops = tuple(Op(i, f"o{i}", "K", (0,) if i else (), (i,)) for i in range(n))
    values = tuple(Value(i, f"v{i}", 2**20, producer=i) for i in range(n))
    problem = Problem(Graph(ops, values, (n - 1,)), Profile((1e-3,) * n, (0,) * n, 2**20))
    order = [*range(n - 1), 0, n - 1]
    return plan_of(Problem(problem.graph, problem.profile), order, 2**30)


def labels(figure):
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def test_memory_has_both_curves_the_budget_and_the_measured_peak(tmp_path):
    figure = replace(PLAN, measured=Usage(6.5, 8)).plot("memory")
    assert labels(figure) == [
        "forward",
        "resident 0 B",
        "plain, peak 11 B",
        "plan, peak 7 B",
        "budget 7 B",
        "measured peak 8 B",
    ]
    (axes,) = figure.axes
    assert axes.get_ylabel() == "bytes alive"
    assert axes.get_xlabel() == "time in the step"
    plain, _, plan, _ = axes.patches[1:] if len(axes.patches) == 5 else axes.patches[-4:]
    assert list(plain.get_data().values) == [4, 5, 11, 11, 7]
    assert list(plan.get_data().values) == [4, 5, 7, 7, 5, 7]
    figure.savefig(tmp_path / "memory.svg")


def test_holders_stack_up_to_the_peaks():
    figure = PLAN.plot("holders")
    (axes,) = figure.axes
    tops = [max(b.get_x() + b.get_width() for b in axes.patches if int(b.get_y()) == at)
            for at in (0, 1)]  # fmt: skip
    assert tops == [11, 7]
    assert [t.get_text() for t in axes.get_yticklabels()] == ["plain\n11 B", "plan\n7 B"]


def test_schedule_of_a_small_graph_is_the_papers_picture():
    cells = [["-"] * 5 for _ in range(5)]
    for bar in pictures.plan(PLAN, "schedule").shapes:
        cells[int(bar.bottom + 0.5)][int(bar.left + 0.5)] = bar.look
    assert cells == [
        ["plan", "-", "-", "-", "-"],
        ["kept", "plan", "-", "-", "-"],
        ["-", "kept", "plan", "-", "-"],
        ["-", "-", "kept", "plan", "-"],
        ["again", "-", "-", "kept", "plan"],
    ]
    (axes,) = PLAN.plot("schedule").axes
    assert len(axes.patches) == 10


def test_schedule_of_a_large_graph_has_a_row_per_value():
    figure = wide_plan().plot("schedule")
    assert "computed again" in labels(figure)
    (axes,) = figure.axes
    assert axes.get_xticklabels()[1].get_text().endswith(" ms")


def test_overhead_has_the_plans_own_point():
    (axes,) = mpl.figure(pictures.overhead(PLAN, [(11, 0.0), (7, 0.2)])).axes
    quick, own = axes.lines
    assert quick.get_xydata().tolist() == [[11, 0], [7, 20]]
    assert own.get_xydata().tolist() == [[7, pytest.approx(20)]]
    assert own.get_color() == chart.COLORS["plan"]


def test_overhead_of_a_plan_solves_a_few_budgets():
    (axes,) = PLAN.plot("overhead").axes
    points = axes.lines[0].get_xydata().tolist()
    assert points[0] == [11, 0]
    assert points[-1] == [7, pytest.approx(20)]


def test_overhead_of_a_step_without_bytes_is_a_point():
    problem = Problem(Graph((), (), ()), Profile((), (), 0))
    assert overheads(problem) == [(1, 0.0)]


def test_speed_of_every_epoch():
    report = AutotuneReport(
        limit_bytes=2**20,
        baseline=Usage(0.5, 2**21),
        baseline_batch_size=10,
        baseline_source="measured",
        epochs=[EpochUsage(e, 10, 1, 1.0, 0.0, 2**19, 10) for e in range(2)],
        plan=PLAN,
    )
    figure = report.plot("speed")
    assert set(labels(figure)) == {"epoch", "plain step (measured), 20.0/s", "limit 1 MiB"}
    assert [axes.get_ylabel() for axes in figure.axes] == ["samples/s", "measured peak"]
    assert "limit 1 MiB" in labels(report.plot("memory"))
    report.events.append(Event(0, "predicted", "The allocator keeps no statistics."))
    assert report.plot("speed").axes[1].get_ylabel() == "predicted peak"


def test_batch_sizes():
    charts = pictures.batch_sizes([(8, 2**20, 40.0, 0.0), (16, 2**20, 38.0, 0.1)], 2**21)
    figure = mpl.figure(*charts)
    assert labels(figure) == ["without recomputation", "with recomputation", "limit 2 MiB"]
    assert svg.draw(charts[0]).count("<circle") == 2


def test_what_cannot_be_drawn_says_why():
    with pytest.raises(ValueError, match="'memory', 'holders', 'schedule', 'overhead'; got 'pie'"):
        PLAN.plot("pie")
    for kind in ("memory", "overhead"):
        with pytest.raises(ValueError, match="saved without its problem"):
            replace(PLAN, problem=None).plot(kind)
    with pytest.raises(ValueError, match="the plain step ran"):
        AutotuneReport().plot("memory")
    with pytest.raises(ValueError, match="no epoch"):
        AutotuneReport().plot("speed")


def test_a_missing_matplotlib_is_named_with_its_extra(monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(mpl, "import_module", missing)
    mpl._picture.cache_clear()
    with pytest.raises(MissingPackageError, match=r"pip install 'keras-remat\[plot\]'"):
        PLAN.plot("memory")


def test_notebooks_show_pictures_without_pyplot():
    assert PLAN.plot("memory")._repr_png_().startswith(b"\x89PNG")
