"""Checks a solution file against a problem file: is it legal, how long does it take, what is its
peak?

    python benchmarks/suite/check.py PROBLEM.json[.gz] SOLUTION.json

Shares no code with the package and needs nothing but Python, so that a solver of somebody else can
be checked anywhere. The rules, for a problem whose ops and values are numbered by their places:

* The order may name an op several times; one with ``recomputable: false`` at most once.
* An op runs after some run of each op that computes a value it reads, and after *every* run of each
  op in its ``after``.
* Every op that is not recomputable, every op that computes an output, and whatever these read from,
  transitively, runs.
* A run computes new instances of its outputs. An instance lives until its last read before the op's
  next run; that of an output which no later run replaces lives to the end.
* While a run is on, these bytes are held: ``resident_bytes``, all instances that live then (those
  it reads and computes among them), its ``workspace_bytes``; less, for each of its outputs, the
  bytes of an instance that dies there, is in the op's ``may_reuse``, and has exactly the output's
  size, each at most once.

Prints the seconds and the peak; ends with status 1 and the reason where a rule is broken.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any


class RuleBrokenError(Exception):
    """The order is no legal schedule of the problem."""


def read(path: Path) -> Any:
    """Returns the JSON document of a file, compressed or not."""
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)


def evaluate(problem: dict[str, Any], order: list[int]) -> tuple[float, int]:
    """Returns the seconds and the peak bytes of a legal order.

    Raises:
        RuleBrokenError: it is not legal.
    """
    ops, sizes = problem["ops"], [value["bytes"] for value in problem["values"]]
    maker = {value: at for at, op in enumerate(ops) for value in op["outputs"]}
    check_rules(problem, order, maker)
    deaths: list[dict[int, int]] = [{} for _ in order]  # value → last position of its instance
    ends: list[list[int]] = [[] for _ in order]  # instances (value, if one) that die at a position
    newest: dict[int, int] = {}
    for position, op_id in enumerate(order):
        for value in ops[op_id]["inputs"]:
            if value in maker:
                deaths[newest[value]][value] = position
        for value in ops[op_id]["outputs"]:
            deaths[position][value] = position
            newest[value] = position
    final = {value for value in problem["outputs"] if value in maker}
    for value in final:
        deaths[newest[value]][value] = len(order)
    for instances in deaths:
        for value, death in instances.items():
            if death < len(order):
                ends[death].append(value)
    held = peak = problem.get("resident_bytes", 0)
    for position, op_id in enumerate(order):
        op = ops[op_id]
        held += sum(sizes[value] for value in deaths[position])
        donors = set(ends[position]) & set(op.get("may_reuse", ())) - set(op["outputs"])
        given = Counter(sizes[value] for value in donors)
        taken = Counter(sizes[value] for value in op["outputs"])
        saved = sum(size * count for size, count in (given & taken).items())
        peak = max(peak, held + op.get("workspace_bytes", 0) - saved)
        held -= sum(sizes[value] for value in ends[position])
    return sum(ops[op_id]["time_s"] for op_id in order), peak


def check_rules(problem: dict[str, Any], order: list[int], maker: dict[int, int]) -> None:
    """Raises :class:`RuleBrokenError` unless the order may be run."""
    ops = problem["ops"]
    if not all(type(op_id) is int and 0 <= op_id < len(ops) for op_id in order):
        raise RuleBrokenError("the order has something that is no op of the problem")
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, op_id in enumerate(order):
        if op_id in first and not ops[op_id].get("recomputable", True):
            raise RuleBrokenError(f"op {op_id} runs again at position {position}")
        for value in ops[op_id]["inputs"]:
            if value in maker and maker[value] not in first:
                raise RuleBrokenError(f"value {value} does not exist at position {position}")
        first.setdefault(op_id, position)
        last[op_id] = position
    for op_id, position in first.items():
        for earlier in ops[op_id].get("after", ()):
            if last.get(earlier, -1) > position:
                raise RuleBrokenError(f"op {earlier} runs after op {op_id}, which must follow it")
    wanted = [at for at, op in enumerate(ops) if not op.get("recomputable", True)]
    wanted += [maker[value] for value in problem["outputs"] if value in maker]
    needed: set[int] = set()
    while wanted:
        op_id = wanted.pop()
        if op_id not in needed:
            needed.add(op_id)
            wanted += [maker[value] for value in ops[op_id]["inputs"] if value in maker]
    if not needed <= set(first):
        raise RuleBrokenError(f"op {min(needed - set(first))} never runs")


def main(arguments: list[str]) -> int:
    """Checks the files named on the command line and returns the exit status."""
    if len(arguments) != 2:
        print(__doc__)
        return 2
    problem, solution = (read(Path(argument)) for argument in arguments)
    try:
        seconds, peak = evaluate(problem, solution["order"])
    except RuleBrokenError as error:
        print(f"illegal: {error}")
        return 1
    budget = problem.get("budget_bytes")
    over = budget is not None and peak > budget
    print(f"{seconds!r} s, {peak} bytes" + (f", over the budget of {budget}" if over else ""))
    return int(over)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
