"""Describes a problem, a plan and its schedule in plain text.

Every function takes records and returns a string; the caller writes it somewhere.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from importlib import metadata

from keras_remat.core.graph import PHASES, Op, Value
from keras_remat.core.plan_record import PlanRecord
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule, Solution, Usage
from keras_remat.core.simulate import live_bytes, simulate
from keras_remat.core.slices import Slicing
from keras_remat.reporting.records import ReportRecord
from keras_remat.reporting.tables import counted, readable, table
from keras_remat.units import format_bytes, format_rate, format_seconds

#: Share of a peak above which the arrays that it leaves out are mentioned: fewer bytes may as well
#: be an error of prediction.
_UNCOUNTED_SHARE = 0.1
#: Distributions whose versions are shown, if they are installed.
_DISTRIBUTIONS = (
    "keras-remat", "keras", "tensorflow", "tensorflow-cpu", "jax", "torch",
    "numpy", "scipy", "ortools", "cylp",
)  # fmt: skip


def versions() -> dict[str, str]:
    """Returns name of a distribution → its version, for those that are installed."""
    found = {}
    for name in _DISTRIBUTIONS:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _op(op: Op) -> str:
    return readable(f"{op.name} ({op.kind})" if op.kind and op.kind != op.name else op.name)


def _value(value: Value) -> str:
    shape = "" if value.shape is None else f"[{', '.join(map(str, value.shape))}]"
    return readable(" ".join(part for part in (value.name, f"{value.dtype or ''}{shape}") if part))


def _percent(ratio: float) -> str:
    ratio = round(ratio, 6) + 0.0  # sums in another order differ by less; -0 is 0
    return f"{ratio * 100:.3g} %" if ratio < 9.995 else f"{ratio * 100:,.0f} %"


def problem_text(problem: Problem, *, top: int = 5) -> str:
    """Returns the summary of a problem for a terminal.

    Args:
        problem: with or without a budget.
        top: how many values and ops to list.

    >>> from keras_remat.core.graph import chain_example
    >>> from keras_remat.core.profile import Profile
    >>> profile = Profile((1.0,) * 5, (0,) * 5, 0)
    >>> print(problem_text(Problem(chain_example(), profile, 8, "chain"), top=1))
    chain: 5 ops (5 forward), 5 values, 1 output
    costs      measured
    resident   0 B
    store-all  peak 11 B at position 2 of 5, op c; time 5 s
    floor      7 B, set by op c
    budget     8 B, 72.7 % of the store-all peak
    largest values
      6 B  c
    slowest ops
      1 s  a
    """
    graph = problem.graph
    phases = Counter(op.phase for op in graph.ops)
    by_phase = ", ".join(f"{phases[phase]} {phase}" for phase in PHASES if phases[phase])
    ops = f"{len(graph.ops)} ops{f' ({by_phase})' if by_phase else ''}"
    lines = [
        f"{readable(problem.name) or 'problem'}: {ops}, {len(graph.values)} values, "
        f"{counted(len(graph.outputs), 'output')}"
    ]
    lines += table(_problem_rows(problem))
    computed = [v for v in graph.values if v.producer is not None]
    if largest := sorted(computed, key=lambda v: (-v.nbytes, v.id))[:top]:
        cells = [(format_bytes(v.nbytes), _value(v)) for v in largest]
        lines += ["largest values", *table(cells, indent="  ")]
    times = problem.profile.op_time_s
    if slowest := sorted(graph.ops, key=lambda op: (-times[op.id], op.id))[:top]:
        cells = [(format_seconds(times[op.id]), _op(op)) for op in slowest]
        lines += ["slowest ops", *table(cells, indent="  ")]
    return "\n".join(lines)


def _problem_rows(problem: Problem) -> list[tuple[str, str]]:
    """Returns costs, peak, floor and budget of a problem."""
    graph, profile = problem.graph, problem.profile
    store_all = Schedule.store_all(graph)
    usage, live = simulate(problem, store_all), live_bytes(problem, store_all)
    peak = format_bytes(usage.peak_bytes)
    if len(live):
        at = int(live.argmax())
        peak += f" at position {at} of {len(live)}, op {_op(graph.ops[store_all.order[at]])}"
    floor = format_bytes(problem.floor_bytes)
    if problem.floor_op is not None:
        floor += f", set by op {_op(graph.ops[problem.floor_op])}"
    elif graph.needed:
        floor += ", set by the outputs, all alive at the end"
    rows = [
        ("costs", _source_text(profile.source, profile.device)),
        ("resident", format_bytes(profile.resident_bytes)),
        ("store-all", f"peak {peak}; time {format_seconds(usage.time_s)}"),
        ("floor", floor),
        ("budget", _budget_text(problem, usage.peak_bytes)),
    ]
    if fixed := sum(not op.recomputable for op in graph.ops):
        rows.append(("fixed", f"{fixed} ops are not recomputable"))
    return rows


def _source_text(source: str, device: str) -> str:
    return f"{source} on {readable(device)}" if device else source


def _budget_text(problem: Problem, store_all_peak_bytes: int) -> str:
    budget = problem.budget_bytes
    if budget is None:
        return "none"
    text = format_bytes(budget)
    if store_all_peak_bytes:
        text += f", {_percent(budget / store_all_peak_bytes)} of the store-all peak"
    return text + (", below the floor: infeasible" if budget < problem.floor_bytes else "")


def recomputed_text(problem: Problem, schedule: Schedule) -> str:
    """Returns what a schedule recomputes in total.

    >>> from keras_remat.core.graph import chain_example
    >>> from keras_remat.core.profile import Profile
    >>> problem = Problem(chain_example(), Profile((1.0,) * 5, (0,) * 5, 0))
    >>> recomputed_text(problem, Schedule((0, 1, 2, 3, 0, 4)))
    'recomputed 1 of 5 ops, 1 extra run, 1 s'
    """
    count, times = len(problem.graph.ops), problem.profile.op_time_s
    again = schedule.recomputed
    if not again:
        return "recomputed nothing"
    seconds = sum(extra * times[op_id] for op_id, extra in again.items())
    runs = counted(sum(again.values()), "extra run")
    return f"recomputed {len(again)} of {count} ops, {runs}, {format_seconds(seconds)}"


def status_text(solution: Solution) -> str:
    """Returns in words how far from the optimum a solution can be.

    >>> order, usage = Schedule((0,)), Usage(1.05, 7)
    >>> status_text(Solution(order, "dtr", "feasible", 0.5, None, usage))
    'dtr in 500 ms; how far from the best possible is not known'
    >>> status_text(Solution(order, "auto", "feasible", 0.5, 1.0, usage))
    'auto in 500 ms; at most 5 % slower than the best possible'
    """
    seconds = solution.solve_time_s  # 0 where no solver ran, or a file does not tell
    found = f"{solution.solver} in {format_seconds(seconds)}" if seconds else solution.solver
    usage, bound = solution.usage, solution.lower_bound_s
    best = "best possible" + (" without reordering" if solution.keeps_order else "")
    if solution.status == "optimal":
        return f"{found}; proved to be the {best}"
    if usage is None or bound is None or bound <= 0:
        return f"{found}; how far from the best possible is not known"
    more = max(0.0, usage.time_s / bound - 1)
    return f"{found}; at most {_percent(more)} slower than the {best}"


def solution_text(problem: Problem, solution: Solution) -> str:
    """Returns the summary of what a solver found, for a terminal.

    Raises:
        ValueError: no budget, or a solution that was not simulated.
    """
    usage, order = solution.usage, solution.schedule
    if usage is None or problem.budget_bytes is None:
        raise ValueError("the solution was not simulated under a budget")
    store_all = simulate(problem, Schedule.store_all(problem.graph))
    peak = f"{format_bytes(usage.peak_bytes)} of {format_bytes(problem.budget_bytes)} allowed"
    around = (
        f"store-all {format_bytes(store_all.peak_bytes)}, floor {format_bytes(problem.floor_bytes)}"
    )
    time = f"{format_seconds(usage.time_s)}, overhead {percent_over(problem, usage.time_s)}"
    runs = f"{len(order)} runs, {len(order) - len(set(order.order))} of them recomputations"
    rows = [
        ("peak", f"{peak} ({around})"),
        ("time", time),
        ("bound", f"overhead {percent_over(problem, solution.lower_bound_s)}"),
        ("schedule", runs),
        ("solver", status_text(solution)),
    ]
    return "\n".join(table(rows))


def percent_over(problem: Problem, seconds: float | None) -> str:
    """Returns how far ``seconds`` are over the time without recomputation."""
    base_s = problem.store_all_time_s
    if seconds is None:
        return "unknown"
    return f"{100 * (seconds / base_s - 1):.2f}%" if base_s > 0 else "0.00%"


def plan_text(plan: PlanRecord) -> str:
    """Returns the summary of a plan for a terminal."""
    heads = [
        ("solver", status_text(plan.solution)),
        ("budget", format_bytes(plan.budget_bytes)),
        ("op times", _source_text(plan.profile_source, plan.device)),
    ]
    if plan.card is not None:
        heads.insert(0, ("card", plan.card))
    if plan.slicing is not None:
        heads.append(("slices", slices_text(plan.slicing)))
    lines = table(heads)
    lines += table(usage_rows(plan))
    if uncounted := uncounted_text(plan):
        lines.append(uncounted)
    if plan.measured is None:
        lines.append("not measured yet")
    elif plan.measured.peak_bytes:
        error = plan.predicted.peak_bytes / plan.measured.peak_bytes - 1
        side = "above" if error >= 0 else "below"
        lines.append(f"predicted peak is {_percent(abs(error))} {side} the measured one")
    schedule = plan.solution.schedule
    if plan.problem is not None:
        lines.append(recomputed_text(plan.problem, schedule))
    else:
        count = len(schedule.recomputed)
        lines.append(f"recomputed {counted(count, 'op')}" if count else "recomputed nothing")
    return "\n".join(lines)


def slices_text(slicing: Slicing) -> str:
    """Returns what runs in slices, in words."""
    count = len(slicing.ops)
    return f"{counted(count, 'op')} run{'s' * (count == 1)} in {slicing.parts} slices"


def uncounted_text(plan: PlanRecord) -> str:
    """Returns a sentence, without its full stop, on the arrays that peaks leave out; empty where
    these are small beside the peak."""
    held_bytes, peak_bytes = plan.uncounted_bytes, plan.predicted.peak_bytes
    if held_bytes <= _UNCOUNTED_SHARE * peak_bytes:
        return ""
    return (
        f"up to {format_bytes(held_bytes)} in arrays below {format_bytes(plan.smallest_bytes)}, "
        "which the device does not count, come on top while a step runs"
    )


def usage_rows(plan: PlanRecord) -> list[tuple[str, str, str, str, str]]:
    """Returns the rows of a table, the head first: store-all, predicted, compiled where a
    compiler was asked, and measured where the plan ran."""
    rows = [("", "peak", "of budget", "time", "overhead")]
    for name, usage in (
        ("store-all", plan.store_all),
        ("predicted", plan.predicted),
        ("compiled", plan.compiled),
        ("measured", plan.measured),
    ):
        if usage is None:
            continue
        is_known = usage.peak_bytes and plan.budget_bytes
        share = _percent(usage.peak_bytes / plan.budget_bytes) if is_known else "-"
        overhead = "-" if usage is plan.store_all else overhead_text(plan, usage)
        seconds = format_seconds(usage.time_s)
        rows.append((name, _peak_text(usage.peak_bytes), share, seconds, overhead))
    return rows


def epoch_rows(report: ReportRecord) -> list[list[str]]:
    """Returns the rows of a table, the head first: the usage of every epoch's steps.

    Dashes stand where no step was measured: Keras's own trained the epoch.
    """
    rows = [["epoch", "batch", "samples/s", "speedup", "peak", "in steps", "planning"]]
    for epoch, speedup in zip(report.epochs, report.speedups, strict=True):
        rate, times, step_time = "-", "-", "-"
        if epoch.samples:
            rate, times = format_rate(epoch.samples_per_s), f"{speedup:.2f}x"
            step_time = format_seconds(epoch.step_time_s)
        cells = [str(epoch.epoch), str(epoch.batch_size), rate, times]
        cells += [_peak_text(epoch.peak_bytes), step_time, format_seconds(epoch.planning_time_s)]
        rows.append(cells)
    return rows


def _peak_text(peak_bytes: int) -> str:
    """Returns the text of a peak; a dash for 0, which a device without statistics tells."""
    return format_bytes(peak_bytes) if peak_bytes else "-"


def overhead_text(plan: PlanRecord, usage: Usage | None) -> str:
    """Returns the time that a plan adds: as predicted, or as ``usage`` says."""
    time_s, base_s = (usage or plan.predicted).time_s, plan.store_all.time_s
    return _percent((time_s - base_s) / base_s) if base_s > 0 else "-"


def overhead_source(plan: PlanRecord) -> str:
    """Returns the words for the source of a plan's overhead."""
    if plan.compiled is not None and plan.compiled.time_s != plan.predicted.time_s:
        return "what the compiler made of it"
    return f"{plan.profile_source} op times"
