"""What the tables of the benchmarks share: the processes that measure their rows, and the lines
that a person reads. Without Keras, so that a parent stays small and its children choose a backend.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MIB = 2**20
#: No limit.
UNLIMITED_BYTES = 2**50
#: Seconds after which a process is ended that nobody gave a limit.
_NO_LIMIT_S = 10**6


# -------------------------------------------------------------------- processes


class Failed(Exception):
    """A row's process did not end well."""


class TimedOut(Failed):
    """A row's process was ended when its time was over."""


def variables(**more: str) -> dict[str, str]:
    """The environment of a process: this one's, the package's folder on its path, and ``more``."""
    path = os.pathsep.join(p for p in (str(HERE.parent), os.environ.get("PYTHONPATH", "")) if p)
    return os.environ | {"PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "2"} | more


def printed_by(
    script: str, *words: object, timeout_s: float = _NO_LIMIT_S, **more: str
) -> Iterator[dict[str, Any]]:
    """Yields the JSON objects that a script of this folder prints, each as soon as it is there.

    Args:
        script: its name.
        words: of its command line.
        timeout_s: seconds it gets.
        more: variables of its environment.

    Raises:
        Failed: it did not end well; says why in one line.
    """
    with tempfile.TemporaryFile("w+") as noise:
        process = subprocess.Popen(
            [sys.executable, str(HERE / script), *map(str, words)],
            env=variables(**more),
            stdout=subprocess.PIPE,
            stderr=noise,
            text=True,
        )
        late = threading.Event()
        timer = threading.Timer(timeout_s, lambda: (late.set(), process.kill()))
        timer.start()
        try:
            assert process.stdout is not None
            yield from (json.loads(line) for line in process.stdout if line.startswith("{"))
            process.wait()
        finally:
            timer.cancel()
            process.kill()
            process.wait()
        if late.is_set():
            raise TimedOut(f"not done after {timeout_s:.0f} s")
        if process.returncode:
            noise.seek(0)
            said = [line.strip() for line in noise if line.strip()]
            last = [line for line in said if "Error" in line] or said or ["no message"]
            raise Failed(f"exit status {process.returncode}: {last[-1][:300]}")


def row_of(
    script: str, *words: object, timeout_s: float = _NO_LIMIT_S, **more: str
) -> dict[str, Any]:
    """Returns the last object a script prints; arguments and errors as of :func:`printed_by`."""
    rows = list(printed_by(script, *words, timeout_s=timeout_s, **more))
    if not rows:
        raise Failed("nothing was said")
    return rows[-1]


# -------------------------------------------------------------------- command lines


def command_line(text: str | None) -> argparse.ArgumentParser:
    """A parser whose help is a module's docstring as it is written."""
    return argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_names(parser: argparse.ArgumentParser, option: str, known: Sequence[str]) -> None:
    """Adds an option for some of the known names, separated by commas; all are the default."""

    def names_of(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(
                    f"unknown name {name!r}; there are {', '.join(known)}"
                )
        return names

    parser.add_argument(
        option, type=names_of, default=known, metavar="A,B", help=f"of {', '.join(known)}"
    )


def add_outcome(
    parser: argparse.ArgumentParser, *, limited: str, tables: str, numbers: str
) -> None:
    """Adds what a benchmark with bounds has: seed, time limit, files, and whether it checks.

    Args:
        parser: of the command line.
        limited: what the time limit is for.
        tables: what the Markdown file gets.
        numbers: when the JSON file is written.
    """
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--timeout", type=float, default=900.0, metavar="S", help=f"for one {limited} (default 900)"
    )
    told = f"where the {tables} written beside standard output"
    parser.add_argument("--output", type=Path, metavar="FILE.md", help=told)
    told = f"where every number is written{numbers}"
    parser.add_argument("--json", type=Path, metavar="FILE.json", help=told)
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bound fails")


# -------------------------------------------------------------------- what a person reads


class Report:
    """Lines that are printed as they come, and written to a file at the end."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, *lines: str) -> None:
        """Prints lines and keeps them."""
        self._lines += lines
        print(*lines, sep="\n", flush=True)

    def write(self, path: Path | None) -> None:
        """Writes all of them, where a file was asked for."""
        if path:
            path.write_text("\n".join(self._lines) + "\n", encoding="utf-8")


def line_of(cells: Iterable[object]) -> str:
    """One line of a Markdown table."""
    return "| " + " | ".join(map(str, cells)) + " |"


def head(columns: Collection[str], left: int | None = None) -> str:
    """The first two lines of a Markdown table; columns after the first ``left`` are aligned to the
    right."""
    left = len(columns) if left is None else left
    return f"{line_of(columns)}\n|" + "---|" * left + "---:|" * (len(columns) - left)


def cells_of(
    row: dict[str, Any], columns: Iterable[tuple[str, str]], missing: str = "–"
) -> list[str]:
    """The cells of a row.

    Args:
        columns: key of a number in the row, and how it is written: a format, or ``"MiB"``. Text is
            written as it is.
        missing: stands where the row does not have the number.
    """
    told = ((row.get(key), form) for key, form in columns)
    return [missing if number is None else _written(number, form) for number, form in told]


def _written(number: Any, form: str) -> str:
    if isinstance(number, str):
        return number
    return f"{number / MIB:.1f}" if form == "MiB" else format(number, form)


def failure_line(columns: Collection[str], *cells: str) -> str:
    """A line whose last cell says why there is no row, and empty cells behind it."""
    *names, error = cells
    text = " ".join(error.split()).replace("|", "\\|")
    return line_of([*names, text]) + " |" * (len(columns) - len(cells))


def error_of(row: dict[str, Any]) -> float | None:
    """Predicted over measured peak, less one; ``None`` where one of them is not known."""
    predicted, measured = row.get("predicted_bytes"), row.get("measured_bytes")
    return predicted / measured - 1 if predicted and measured else None


def difference(reference: Iterable[float], other: Iterable[float]) -> float:
    """The largest relative difference of two runs' losses; infinite where one is no number."""
    return largest(abs(a - b) / max(abs(a), 1e-9) for a, b in zip(reference, other, strict=True))


def largest(differences: Iterable[float]) -> float:
    """The largest difference; infinite where one is no number, which ``max`` may pass over."""
    return max(math.inf if math.isnan(one) else one for one in differences)


def geometric_mean(numbers: Sequence[float]) -> float:
    """Of positive numbers; NaN of none."""
    return math.exp(sum(map(math.log, numbers)) / len(numbers)) if numbers else math.nan


#: Backend of Keras → its distributions, and what it is called.
_FRAMEWORKS = {
    "tensorflow": (("tensorflow", "tensorflow-cpu"), "TensorFlow"),
    "torch": (("torch",), "PyTorch"),
    "jax": (("jax",), "JAX"),
}


def machine(backend: str = "tensorflow") -> str:
    """CPU, cores, versions of a backend of Keras and of Keras, and date, in one line."""
    model = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.partition(":")[2].strip()
            for line in cpuinfo.read_text().splitlines()
            if line.startswith("model name")
        ]
        model = names[0] if names else model
    cores = len(os.sched_getaffinity(0))
    distributions, called = _FRAMEWORKS[backend]
    return (
        f"{model}, {cores} cores, {called} {version_of(*distributions)}, Keras "
        f"{version_of('keras')}, Python "
        f"{platform.python_version()}, {time.strftime('%Y-%m-%d')}"
    )


def version_of(*names: str) -> str:
    """The version of the first of these distributions that is installed."""
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "not installed"


def keep(row: dict[str, Any], path: Path | None) -> None:
    """Adds a row to a file of JSON lines, where one was asked for."""
    if path:
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def kept(path: Path | None) -> list[dict[str, Any]]:
    """The rows of a file that :func:`keep` wrote; none where there is none."""
    lines = path.read_text().splitlines() if path and path.exists() else []
    return [json.loads(line) for line in lines]


def write_run(
    path: Path | None, header: str, settings: dict[str, Any], rows: Sequence[dict[str, Any]]
) -> None:
    """Writes a run's rows to a JSON file, with its settings, where a file was asked for."""
    if path:
        told = {"machine": header, "settings": settings, "rows": rows}
        path.write_text(json.dumps(told, indent=1), encoding="utf-8")


def rows_of_run(path: Path | None, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a file that :func:`write_run` wrote; none where there is none.

    Raises:
        SystemExit: they have other settings, and this run would show them as its own.
    """
    if path is None or not path.exists():
        return []
    told = json.loads(path.read_text(encoding="utf-8"))
    if told.get("settings") != json.loads(json.dumps(settings)):
        raise SystemExit(f"{path} has rows of other settings: give --json another file")
    return told["rows"]


def failed(failures: Sequence[str], check: bool) -> int:
    """Prints what falls short and returns the exit status: 1 where that was to be checked."""
    for failure in failures:
        print(f"BOUND: {failure}")
    return int(check and bool(failures))
