"""What a person reads about a problem, a plan and its schedules: plain text, or one HTML page.

Every function here takes records and returns a string; files and terminals are the caller's. The
page holds its style and one inline SVG and refers to nothing outside, because it is mailed around
and opened offline. It is drawn by hand rather than by a plotting library: a step curve with a
dashed budget is a few lines of SVG, stays sharp, and follows the reader's light or dark theme.

Known limit: an order longer than ``MAX_POINTS`` is drawn with one point per run of positions, at
the run's *highest* bytes: peaks stay true, short valleys between them do not show. The numbers in
the tables are never thinned.
"""

from __future__ import annotations

import html
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from keras_remat.core.graph import PHASES, Op, Value
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule, Solution, Usage
from keras_remat.core.simulate import live_bytes, simulate
from keras_remat.core.validate import check_rules
from keras_remat.units import GIB, KIB, MIB, TIB, format_bytes, format_seconds

MAX_POINTS = 1500
MAX_NAME = 72

_COLORS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
)  # Okabe and Ito: told apart by colour-blind readers
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 960, 420, 84, 16, 14, 44
_STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1b1f24;--faint:#667080;--grid:#e3e6ea;--budget:#c00020}
@media(prefers-color-scheme:dark){:root{--paper:#14171b;--ink:#e6e9ed;--faint:#98a2b0;--grid:#2b3038;--budget:#ff6b7d}}
body{background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,sans-serif;max-width:1000px;margin:2em auto;padding:0 1em}
h1{font-size:1.4em;overflow-wrap:anywhere}h2{font-size:1.1em;margin-top:1.6em}
svg{width:100%;height:auto}svg text{fill:var(--faint);font-size:12px}.grid{stroke:var(--grid)}
.budget{stroke:var(--budget);stroke-dasharray:7 4;stroke-width:1.5}
.floor{stroke:var(--faint);stroke-dasharray:2 4}
svg .limit{paint-order:stroke;stroke:var(--paper);stroke-width:4px}svg .over{fill:var(--budget)}
.line{fill:none;stroke-width:1.7;stroke-linejoin:round}.area{stroke:none;fill-opacity:.1}
table{border-collapse:collapse}th,td{padding:.15em 1em .15em 0;text-align:right;font-variant-numeric:tabular-nums}
th{color:var(--faint);font-weight:normal}th:first-child,td:first-child{text-align:left;overflow-wrap:anywhere}
.swatch{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-right:.5em}pre{overflow-x:auto}
"""


def readable(name: str) -> str:
    """Returns ``name`` on one line of printable characters, shortened in the middle to
    ``MAX_NAME``.

    >>> readable("a\\x1b[31m\\n"), len(readable("x" * 500))
    ('a\\\\x1b[31m\\\\n', 72)
    """
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)
    if len(text) <= MAX_NAME:
        return text
    head = MAX_NAME // 2 - 1
    return f"{text[:head]}…{text[head + 1 - MAX_NAME :]}"


def _op(op: Op) -> str:
    return readable(f"{op.name} ({op.kind})" if op.kind and op.kind != op.name else op.name)


def _value(value: Value) -> str:
    shape = "" if value.shape is None else f"[{', '.join(map(str, value.shape))}]"
    return readable(" ".join(part for part in (value.name, f"{value.dtype or ''}{shape}") if part))


def _percent(ratio: float) -> str:
    return f"{ratio * 100:.3g} %" if ratio < 9.995 else f"{ratio * 100:,.0f} %"


def _overhead(time_s: float, base_s: float) -> str:
    return "-" if base_s <= 0 else _percent((time_s - base_s) / base_s)


def _table(rows: Iterable[Sequence[str]], *, indent: str = "") -> list[str]:
    """Lines with the cells of ``rows`` in columns; the last column is not padded."""
    cells = [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        indent
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]


def problem_text(problem: Problem, *, top: int = 5) -> str:
    """Summary of a problem for a terminal.

    Args:
        problem: with or without a budget.
        top: how many values and ops to list.

    >>> from keras_remat.core.graph import chain_example
    >>> from keras_remat.core.profile import Profile
    >>> print(problem_text(Problem(chain_example(), Profile((1.0,) * 5, (0,) * 5, 0), 8, "chain"), top=1))
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
    graph, profile = problem.graph, problem.profile
    store_all = Schedule.store_all(graph)
    usage, live = simulate(problem, store_all), live_bytes(problem, store_all)
    phases = Counter(op.phase for op in graph.ops)
    by_phase = ", ".join(f"{phases[phase]} {phase}" for phase in PHASES if phases[phase])
    plural = "" if len(graph.outputs) == 1 else "s"
    lines = [
        f"{readable(problem.name) or 'problem'}: {len(graph.ops)} ops{f' ({by_phase})' if by_phase else ''}, "
        f"{len(graph.values)} values, {len(graph.outputs)} output{plural}"
    ]
    peak = format_bytes(usage.peak_bytes)
    if len(live):
        at = int(live.argmax())
        peak += f" at position {at} of {len(live)}, op {_op(graph.ops[store_all.order[at]])}"
    floor = format_bytes(problem.floor_bytes)
    if problem.floor_op is not None:
        floor += f", set by op {_op(graph.ops[problem.floor_op])}"
    rows = [
        (
            "costs",
            f"{profile.source} on {readable(profile.device)}" if profile.device else profile.source,
        ),
        ("resident", format_bytes(profile.resident_bytes)),
        ("store-all", f"peak {peak}; time {format_seconds(usage.time_s)}"),
        ("floor", floor),
        ("budget", _budget_text(problem, usage.peak_bytes)),
    ]
    if fixed := sum(not op.recomputable for op in graph.ops):
        rows.append(("fixed", f"{fixed} ops are not recomputable"))
    lines += _table(rows)
    computed = sorted(
        (v for v in graph.values if v.producer is not None), key=lambda v: (-v.nbytes, v.id)
    )[:top]
    lines += (
        [
            "largest values",
            *_table(((format_bytes(v.nbytes), _value(v)) for v in computed), indent="  "),
        ]
        if computed
        else []
    )
    slowest = sorted(graph.ops, key=lambda op: (-profile.op_time_s[op.id], op.id))[:top]
    if slowest:
        lines += [
            "slowest ops",
            *_table(
                ((format_seconds(profile.op_time_s[op.id]), _op(op)) for op in slowest), indent="  "
            ),
        ]
    return "\n".join(lines)


def _budget_text(problem: Problem, store_all_peak_bytes: int) -> str:
    budget = problem.budget_bytes
    if budget is None:
        return "none"
    text = format_bytes(budget)
    if store_all_peak_bytes:
        text += f", {_percent(budget / store_all_peak_bytes)} of the store-all peak"
    return text + (", below the floor: infeasible" if budget < problem.floor_bytes else "")


def _recomputed_by(
    problem: Problem, schedule: Schedule, key: Callable[[Op], str]
) -> list[tuple[str, int, float]]:
    """(group, extra runs, seconds they take), most seconds first."""
    runs: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    for op_id, extra in schedule.recomputed.items():
        group = key(problem.graph.ops[op_id])
        runs[group] += extra
        seconds[group] += extra * problem.profile.op_time_s[op_id]  # type: ignore[assignment]  # a Counter may hold floats
    return sorted(
        ((group, runs[group], float(seconds[group])) for group in runs),
        key=lambda row: (-row[2], -row[1], row[0]),
    )


def recomputed_text(problem: Problem, schedule: Schedule, *, top: int = 5) -> str:
    """What a schedule recomputes: in total, the most expensive kinds, and the most expensive ops.

    >>> from keras_remat.core.graph import chain_example
    >>> from keras_remat.core.profile import Profile
    >>> problem = Problem(chain_example(), Profile((1.0,) * 5, (0,) * 5, 0))
    >>> print(recomputed_text(problem, Schedule((0, 1, 2, 3, 0, 4))))
    recomputed 1 of 5 ops, 1 extra run, 1 s
    by kind
      a  1 run  1 s
    by op
      a  1 run  1 s
    """
    again = schedule.recomputed
    if not again:
        return "recomputed nothing"
    by_op = _recomputed_by(problem, schedule, _op)
    runs = sum(again.values())
    total = format_seconds(sum(row[2] for row in by_op))
    lines = [
        f"recomputed {len(again)} of {len(problem.graph.ops)} ops, {_runs(runs, 'extra run')}, {total}"
    ]
    groups = [("by op", by_op)]
    if any(op.kind for op in problem.graph.ops):
        groups.insert(
            0,
            (
                "by kind",
                _recomputed_by(problem, schedule, lambda op: readable(op.kind) or "(none)"),
            ),
        )
    for title, rows in groups:
        lines += [
            title,
            *_table(
                ((name, _runs(n), format_seconds(s)) for name, n, s in rows[:top]), indent="  "
            ),
        ]
    return "\n".join(lines)


def _runs(count: int, noun: str = "run") -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def plan_text(
    solution: Solution,
    *,
    budget_bytes: int,
    store_all: Usage,
    predicted: Usage,
    measured: Usage | None = None,
    problem: Problem | None = None,
    top: int = 5,
) -> str:
    """Summary of a plan for a terminal.

    Args:
        solution: the schedule and where it came from.
        budget_bytes: what its peak has to stay under.
        store_all: usage of the step with no recomputation.
        predicted: usage of the schedule by the simulator.
        measured: usage of the swapped step, or ``None`` when it has not run.
        problem: the problem it solves, when it is at hand: then what is recomputed is listed by
            kind and op.
        top: how many kinds and ops to list.
    """
    solved = f"{solution.solver}, {solution.status}, in {format_seconds(solution.solve_time_s)}"
    if solution.gap is not None:
        solved += f", gap to the proved bound {_percent(solution.gap)}"
    lines = _table([("solver", solved), ("budget", f"{format_bytes(budget_bytes)}")])
    rows = [("", "peak", "of budget", "time", "overhead")]
    for name, usage in (("store-all", store_all), ("predicted", predicted), ("measured", measured)):
        if usage is not None:
            rows.append(
                (
                    name,
                    format_bytes(usage.peak_bytes),
                    _percent(usage.peak_bytes / budget_bytes),
                    format_seconds(usage.time_s),
                    "-" if usage is store_all else _overhead(usage.time_s, store_all.time_s),
                )
            )
    lines += _table(rows)
    if measured is None:
        lines.append("not measured yet")
    elif measured.peak_bytes:
        error = (predicted.peak_bytes - measured.peak_bytes) / measured.peak_bytes
        lines.append(
            f"predicted peak is {_percent(abs(error))} {'above' if error >= 0 else 'below'} the measured one"
        )
    if problem is None:
        lines.append(
            f"recomputed {len(solution.schedule.recomputed)} ops"
            if solution.schedule.recomputed
            else "recomputed nothing"
        )
    else:
        lines.append(recomputed_text(problem, solution.schedule, top=top))
    return "\n".join(lines)


def schedule_html(problem: Problem, schedules: Mapping[str, Schedule], *, title: str = "") -> str:
    """One HTML page: bytes alive over the order of every schedule, their numbers, and what they
    recompute.

    Args:
        problem: its budget, if any, is drawn as a dashed line.
        schedules: legal schedules under the names to show, e.g. ``{"store-all": …, "auto": …}``.
        title: heading; the problem's name when missing.

    Returns:
        A complete document that loads nothing from elsewhere.

    Raises:
        ValueError: no schedules.
        InvalidScheduleError: one of them is not legal for the problem.
    """
    if not schedules:
        raise ValueError("schedules is empty: give at least one to draw")
    for schedule in schedules.values():
        check_rules(problem, schedule)
    heading = _escape(title or problem.name or "Memory over the order of a train step")
    details = "".join(
        f"<h2>{_escape(name)}: what is recomputed</h2><pre>{html.escape(recomputed_text(problem, schedule, top=12))}</pre>"
        for name, schedule in schedules.items()
        if schedule.recomputed
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{heading}</title><style>{_STYLE}</style></head><body><h1>{heading}</h1>"
        f"{_svg(problem, schedules)}{_usage_table(problem, schedules)}{details}"
        f"<h2>The problem</h2><pre>{html.escape(problem_text(problem, top=12))}</pre></body></html>\n"
    )


def _escape(text: str) -> str:
    return html.escape(readable(text), quote=True)


def _color(index: int) -> str:
    return _COLORS[index % len(_COLORS)]


def _usage_table(problem: Problem, schedules: Mapping[str, Schedule]) -> str:
    rows = []
    for index, (name, schedule) in enumerate(schedules.items()):
        usage = simulate(problem, schedule)
        over = problem.budget_bytes is not None and usage.peak_bytes > problem.budget_bytes
        cells = (
            f"{format_bytes(usage.peak_bytes)}{' (over the budget)' if over else ''}",
            format_seconds(usage.time_s),
            _overhead(usage.time_s, problem.store_all_time_s),
            str(sum(schedule.recomputed.values())),
        )
        swatch = f'<span class="swatch" style="background:{_color(index)}"></span>'
        rows.append(
            f"<tr><td>{swatch}{_escape(name)}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
        )
    head = "".join(
        f"<th>{text}</th>" for text in ("schedule", "peak", "time", "overhead", "recomputations")
    )
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def _svg(problem: Problem, schedules: Mapping[str, Schedule]) -> str:
    curves = {name: live_bytes(problem, schedule).tolist() for name, schedule in schedules.items()}
    positions = max(1, *map(len, curves.values()))
    highest = max(
        [
            problem.budget_bytes or 0,
            problem.floor_bytes,
            1,
            *(max(c, default=0) for c in curves.values()),
        ]
    )
    top = highest * 1.06

    def x(position: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * position / positions

    def y(nbytes: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * nbytes / top

    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="Bytes alive at every position of the order">'
    ]
    for nbytes, label in _byte_ticks(highest):
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y(nbytes):.1f}" y2="{y(nbytes):.1f}"/>'
        )
        parts.append(
            f'<text x="{_LEFT - 8}" y="{y(nbytes) + 4:.1f}" text-anchor="end">{label}</text>'
        )
    step = _nice_step(positions, 8, least=1)
    for position in range(0, positions + 1, int(step)):
        parts.append(
            f'<text x="{x(position):.1f}" y="{bottom + 18}" text-anchor="middle">{position}</text>'
        )
    parts.append(
        f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 6}" text-anchor="middle">position in the order</text>'
    )
    for index, (name, curve) in enumerate(curves.items()):
        if not curve:
            continue
        path = _step_path(curve, x, y)
        parts.append(
            f'<path class="area" fill="{_color(index)}" d="{path}V{y(0):.1f}H{x(0):.1f}Z"/>'
        )
        parts.append(
            f'<path class="line" stroke="{_color(index)}" d="{path}"><title>{_escape(name)}</title></path>'
        )
        at = curve.index(max(curve))
        op = problem.graph.ops[schedules[name].order[at]]
        label = f"{_escape(name)}: peak {format_bytes(curve[at])} at position {at}, op {html.escape(_op(op))}"
        parts.append(
            f'<circle cx="{x(at + 0.5):.1f}" cy="{y(curve[at]):.1f}" r="4" fill="{_color(index)}"><title>{label}</title></circle>'
        )
    limits = [
        ("floor", "limit", problem.floor_bytes, 15)
    ]  # its label below the line, the budget's above: they may be close
    if problem.budget_bytes is not None:
        limits.append(("budget", "limit over", problem.budget_bytes, -5))
    for kind, text_class, nbytes, shift in limits:
        parts.append(
            f'<line class="{kind}" x1="{_LEFT}" x2="{right}" y1="{y(nbytes):.1f}" y2="{y(nbytes):.1f}"/>'
        )
        label = f"{kind} {format_bytes(nbytes)}"
        parts.append(
            f'<text class="{text_class}" x="{right - 4}" y="{y(nbytes) + shift:.1f}" text-anchor="end">{label}</text>'
        )
    return "".join(parts) + "</svg>"


def _step_path(
    curve: Sequence[int], x: Callable[[float], float], y: Callable[[float], float]
) -> str:
    """A step curve, position k drawn from k to k + 1; long curves one step per run of positions, at
    the run's highest."""
    run = math.ceil(len(curve) / MAX_POINTS)
    previous = f"{y(max(curve[:run])):.1f}"
    path = [f"M{x(0):.1f} {previous}"]
    for start in range(0, len(curve), run):
        height, end = f"{y(max(curve[start : start + run])):.1f}", min(start + run, len(curve))
        path.append(f"H{x(end):.1f}" if height == previous else f"V{height}H{x(end):.1f}")
        previous = height
    return "".join(path)


def _nice_step(span: float, ticks: int, *, least: float = 0.0) -> float:
    """The smallest of 1, 2, 5 times a power of ten (and at least ``least``) that cuts ``span`` into
    at most ``ticks`` parts."""
    raw = max(span / ticks, least)
    power = 10.0 ** math.floor(math.log10(raw))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= raw * (1 - 1e-9))


def _byte_ticks(highest: int) -> list[tuple[float, str]]:
    """Round numbers of the largest unit that fits, from 0 to ``highest``, with labels."""
    name, unit = next(
        (
            (n, u)
            for n, u in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB))
            if highest >= u
        ),
        ("B", 1),
    )
    step = _nice_step(highest / unit, 6, least=1.0 if unit == 1 else 0.0)
    return [
        (k * step * unit, f"{k * step:g} {name}") for k in range(int(highest / unit / step) + 1)
    ]
