"""What compiled train steps of Keras need on cards that need not be there, and what plans do about
it.

Every number is a compiler's: a step is compiled for the card by XLA:GPU, without a driver, and
``memory_analysis()`` says what it would allocate. Nothing runs, so times are the card's roofline,
and the scratch memory that cuDNN's and cuBLAS's kernels choose is in no number.

A limit is a share of what Keras's own step needs above what is resident, and so are all bytes here.
*Predicted* and *compiled* are of the first schedule that was compiled for that limit, written in
the quickest way in which it keeps to it; *kept* is what the plan needs that keeps to it. A limit
below the floor of the step has no plan.

    pip install 'keras-remat[cards]'
    python benchmarks/cards.py --cards H100,T4 --models unet --at 0.5,0.35 --json rows.jsonl
    python benchmarks/cards.py --framework tensorflow --cards H100 --at 0.5 --check

*Compilations* counts schedules. A schedule is written in up to five ways, the quickest first. The
next way is compiled where one does not keep to the limit, and slower ones only where schedules for
less do not, either; *modules* counts all that was compiled until one kept to it.
*Overhead* is by the plan's own ops, *time* is counted from the compiled module, guards and barriers
included, in that of Keras's own.

The results of this repository are rows in a file, each with the time at which it was taken (UTC;
where there is a date alone, the code was older). They are summed up, and nothing is compiled, by

    python benchmarks/cards.py --json benchmarks/results/cards.jsonl --known --check

``--peers`` sets others beside plans, each at the bytes that it takes itself: ``jax.checkpoint``
around parts of a model, XLA's own rematerialization, ``keras.RematScope``
(:mod:`cards_peers`). FLOPs, bytes moved and time are counted from the compiled modules, so what a
plan's guards and barriers cost is in them; all are shares of the plain step's.

    python benchmarks/cards.py --peers --cards H100 --models vae,bert --json peers.jsonl

On TensorFlow the step is that of ``jit_compile=True``, lowered to HLO and compiled by the same
compiler; four models stand for all.

A row is written to the JSON file as soon as it is known, and rows that are there are not compiled
again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from rows import (
    Failed,
    Report,
    cells_of,
    command_line,
    failed,
    head,
    keep,
    kept,
    line_of,
    printed_by,
    version_of,
)

MODELS = (
    "gpt", "bert", "vit", "MobileNetV2", "ResNet50", "unet", "lstm", "vae", "VGG16", "ConvNeXtTiny",
    "EfficientNetB0", "DenseNet121",
)  # fmt: skip
TENSORFLOW_MODELS = ("bert", "unet", "residual", "inverted")
CARDS, SHARES = ("H100", "T4"), (0.7, 0.5, 0.35)
#: Of the plain step's bytes, what the best TensorFlow step at half may take.
TENSORFLOW_HALF = 0.55
#: What ``--check`` demands: compilations of a limit that is kept, how far predictions before the
#: first one are off, and what plans at half cost by the roofline.
COMPILATIONS, MEDIAN_ERROR, WORST_ERROR, HALF_OVERHEAD = 3, 0.03, 0.12, 0.08

#: Heading of a column → key in a row, and how it is written.
COLUMNS = {
    "model, batch": ("case", ""),
    "card": ("card", ""),
    "at": ("at", "g"),
    "plain MiB": ("plain_bytes", "MiB"),
    "store-all simulated": ("store_all_bytes", "MiB"),
    "limit": ("limit_bytes", "MiB"),
    "predicted": ("predicted_bytes", "MiB"),
    "compiled": ("compiled_bytes", "MiB"),
    "off": ("error", "+.1%"),
    "kept": ("kept_bytes", "MiB"),
    "of plain": ("of_plain", ".2f"),
    "compilations": ("compilations", "d"),
    "modules": ("modules", "d"),
    "overhead": ("overhead", "+.1%"),
    "time": ("time", ".2f"),
    "status": ("status", ""),
    "taken": ("taken", ""),
}


#: The same with ``--peers``.
PEER_COLUMNS = {
    "model, batch": ("case", ""),
    "card": ("card", ""),
    "peer": ("peer", ""),
    "MiB": ("peer_bytes", "MiB"),
    "FLOPs": ("peer_flops_share", ".2f"),
    "bytes moved": ("peer_moved_share", ".2f"),
    "time": ("peer_s_share", ".2f"),
    "ours, MiB": ("ours_bytes", "MiB"),
    "FLOPs ": ("ours_flops_share", ".2f"),
    "bytes moved ": ("ours_moved_share", ".2f"),
    "time ": ("ours_s_share", ".2f"),
    "status": ("status", ""),
    "taken": ("taken", ""),
}
COUNTED = {"flops": "FLOPs", "moved": "bytes moved"}


def error_of(row: dict[str, Any]) -> float | None:
    """How much more the first schedule took than was predicted, a ratio."""
    predicted, compiled = row.get("predicted_bytes"), row.get("compiled_bytes")
    return compiled / predicted - 1 if predicted and compiled else None


def of_plain(row: dict[str, Any]) -> float | None:
    """The least that was compiled, as a share of the plain step's bytes."""
    least, plain = row.get("least_bytes"), row.get("plain_bytes")
    return least / plain if least and plain else None


def line(row: dict[str, Any]) -> str:
    """Returns a row of the table."""
    case = f"{row['name']}, {row.get('batch_size', '?')}"
    told = row | {"case": case, "error": error_of(row), "of_plain": of_plain(row)}
    return line_of(cells_of(told, COLUMNS.values(), ""))


def has_plan(row: dict[str, Any]) -> bool:
    """Returns whether any schedule keeps to the limit, as far as the step's floor is known."""
    return row.get("limit_bytes", 0) >= row.get("floor_bytes", 0)


def failures(rows: list[dict[str, Any]]) -> list[str]:
    """Returns what falls short of what is demanded, a sentence each."""
    if not rows:
        return ["no rows"]
    if any(row["framework"] == "tensorflow" for row in rows):
        return [
            f"{row['name']} on {row['card']}: {share or 1:.2f} of plain at half"
            for row in rows
            if row["at"] == 0.5 and ((share := of_plain(row)) is None or share > TENSORFLOW_HALF)
        ]
    found = []
    for row in rows:
        where = f"{row['name']} on {row['card']} at {row['at']:g}"
        if row["status"] != "kept" and has_plan(row):
            found.append(f"{where}: {row['status']}")
        elif row.get("compilations", 0) > COMPILATIONS:
            found.append(f"{where}: {row['compilations']} compilations")
    errors = {
        (row["name"], row["card"], row["at"]): error
        for row in rows
        if (error := error_of(row)) is not None
    }
    if errors:
        usual, worst = median(map(abs, errors.values())), max(errors, key=lambda e: abs(errors[e]))
        if usual > MEDIAN_ERROR:
            found.append(f"predictions are off by {usual:.1%} in the median")
        if abs(errors[worst]) > WORST_ERROR:
            name, card, at = worst
            found.append(f"the worst is off by {errors[worst]:+.1%}: {name} on {card} at {at:g}")
    costs = [row["overhead"] for row in rows if row["at"] == 0.5 and "overhead" in row]
    if costs and median(costs) > HALF_OVERHEAD:
        found.append(f"plans at half cost {median(costs):.1%} in the median")
    return found


def summary(rows: list[dict[str, Any]]) -> str:
    """Returns what the rows show together, in one line."""
    errors = [abs(error) for row in rows if (error := error_of(row)) is not None]
    exist = [row for row in rows if has_plan(row)]
    kept_of = f"{sum(row['status'] == 'kept' for row in exist)} of {len(exist)} limits kept"
    below = f" ({len(rows) - len(exist)} are below the step's floor)"
    told = [kept_of + below * (len(exist) < len(rows))]
    if errors:
        told.append(f"predictions off by {median(errors):.1%} (median), {max(errors):.1%} (worst)")
    at_half = [row for row in rows if row["at"] == 0.5]
    if costs := [row["overhead"] for row in at_half if "overhead" in row]:
        told.append(f"overhead at half {median(costs):.1%} (median of {len(costs)})")
    if times := [row["time"] for row in at_half if "time" in row]:
        counted = f"time at half {median(times):.2f} of plain, counted from the modules"
        told.append(f"{counted} (median of {len(times)})")
    return "; ".join(told)


def peer_line(row: dict[str, Any]) -> str:
    """Returns a row of the table of peers."""
    told = row | {"case": f"{row['name']}, {row.get('batch_size', '?')}"}
    for whose in ("peer", "ours"):
        for what in (*COUNTED, "s"):
            counted, plain = row.get(f"{whose}_{what}"), row.get(f"plain_{what}")
            told[f"{whose}_{what}_share"] = counted / plain if counted and plain else None
    if row.get("ours") not in (None, "kept"):
        told["status"] = f"ours {row['ours']}"
    return line_of(cells_of(told, PEER_COLUMNS.values(), ""))


def peer_failures(rows: list[dict[str, Any]]) -> list[str]:
    """Returns where a plan computes or moves more than a peer at its bytes, a sentence each."""
    if not rows:
        return ["no rows"]
    return [
        f"{row['name']} on {row['card']}: {row[f'ours_{what}'] / row[f'peer_{what}'] - 1:.0%} "
        f"more {called} than {row['peer']}"
        for row in rows
        if row.get("ours") == "kept"
        for what, called in COUNTED.items()
        if row[f"ours_{what}"] > row[f"peer_{what}"]
    ]


def measured_peers(
    name: str, card: str, known: list[dict[str, Any]], options: Any
) -> Iterator[dict[str, Any]]:
    """Yields the rows of one model's peers on one card that are not known."""
    there = [row["peer"] for row in known if (row["name"], row["card"]) == (name, card)]
    words = {"name": name, "card_name": card, "seconds": options.seconds, "known": there}
    try:
        yield from printed_by(
            "cards_peers.py", json.dumps(words),
            timeout_s=options.timeout, KERAS_BACKEND="jax", JAX_PLATFORMS="cpu",
        )  # fmt: skip
    except Failed as error:
        print(f"{name} on {card}: {error}", file=sys.stderr)


def with_peers(options: Any) -> int:
    """Compiles what is missing of the table of peers, and writes it."""
    known, report, shown = kept(options.json), Report(), []
    of = f"Keras on JAX, float32; XLA:GPU of JAX {version_of('jax')}"
    report.add(of, "", head(PEER_COLUMNS, 3))
    for name in options.models.split(",") if options.models else MODELS:
        for card in options.cards.split(","):
            for row in () if options.known else measured_peers(name, card, known, options):
                keep(row, options.json)
                known.append(row)
            of_case = [row for row in known if (row["name"], row["card"]) == (name, card)]
            if of_case:
                report.add(*map(peer_line, of_case))
            shown += of_case
    report.write(options.output)
    return failed(peer_failures(shown), options.check)


def measured(name: str, card: str, shares: tuple[float, ...], options: Any) -> Any:
    """Yields the rows of one model on one card; a failure is a row for each share."""
    words = {"name": name, "card_name": card, "shares": shares}
    words |= {"policy": options.policy, "seconds": options.seconds}
    left = list(shares)
    try:
        told = printed_by(
            "cards_case.py", json.dumps(words),
            timeout_s=options.timeout, KERAS_BACKEND=options.framework, JAX_PLATFORMS="cpu",
        )  # fmt: skip
        for row in told:
            left.remove(row["at"])
            yield row
    except Failed as error:
        known = {"name": name, "card": card, "policy": options.policy}
        known |= {"framework": options.framework}
        yield from (known | {"at": at, "status": f"error: {error}"[:160]} for at in left)


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """What a row is of."""
    return tuple(row[part] for part in ("name", "card", "framework", "policy", "at"))


def parser() -> argparse.ArgumentParser:
    """Returns what reads the command line."""
    words = command_line(__doc__)
    told = "separated by commas"
    words.add_argument("--models", help=f"{told} (default: {', '.join(MODELS)})")
    words.add_argument("--cards", default=",".join(CARDS), help=f"{told} (default: H100,T4)")
    words.add_argument("--at", default=",".join(map(str, SHARES)), help=f"shares, {told}")
    words.add_argument("--framework", choices=("jax", "tensorflow"), default="jax")
    words.add_argument("--policy", default="float32", help="a dtype policy of Keras's")
    words.add_argument("--seconds", type=float, default=30.0, help="of solving for one limit")
    words.add_argument("--timeout", type=float, default=1800.0, help="seconds for model and card")
    words.add_argument("--peers", action="store_true", help="others beside plans, at equal bytes")
    words.add_argument("--json", type=Path, metavar="FILE.jsonl", help="rows, added as they come")
    words.add_argument("--known", action="store_true", help="rows of that file, and no others")
    words.add_argument("--output", type=Path, metavar="FILE.md", help="the table")
    words.add_argument("--check", action="store_true", help="exit with 1 when a bound fails")
    return words


def main() -> int:
    """Compiles what is missing, and writes the table."""
    options = parser().parse_args()
    if options.peers:
        return with_peers(options)
    shares = tuple(map(float, options.at.split(",")))
    known = {key_of(row): row for row in kept(options.json)}
    shown, report = [], Report()
    of = f"Keras on {options.framework}, {options.policy}; XLA:GPU of JAX {version_of('jax')}"
    report.add(of, "", head(COLUMNS, 2))
    models = MODELS if options.framework == "jax" else TENSORFLOW_MODELS
    for name in options.models.split(",") if options.models else models:
        for card in options.cards.split(","):
            case = [(name, card, options.framework, options.policy, at) for at in shares]
            missing = tuple(key[-1] for key in case if key not in known)
            missing = () if options.known else missing
            for row in measured(name, card, missing, options) if missing else ():
                keep(row, options.json)
                known[key_of(row)] = row
            of_case = [known[key] for key in case if key in known]
            shown += of_case
            if of_case:
                report.add(*map(line, of_case))
    report.add("", summary(shown))
    report.write(options.output)
    return failed(failures(shown), options.check)


if __name__ == "__main__":
    sys.exit(main())
