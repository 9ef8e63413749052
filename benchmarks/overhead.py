"""What a step costs with the callback: where nothing is to be done, and under a plan.

    python benchmarks/overhead.py --output table.md --check

Small steps of models with many variables: what the callback adds to every step shows in them.
*Idle* compares ``fit`` with the callback, whose limit the plain step keeps, with plain ``fit``.
*Planned* compares ``fit`` under a plan with ``fit`` whose train function is the lowered step
itself, on JAX the compiled one. All fits of a row run in one process, in rounds: one fit of each
kind, in random order. A fit's number is the quickest of its later epochs of about a quarter of a
second, Keras's loop included; a kind's is the lower quartile of its fits. Beside a difference
stands the 95 % interval that a bootstrap of the fits gives: two plain fits of one model differ by
10 to 50 % on some machines.

So what is added is timed from inside, too, by the median step of a fit: the callback's hooks of a
batch, and under a plan all of the train function's call but the lowered step and the next batch, as
the lower quartile of fits as well.
The bounds are for these. Where the whole interval of the fits is over a bound, that is told as
well.

The machine has to be idle.
"""

from __future__ import annotations

from typing import Any

from rows import (
    Failed,
    Report,
    add_names,
    add_outcome,
    cells_of,
    command_line,
    failed,
    failure_line,
    head,
    keep,
    line_of,
    machine,
    row_of,
)

BACKENDS = ("jax", "tensorflow")
VARIABLES = ("2", "250", "1000")
#: The bounds: a step with nothing to do over the plain one, and seconds more under a plan.
MOST_IDLE_RATIO, MOST_ADDED_S = 1.02, 1e-4

_COLUMNS = (
    "backend", "variables", "plain (ms)", "idle (ms)", "idle / plain", "interval", "hooks (µs)",
    "lowered step (ms)", "planned (ms)", "planned / lowered", "added (ms)", "interval",
    "inside (µs)",
)  # fmt: skip
_CELLS = (
    ("backend", ""), ("variables", "d"), ("plain_ms", ".3f"), ("idle_ms", ".3f"),
    ("idle_ratio", ".3f"), ("idle_interval", ""), ("hooks_us", ".1f"), ("bare_ms", ".3f"),
    ("planned_ms", ".3f"), ("planned_ratio", ".3f"), ("added_ms", ".3f"), ("added_interval", ""),
    ("inside_us", ".1f"),
)  # fmt: skip


def failures_of(row: dict[str, Any]) -> list[str]:
    """Returns what of a row is over a bound, however the noise is read."""
    where, failures = f"{row['backend']}, {row['variables']} variables", []
    by_hooks = 1 + 1e-6 * row["hooks_us"] / row["plain_s"]
    if by_hooks > MOST_IDLE_RATIO:
        failures.append(
            f"{where}: with nothing to do the hooks make a step {by_hooks:.3f} of the plain one, "
            f"over {MOST_IDLE_RATIO}."
        )
    if 1e-6 * row["inside_us"] > MOST_ADDED_S:
        failures.append(
            f"{where}: under a plan {row['inside_us']:.1f} µs of a step are not the lowered "
            f"step's, over {1e6 * MOST_ADDED_S:.0f}."
        )
    if row["idle_least"] > MOST_IDLE_RATIO:
        failures.append(
            f"{where}: with nothing to do a step takes {row['idle_ratio']:.3f} of the plain one, "
            f"at least {row['idle_least']:.3f}, over {MOST_IDLE_RATIO}."
        )
    if row["added_least_s"] > MOST_ADDED_S:
        failures.append(
            f"{where}: under a plan a step takes {1e3 * row['added_s']:.3f} ms more than the "
            f"lowered step, at least {1e3 * row['added_least_s']:.3f}, over "
            f"{1e3 * MOST_ADDED_S:.1f}."
        )
    return failures


def told(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row with its seconds in milliseconds, and its intervals as text."""
    in_ms = {key[:-2] + "_ms": 1e3 * s for key, s in row.items() if key.endswith("_s")}
    return row | in_ms | {
        "idle_interval": f"{row['idle_least']:.3f} to {row['idle_most']:.3f}",
        "added_interval": f"{in_ms['added_least_ms']:.3f} to {in_ms['added_most_ms']:.3f}",
    }  # fmt: skip


def main() -> int:
    parser = command_line(__doc__)
    add_names(parser, "--backends", BACKENDS)
    add_names(parser, "--variables", VARIABLES)
    parser.add_argument("--steps", type=int, default=1000, help="of an epoch (default 1000)")
    parser.add_argument("--rounds", type=int, default=16, help="of fits (default 16)")
    add_outcome(parser, limited="row", tables="table is", numbers="")
    options = parser.parse_args()
    report, failures = Report(), []
    report.add(machine(), "", head(_COLUMNS, left=1))
    for backend in options.backends:
        more = {"KERAS_BACKEND": backend}
        if backend == "jax":
            more["JAX_PLATFORMS"] = "cpu"
        for count in map(int, options.variables):
            try:
                row = row_of(
                    "overhead_case.py", count, options.steps, options.rounds,
                    timeout_s=options.timeout, **more,
                )  # fmt: skip
            except Failed as error:
                report.add(failure_line(_COLUMNS, backend, str(count), str(error)))
                failures.append(f"{backend}, {count} variables: {error}")
                continue
            keep(row, options.json)
            failures += failures_of(row)
            report.add(line_of(cells_of(told(row), _CELLS)))
    report.write(options.output)
    return failed(failures, options.check)


if __name__ == "__main__":
    raise SystemExit(main())
