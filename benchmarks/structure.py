"""Prints numbers of the package's structure: what a reader meets, and how much can change.

    python benchmarks/structure.py [--list] [--frames] [--json FILE]

Every number but the last two is read from the source by :mod:`ast` and :mod:`tokenize`; nothing is
imported. ``--list`` names the files and functions that are too long or too short and give no reason
in their docstring. ``--frames`` trains a small model under a plan and counts the package's own
frames on the stack, and its calls, so it needs Keras on TensorFlow.

A number is a place to look, not a verdict: lines that are saved by longer lines do not count.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "keras_remat"
#: Files and functions that the style asks a reason for, in lines.
SHORT_FILE, LONG_FILE, LONG_FUNCTION = 30, 400, 60
#: A docstring gives a reason for a length if it says so.
REASON = re.compile(r"though\s+(a\s+little\s+)?(long|short)\b", re.IGNORECASE)
#: What the limit of a fit is called where it is compared.
LIMIT_NAMES = re.compile(r"^_?(limit|budget|usable|room|target)(_bytes)?$")
#: Tokens that are no code.
_EMPTY = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENCODING, tokenize.ENDMARKER,
}  # fmt: skip
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def docstring_lines(tree: ast.Module) -> set[int]:
    """Returns the numbers of the lines that docstrings take."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, *_FUNCTIONS)) or not node.body:
            continue
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            lines.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return lines


def code_lines(text: str) -> int:
    """Returns how many lines have code: no docstring, comment or blank line."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _EMPTY:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstring_lines(ast.parse(text)))


def is_number(node: ast.expr) -> bool:
    """Returns whether an expression is made of numbers only."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, (int, float)) and not isinstance(node.value, bool)
    if isinstance(node, ast.UnaryOp):
        return is_number(node.operand)
    if isinstance(node, ast.BinOp):
        return is_number(node.left) and is_number(node.right)
    return isinstance(node, ast.Tuple) and bool(node.elts) and all(map(is_number, node.elts))


def numeric_constants(tree: ast.Module) -> int:
    """Returns how many names of a module are bound to numbers."""
    count = 0
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            count += is_number(node.value)
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            names = len(target.elts) if isinstance(target, ast.Tuple) else 1
            count += names if is_number(node.value) else 0
    return count


def mutable_attributes(tree: ast.Module) -> set[tuple[str, str]]:
    """Returns (class, attribute) of what methods other than ``__init__`` assign on ``self``."""
    found = set()
    for owner in ast.walk(tree):
        if not isinstance(owner, ast.ClassDef):
            continue
        for method in owner.body:
            if not isinstance(method, _FUNCTIONS) or method.name == "__init__":
                continue
            found |= {(owner.name, name) for name in _assigned_on_self(method)}
    return found


def _assigned_on_self(method: ast.AST) -> Iterator[str]:
    for node in ast.walk(method):
        is_bound = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if is_bound and isinstance(node.value, ast.Name) and node.value.id == "self":
            yield node.attr


def doors_for_plans(tree: ast.Module) -> int:
    """Returns how many functions say that they return a plan."""
    returns = (node.returns for node in ast.walk(tree) if isinstance(node, _FUNCTIONS))
    return sum(bool(r is not None and re.search(r"\bPlan\b", ast.unparse(r))) for r in returns)


def limit_comparisons(tree: ast.Module) -> int:
    """Returns how often bytes are compared with a limit by ``<`` and its kin."""
    count = 0
    for node in ast.walk(tree):
        if not isinstance(node, ast.Compare):
            continue
        sides = [node.left, *node.comparators]
        ordered = any(isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE) for op in node.ops)
        count += ordered and any(LIMIT_NAMES.match(_last_name(side)) for side in sides)
    return count


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def long_functions(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Returns the functions that are longer than the style asks for."""
    functions = (node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS))
    return [f for f in functions if (f.end_lineno or f.lineno) - f.lineno + 1 > LONG_FUNCTION]


def has_reason(node: ast.Module | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Returns whether a docstring says why a file or a function is long, or short."""
    return bool(REASON.search(ast.get_docstring(node) or ""))


def without_reason() -> list[str]:
    """Returns the files and functions whose length the style asks a reason for, and that give none;
    files that are a docstring alone make a folder a package, and need none."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        text, name = path.read_text(), str(path.relative_to(ROOT))
        tree, lines = ast.parse(text), text.count("\n")
        is_odd = len(tree.body) > 1 and not SHORT_FILE <= lines <= LONG_FILE
        if is_odd and not has_reason(tree):
            found.append(f"{name}: {lines} lines")
        functions = (f for f in long_functions(tree) if not has_reason(f))
        found += [f"{name}: {f.name} is over {LONG_FUNCTION} lines" for f in functions]
    return found


def numbers() -> dict[str, int]:
    """Returns every number that is read from the source."""
    texts = {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    lengths = [text.count("\n") for text in texts.values()]
    training = [tree for path, tree in trees.items() if path.parent.name == "training"]
    reassigned = [attribute for tree in training for attribute in mutable_attributes(tree)]
    tests = (ROOT / "tests").rglob("*.py")
    return {
        "lines": sum(lengths),
        "code lines": sum(map(code_lines, texts.values())),
        "files": len(texts),
        f"files under {SHORT_FILE} lines": sum(0 < n < SHORT_FILE for n in lengths),
        f"files over {LONG_FILE} lines": sum(n > LONG_FILE for n in lengths),
        f"functions over {LONG_FUNCTION} lines": sum(
            len(long_functions(tree)) for tree in trees.values()
        ),
        "of these, without a reason": len(without_reason()),
        "numeric constants of modules": sum(map(numeric_constants, trees.values())),
        "objects of a fit that change": len({owner for owner, _ in reassigned}),
        "attributes of a fit that change": len(reassigned),
        "functions that return a plan": sum(map(doors_for_plans, trees.values())),
        "comparisons with a limit": sum(map(limit_comparisons, trees.values())),
        "lines of tests": sum(path.read_text().count("\n") for path in tests),
    }


def calls_of_a_step() -> tuple[int, int]:
    """Returns the most frames of this package on the stack in a settled step under a plan, and how
    often one of its functions is called in such a step, the callback's hooks included."""
    sys.path.insert(0, str(ROOT))
    import keras
    import numpy as np
    import tensorflow as tf

    import keras_remat

    keras_remat.enable_cpu_memory_stats()
    model = keras.Sequential([keras.layers.Dense(256, activation="relu") for _ in range(4)])
    model.compile("sgd", "mse", jit_compile=False)
    x = np.zeros((512, 256), "float32")
    plan = keras_remat.make_plan(model, (x, x), "80%", solver="greedy")
    counter = _FrameCounter()
    remat = keras_remat.RematAutotune(None, "keep", plan=plan, verbose=0)
    data = tf.data.Dataset.from_tensors((x, x)).repeat(40)
    try:
        model.fit(data, verbose=0, callbacks=[remat, counting_callback(counter)])
    finally:
        sys.setprofile(None)
    return counter.most, min(counter.calls)


class _FrameCounter:
    """Counts the package's calls of every batch, and at each its frames on the stack.

    Attributes:
        most: frames.
        calls: of every batch; a step that is looked at has more.
    """

    def __init__(self) -> None:
        self.most, self._calls, self.calls = 0, 0, list[int]()

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        if event != "call" or str(PACKAGE) not in frame.f_code.co_filename:
            return
        count, self._calls = 0, self._calls + 1
        while frame is not None:
            count += str(PACKAGE) in frame.f_code.co_filename
            frame = frame.f_back
        self.most = max(self.most, count)

    def batch_begins(self) -> None:
        """Begins to count, or ends the count of a batch."""
        if sys.getprofile() is self:
            self.calls.append(self._calls)
        self._calls = 0
        sys.setprofile(self)


def counting_callback(counter: _FrameCounter) -> Any:
    """Returns a callback that counts from the twentieth step on."""
    import keras

    def begin(batch: int, logs: Any = None) -> None:
        if batch >= 20:
            counter.batch_begins()

    return keras.callbacks.LambdaCallback(on_train_batch_begin=begin)


def main() -> None:
    """Prints the numbers, and writes them to a file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="name what gives no reason")
    parser.add_argument("--frames", action="store_true", help="train a model and count frames")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    options = parser.parse_args()
    found = numbers()
    if options.frames:
        found["frames of a step"], found["calls of a step"] = calls_of_a_step()
    for name, number in found.items():
        print(f"{name:36s}{number:8,d}")
    if options.list:
        print(*without_reason(), sep="\n")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
