"""Writes one self-contained HTML page about a plan, a problem or a whole ``fit``.

The page holds its style and its pictures and refers to nothing outside, because it is mailed around
and opened offline; a policy in its head forbids loading anything, and scripts. It follows the
reader's light or dark theme and reads on a phone. Every name of a model, layer or device is
escaped.
"""

from __future__ import annotations

import html
import platform
from collections.abc import Iterable, Sequence

from keras_remat.core.plan_record import PlanRecord
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.reporting import pictures
from keras_remat.reporting.chart import COLORS, Chart
from keras_remat.reporting.curves import Curve, compared, groups, top_holders
from keras_remat.reporting.records import ReportRecord
from keras_remat.reporting.svg import draw, escape, paint
from keras_remat.reporting.tables import printable, shown_groups, summary_cells
from keras_remat.reporting.text import (
    epoch_rows,
    overhead_text,
    plan_text,
    problem_text,
    recomputed_text,
    status_text,
    usage_rows,
    versions,
)
from keras_remat.units import format_bytes, format_seconds

_STYLE = (
    f".kr{{{';'.join(f'--{look}:{color}' for look, color in COLORS.items())}}}"
    f"{''.join(f'.kr .{look}{{--c:var(--{look})}}' for look in COLORS)}"
    """
.kr{--paper:#fff;--ink:#1b1f24;--faint:#5d6774;--grid:#dfe3e8;--tile:#f4f6f8;--good:#00704a;
background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,sans-serif}
@media(prefers-color-scheme:dark){.kr{--paper:#14171b;--ink:#e6e9ed;--faint:#a3adba;--grid:#2f353d;
--tile:#1e2329;--good:#4cc38a;--limit:#ff6b7d;--plain:#a3adba;--plan:#4ea8de}}
body.kr{max-width:880px;margin:0 auto;padding:1em}
.kr h1{font-size:1.5em;margin:.4em 0;overflow-wrap:anywhere}
.kr h2{font-size:1.15em;margin:1.8em 0 .4em}
.kr .tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(148px,1fr));gap:.6em}
.kr .tile{background:var(--tile);border-radius:8px;padding:.6em .8em}
.kr .tile b{display:block;font-size:1.35em;line-height:1.3}.kr .tile span{color:var(--faint)}
.kr .good b{color:var(--good)}.kr .bad b{color:var(--limit)}
.kr svg{width:100%;height:auto;display:block}.kr svg text{fill:var(--faint);font-size:15px}
.kr .grid{stroke:var(--grid)}.kr .line{fill:none;stroke:var(--c);stroke-width:1.8}
.kr .area{fill:var(--c);opacity:.12}.kr .band{fill:var(--c);opacity:.13}.kr .bar{fill:var(--c)}
.kr .mark{fill:var(--c);stroke:var(--paper);stroke-width:2}
.kr .rule{stroke:var(--c);stroke-width:2}.kr .rule.limit{stroke-dasharray:8 5}
.kr .rule.resident{stroke-dasharray:2 4}.kr svg text.limit{fill:var(--c)}
.kr svg .label{paint-order:stroke;stroke:var(--paper);stroke-width:5px}
.kr .hover{fill:transparent}.kr .hover:hover{fill:var(--ink);opacity:.1}
.kr .legend{display:flex;flex-wrap:wrap;gap:.2em 1.1em;color:var(--faint);font-size:.9em}
.kr .swatch{background:var(--c);display:inline-block;width:.8em;height:.8em;border-radius:2px;
margin-right:.4em}
.kr .wide{overflow-x:auto}.kr table{border-collapse:collapse;font-size:.92em}
.kr th,.kr td{padding:.2em 1.1em .2em 0;text-align:right;white-space:nowrap;
font-variant-numeric:tabular-nums}
.kr th{color:var(--faint);font-weight:normal}.kr tr{border-bottom:1px solid var(--grid)}
.kr th:first-child,.kr td:first-child,.kr td.text{text-align:left}.kr td.text{white-space:normal}
.kr td:first-child{white-space:normal;overflow-wrap:anywhere;min-width:8em}
.kr pre{overflow-x:auto;font-size:.85em}
.kr ol{list-style:none;padding-left:.4em;border-left:3px solid var(--grid)}
.kr ol li{margin:.5em 0;padding-left:.8em;overflow-wrap:anywhere}.kr ol b{margin-right:.5em}
@media(max-width:560px){.kr svg text{font-size:23px}.kr h1{font-size:1.25em}
.kr .tiles{grid-template-columns:1fr 1fr}.kr th,.kr td{padding-right:.7em}}
"""
)


def report_page(report: ReportRecord) -> str:
    """Returns a page about a ``fit``: verdict, pictures, tables, events, versions."""
    name = report.plan.name if report.plan is not None else ""
    return titled_page(f"Training {name or 'a model'} within a memory limit", report_body(report))


def report_body(report: ReportRecord) -> str:
    """Returns the body of the page about a ``fit``."""
    parts = [_tiles(_report_tiles(report))]
    if report.plan is not None:
        parts.append(_pictures(report.plan, report.limit_bytes))
    if report.epochs:
        parts += ["<h2>Epochs</h2>", *map(draw, pictures.epochs(report))]
        head, *rows = epoch_rows(report)
        parts.append(table(head, rows))
    if report.plan is not None:
        parts.append(_layers(report.plan))
    if report.events:
        items = "".join(
            f"<li><b>step {event.step}</b>{escape(str(event.kind))}: "
            f"{html.escape(printable(event.message))}</li>"
            for event in report.events
        )
        parts.append(f"<h2>What happened</h2><ol>{items}</ol>")
    device = report.plan.device if report.plan is not None else ""
    return "".join([*parts, _versions(device)])


def plan_page(planned: PlanRecord) -> str:
    """Returns a page about a plan."""
    of = f" of {planned.name}" if planned.name else ""
    return titled_page(f"Plan of a training step{of}", plan_body(planned))


def plan_body(planned: PlanRecord) -> str:
    """Returns the body of the page about a plan."""
    head, *rows = usage_rows(planned)
    return "".join(
        [
            _tiles(_plan_tiles(planned)),
            _pictures(planned, None),
            "<h2>Numbers</h2>",
            table(head, rows),
            f"<p>{escape_all(status_text(planned.solution))}.</p>",
            _layers(planned),
            _versions(planned.device),
        ]
    )


def problem_page(problem: Problem) -> str:
    """Returns a page about a problem file: its memory over time without recomputation."""
    curve = Curve(problem, Schedule.store_all(problem.graph))
    limit = None if problem.budget_bytes is None else ("budget", problem.budget_bytes)
    curves, text = {"plain": curve}, escape_all(problem_text(problem, top=12))
    shown = _with_legend(pictures.memory(curves, limit, hover=True)) + _holders(curves, limit)
    return titled_page(problem.name or "Memory of one step", f"{shown}<pre>{text}</pre>")


def fragment(body: str) -> str:
    """Returns a body as a notebook shows it: with its style, without a page around it."""
    return f'<style>{_STYLE}</style><div class="kr">{body}</div>'


def escape_all(text: str) -> str:
    """Returns several lines escaped, each made printable, none shortened."""
    return "\n".join(html.escape(printable(line)) for line in text.split("\n"))


def titled_page(title: str, body: str) -> str:
    """Returns a page around a body; the title is escaped."""
    heading = escape(title)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{heading}</title>"
        f"<style>:root{{color-scheme:light dark}}@media(prefers-color-scheme:dark){{"
        f"html{{background:#14171b}}}}{_STYLE}</style></head>"
        f'<body class="kr"><h1>{heading}</h1>{body}</body></html>\n'
    )


def _tiles(tiles: Iterable[tuple[str, str, str]]) -> str:
    """Returns headline numbers, each as name, amount, and ``"good"``, ``"bad"`` or ``""``."""
    cells = (
        f'<div class="tile {kind}"><b>{escape(amount)}</b><span>{escape(what)}</span></div>'
        for what, amount, kind in tiles
    )
    return f'<div class="tiles">{"".join(cells)}</div>'


def _report_tiles(report: ReportRecord) -> list[tuple[str, str, str]]:
    tiles = []
    limit, peak = report.limit_bytes, report.peak_bytes
    if limit is not None and peak is not None:
        source = "predicted peak, " if report.peaks_source == "predicted" else ""
        kept, kind = ("limit kept", "good") if peak <= limit else ("LIMIT NOT KEPT", "bad")
        tiles.append((f"{source}{kept}: {format_bytes(limit)}", format_bytes(peak), kind))
    if report.baseline is not None:
        plain = format_bytes(report.baseline.peak_bytes)
        tiles.append((f"plain step, {report.baseline_peak_source}", plain, ""))
    if report.epochs:
        tiles.append(("speed of plain, last epoch", f"{report.speedups[-1]:.2f} ×", ""))
        tiles.append(("samples per step", str(report.epochs[-1].batch_size), ""))
    tiles.append(("set-up", format_seconds(report.planning_time_s), ""))
    return tiles


def _plan_tiles(planned: PlanRecord) -> list[tuple[str, str, str]]:
    peak_bytes, source = planned.known_peak
    kept = peak_bytes <= planned.budget_bytes
    again = len(planned.solution.schedule.recomputed)
    return [
        (f"peak {source}", format_bytes(peak_bytes), "good" if kept else "bad"),
        ("budget", format_bytes(planned.budget_bytes), ""),
        ("plain peak, predicted", format_bytes(planned.store_all.peak_bytes), ""),
        ("added time, predicted", overhead_text(planned, planned.compiled), ""),
        ("ops run again", str(again), ""),
    ]


def _pictures(planned: PlanRecord, limit_bytes: int | None) -> str:
    """Returns pictures of memory over time, peak holders and stays; nothing without a problem."""
    if planned.problem is None:
        return ""
    curves = compared(planned.problem, planned.solution.schedule)
    limit = pictures.limit_of(planned, limit_bytes)
    return "".join(
        [
            "<h2>Memory of one step</h2>",
            _with_legend(pictures.memory(curves, limit, planned.measured, hover=True)),
            _holders(curves, limit),
            "<h2>What is in memory when</h2>",
            _with_legend(pictures.stays(curves["plan"])),
        ]
    )


def _holders(curves: dict[str, Curve], limit: tuple[str, int] | None) -> str:
    """Shows who holds the peak: a bar per curve, and the bytes as a table."""
    rows = top_holders(list(curves.values()), pictures.LAYERS)
    cells = [
        (f"{_swatch(color)}{escape(name)}", *(format_bytes(row[name]) for row in rows))
        for name, color in pictures.held_colors(rows).items()
    ]
    listed = table(("layer", *curves), cells, escaped=True)
    return f"<h2>Who holds the peak</h2>{draw(pictures.holders(curves, limit))}{listed}"


def _layers(planned: PlanRecord) -> str:
    """Shows what is kept and recomputed, by layer."""
    if planned.problem is None:
        return f"<pre>{escape_all(plan_text(planned))}</pre>"
    problem, schedule = planned.problem, planned.solution.schedule
    rows = [summary_cells(row) for row in shown_groups(groups(problem, schedule), "layer")]
    listed = table(("layer", "kept", "recomputed", "saved", "added"), rows)
    return (
        "<h2>By layer</h2><p>Kept: what the layer holds when the backward phase "
        f"begins.</p>{listed}<p>{recomputed_text(problem, schedule).capitalize()}.</p>"
    )


def _with_legend(chart: Chart) -> str:
    """Draws a chart with its legend below."""
    spans = (f"<span>{_swatch(look)}{escape(name)}</span>" for name, look in chart.legend.items())
    return f'{draw(chart)}<div class="legend">{"".join(spans)}</div>'


def _swatch(look: str) -> str:
    return f"<span {paint('swatch', look)}></span>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, escaped: bool = False) -> str:
    """Returns a table; its cells are escaped unless they are already."""
    cell = str if escaped else escape
    top = "".join(f"<th>{escape(text)}</th>" for text in head)
    body = "".join(f"<tr>{''.join(f'<td>{cell(text)}</td>' for text in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{top}</tr>{body}</table></div>'


def _versions(device: str) -> str:
    """Shows the packages that are installed here, and the device that was measured."""
    rows = [("device", device)] if device else []
    rows += [("Python", platform.python_version()), *versions().items()]
    return f"<h2>Versions and device</h2>{table(('', ''), rows)}"
