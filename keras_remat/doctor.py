"""Tells what this machine can measure, and what is missing: ``keras-remat doctor``.

It asks the framework that Keras runs on, in a process that does nothing else, and answers on one
screen of 80 columns, or as JSON.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import textwrap
from importlib import import_module
from typing import Any

from keras_remat.backends.base import BACKENDS
from keras_remat.backends.statistics import enable_cpu_memory_stats
from keras_remat.backends.versions import check_card_compiler, too_old
from keras_remat.cards.table import CARDS
from keras_remat.errors import RematError
from keras_remat.reporting.text import versions
from keras_remat.units import format_bytes

#: Optional modules, the extra that installs each, and its purpose.
_OPTIONAL = (
    ("ortools", "solvers", "CP-SAT: better plans of small graphs"),
    ("cylp", "solvers", "CBC, as in the Checkmate paper"),
    ("matplotlib", "plot", "plots of plans and reports"),
)
_WIDTH, _LABEL_WIDTH = 80, 12


def add_arguments(commands: Any) -> None:
    """Declares the subcommand."""
    command = commands.add_parser("doctor", help="tell what this machine can measure")
    command.add_argument("--json", action="store_true", help="as one JSON object")
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    facts = diagnosis()
    print(json.dumps(facts, indent=2) if options.json else as_text(facts))
    return 0


def diagnosis() -> dict[str, Any]:
    """Returns what this machine can measure, by name; bytes are integers."""
    others = f"Set KERAS_BACKEND to {' or '.join(BACKENDS)}."
    try:
        import keras

        framework = keras.backend.backend()
        problem = f"Keras runs on {framework!r}. {others}"
        if framework in BACKENDS:
            problem = too_old(framework)
    except (ImportError, ValueError) as error:  # KERAS_BACKEND names none, or one not installed
        framework = os.environ.get("KERAS_BACKEND", "none")
        problem = f"Keras does not load: {error}. {others}"
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "versions": versions(),
        "framework": framework,
        "supported": not problem,
        "missing": [
            {"package": name, "extra": extra, "purpose": purpose}
            for name, extra, purpose in _OPTIONAL
            if importlib.util.find_spec(name) is None
        ],
        "advice": [problem] if problem else [],
    }
    try:
        check_card_compiler()
        facts["cards"], facts["cards_detail"] = [*CARDS], "will-it-fit, and card= on JAX"
    except RematError as error:
        facts["cards"], facts["cards_detail"] = [], str(error)
    if not problem:
        enable_cpu_memory_stats()
        facts |= import_module(f"keras_remat.backends.{framework}.diagnosis").diagnosis()
    return facts


def as_text(facts: dict[str, Any]) -> str:
    """Returns the facts as lines of at most 80 columns."""
    told = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    rows = [("versions", f"Python {facts['python']}, {told}")]
    if facts["supported"]:
        rows += _device_rows(facts)
    else:
        rows.append(("framework", f"{facts['framework']}, not supported"))
    taken = ", ".join(facts["cards"])
    told = f"yes: {taken} ({facts['cards_detail']})" if taken else f"NO: {facts['cards_detail']}"
    rows.append(("cards", told))
    missing = [
        f"{entry['package']}: pip install 'keras-remat[{entry['extra']}]' ({entry['purpose']})"
        for entry in facts["missing"]
    ]
    rows += [("missing", line) for line in missing or ["nothing"]]
    rows += [("advice", line) for line in facts["advice"]]
    return "\n".join(_row(label, text) for label, text in rows)


def _device_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    timed = "yes" if facts["kernels_timed"] else "NO"
    limit = format_bytes(facts["limit_bytes"]) if facts["limit_bytes"] else "unknown"
    return [
        ("device", f"{facts['device']} of {facts['framework']}"),
        ("allocator", f"{facts['allocator']}, {facts['peaks']}"),
        ("limit", f"{limit}: {facts['limit_source']}"),
        ("op times", f"{timed}: {facts['kernels']}"),
        ("XLA", f"{'yes' if facts['xla'] else 'NO'}: {facts['xla_detail']}"),
    ]


def _row(label: str, text: str) -> str:
    first, others = label.ljust(_LABEL_WIDTH), " " * _LABEL_WIDTH
    return textwrap.fill(
        text, _WIDTH, initial_indent=first, subsequent_indent=others, break_on_hyphens=False
    )
