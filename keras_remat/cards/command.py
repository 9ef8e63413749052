"""Runs the command ``keras-remat will-it-fit``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from keras_remat.cards.report import CardReport, CardRow
from keras_remat.cards.table import CARDS, EXAMPLE
from keras_remat.cards.will_it_fit import will_it_fit
from keras_remat.planning import model_argument

_DEFAULT_CARDS = ("T4", "A100-40")


def add_arguments(commands: Any) -> None:
    """Declares the subcommand."""
    text = "say whether a model's train step fits cards that need not be here"
    command = commands.add_parser(
        "will-it-fit",
        help=text,
        description=f"{text.capitalize()}. Exit status: 0 it fits all of them, 5 one needs a plan, "
        "3 one is too small, 4 of one it is not known.",
        epilog="examples:\n"
        "  keras-remat will-it-fit model.keras --batch-size 64 --card T4 --card H100\n"
        "  keras-remat will-it-fit my_project.models:build --html fit.html",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    model_argument.add_arguments(command)
    command.add_argument(
        "--card", action="append", metavar="NAME",
        help=f"one of {', '.join(map(str, CARDS))}, or of your own, such as {EXAMPLE}; may be "
        f"repeated (default: {' and '.join(_DEFAULT_CARDS)})",
    )  # fmt: skip
    command.add_argument("--html", metavar="FILE", help="write one self-contained page")
    command.add_argument("--json", action="store_true", help="print one JSON object instead")
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    report = will_it_fit(
        options.model,
        cards=options.card or _DEFAULT_CARDS,
        batch_size=options.batch_size,
        shapes=options.shape,
        dtypes=options.dtype,
        progress=_told,
    )
    if options.html is not None:
        Path(options.html).write_text(report.page(), encoding="utf-8")
    print(_text(report, as_json=options.json))
    return report.exit_status


def _told(row: CardRow) -> None:
    print(f"{row.card}: {row.answer}", file=sys.stderr, flush=True)


def _text(report: CardReport, *, as_json: bool) -> str:
    if as_json:
        return json.dumps(report.to_dict(), indent=1, allow_nan=False)
    return str(report)
