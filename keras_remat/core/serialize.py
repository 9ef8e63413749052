"""Reads and writes problem files: JSON with list positions as ids, in the default order.

``{"format": "keras_remat.problem", "version": 1, "name", "resident_bytes", "budget_bytes",
"values": [{"name", "bytes"}], "ops": [{"name", "phase", "time_s", "workspace_bytes",
"recomputable", "inputs", "outputs", "after", "may_reuse"}], "outputs"}``. ``after`` and
``may_reuse`` may be missing. A value without a producer is a step input. Further fields of the core
(``kind`` of an op, ``shape`` and ``dtype`` of a value, ``source``, ``device`` and ``backend`` of
the profile) are written where they are known, so that a problem comes back exactly as it was.
Unknown fields (``pool`` and ``offload``, which older files have) are ignored.
"""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keras_remat.core.graph import Graph, Op, Value, is_int
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.errors import InvalidProblemError

FORMAT, VERSION = "keras_remat.problem", 1
_REQUIRED = object()


def write_json(document: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Writes ``document`` to ``path`` in one step.

    A reader sees the old file or the new one, never half of it. A device or a pipe is not replaced,
    but written to.

    Raises:
        ValueError: a number is NaN or infinite, which JSON cannot say.
        OSError: the file cannot be written.
    """
    target = Path(path)
    text = json.dumps(document, indent=1, allow_nan=False) + "\n"
    if target.exists() and not target.is_file():
        target.write_text(text, encoding="utf-8")
        return
    target = target.resolve()  # a link stays one
    # ids of processes are the same in several containers, and for several threads
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def read_json(
    path: str | os.PathLike[str], expected_format: str | tuple[str, ...], version: int
) -> dict[str, Any]:
    """Reads a JSON object of a given version, and of a given format or one of several.

    Raises:
        InvalidProblemError: the file is no JSON, no object, or of another format or version.
        OSError: the file cannot be read.
    """
    source = os.fspath(path)
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        # ValueError: no JSON, no UTF-8, or an integer of thousands of digits
        raise InvalidProblemError(f"not a JSON file: {error}", source=source) from error
    if not isinstance(document, dict):
        raise InvalidProblemError(
            f"expected a JSON object, got {type(document).__name__}", source=source
        )
    formats = (expected_format,) if isinstance(expected_format, str) else expected_format
    found = document.get("format")
    if found not in formats:
        kind = str(found).removeprefix("keras_remat.")
        told = f": this is a {kind} file" if kind != str(found) else ""
        raise InvalidProblemError(
            f"expected {' or '.join(map(repr, formats))}, got {found!r}{told}",
            source=source,
            field="format",
            value=found,
        )
    if document.get("version") != version or type(document["version"]) is not int:
        raise InvalidProblemError(
            f"this release reads version {version}, got {document.get('version')!r}",
            source=source, field="version", value=document.get("version"),
        )  # fmt: skip
    return document


def problem_to_dict(problem: Problem) -> dict[str, Any]:
    """Returns the problem as the JSON object of a problem file."""
    graph, profile = problem.graph, problem.profile
    values = [
        _known(name=value.name, bytes=value.nbytes, shape=value.shape, dtype=value.dtype)
        for value in graph.values
    ]
    ops = [
        _known(
            name=op.name, phase=op.phase, time_s=profile.op_time_s[op.id],
            workspace_bytes=profile.op_workspace_bytes[op.id], recomputable=op.recomputable,
            inputs=op.inputs, outputs=op.outputs, after=op.after, may_reuse=op.may_reuse,
            kind=op.kind or None,
        )
        for op in graph.ops
    ]  # fmt: skip
    return {
        "format": FORMAT, "version": VERSION, "name": problem.name,
        "resident_bytes": profile.resident_bytes, "budget_bytes": problem.budget_bytes,
        "source": profile.source, "device": profile.device, "backend": profile.backend,
        "values": values, "ops": ops, "outputs": list(graph.outputs),
    }  # fmt: skip


def _known(**fields: Any) -> dict[str, Any]:
    """Returns a JSON object of the fields that are not ``None``, with lists for tuples."""
    known = {key: field for key, field in fields.items() if field is not None}
    return {key: list(f) if isinstance(f, tuple) else f for key, f in known.items()}


class Fields:
    """Reads typed fields of one JSON object; errors name file, field and value."""

    def __init__(self, document: object, source: str | None, prefix: str = ""):
        if not isinstance(document, dict):
            raise InvalidProblemError(
                f"expected an object, got {document!r}",
                source=source,
                field=prefix or None,
                value=document,
            )
        self.document, self.source, self.prefix = document, source, prefix

    def path(self, key: str) -> str:
        """Returns the name of a field, with the objects it is in."""
        return f"{self.prefix}.{key}" if self.prefix else key

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = _REQUIRED) -> Any:
        """Returns the value of a field; ``default``, if given, where the field is missing."""
        field = self.path(key)
        if key not in self.document:
            if default is _REQUIRED:
                raise self.wrong(field, "is missing")
            return default
        value = self.document[key]
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            names = " or ".join("null" if k is type(None) else k.__name__ for k in kinds)
            raise self.wrong(field, f"expected {names}, got {value!r}", value)
        if isinstance(value, float) and not math.isfinite(value):
            raise self.wrong(field, f"must be finite, got {value!r}", value)
        return value

    def positive(self, key: str, default: Any = _REQUIRED) -> Any:
        """Returns the value of a field that is a positive int, or ``default``."""
        value = self.get(key, int if default is _REQUIRED else (int, type(default)), default)
        if value is not None and value <= 0:
            raise self.wrong(self.path(key), f"must be positive, got {value}", value)
        return value

    def ids(self, key: str, default: Any = _REQUIRED) -> tuple[int, ...]:
        """Returns the value of a field that is a list of ids."""
        value = self.get(key, list, default)
        for at, item in enumerate(value):
            if not is_int(item):
                raise self.wrong(f"{self.path(key)}[{at}]", f"expected an id, got {item!r}", item)
        return tuple(value)

    def wrong(self, field: str, message: str, value: object = None) -> InvalidProblemError:
        """Returns the error for a field of this file; ``field`` is its full name."""
        return InvalidProblemError(message, source=self.source, field=field, value=value)


def problem_from_dict(document: object, *, source: str | None = None) -> Problem:
    """Returns the problem a JSON object describes.

    Args:
        document: as :func:`problem_to_dict` returns it.
        source: the file it came from, for error messages.

    Raises:
        InvalidProblemError: a field is missing, has the wrong type, or the graph is inconsistent.
    """
    top = Fields(document, source)
    value_fields, op_fields = (
        [Fields(raw, source, f"{key}[{at}]") for at, raw in enumerate(top.get(key, list))]
        for key in ("values", "ops")
    )
    try:
        return Problem(
            _graph_of(top, value_fields, op_fields),
            _profile_of(top, op_fields),
            top.get("budget_bytes", (int, type(None)), None),
            top.get("name", str, ""),
        )
    except InvalidProblemError as error:
        if error.source is not None or source is None:
            raise
        raise InvalidProblemError(
            error.message, source=source, field=error.field, value=error.value
        ) from None


def _graph_of(top: Fields, value_fields: list[Fields], op_fields: list[Fields]) -> Graph:
    ops = [
        Op(
            at,
            fields.get("name", str, ""),
            fields.get("kind", str, ""),
            fields.ids("inputs"),
            fields.ids("outputs"),
            fields.get("phase", str, "forward"),
            fields.get("recomputable", bool, True),
            fields.ids("after", []),
            fields.ids("may_reuse", []),
        )
        for at, fields in enumerate(op_fields)
    ]
    producers: dict[int, int] = {}
    for op in ops:
        for value_id in op.outputs:
            producers.setdefault(value_id, op.id)
    values = [
        Value(
            at,
            fields.get("name", str, ""),
            fields.get("bytes", int),
            fields.get("shape", list, None),
            fields.get("dtype", str, None),
            producers.get(at),
        )
        for at, fields in enumerate(value_fields)
    ]
    return Graph(tuple(ops), tuple(values), top.ids("outputs"))


def _profile_of(top: Fields, op_fields: list[Fields]) -> Profile:
    return Profile(
        tuple(fields.get("time_s", (int, float)) for fields in op_fields),
        tuple(fields.get("workspace_bytes", int, 0) for fields in op_fields),
        top.get("resident_bytes", int, 0),
        source=top.get("source", str, "measured"),
        device=top.get("device", str, ""),
        backend=top.get("backend", str, ""),
    )


def save_problem(problem: Problem, path: str | os.PathLike[str]) -> None:
    """Writes a problem file; :func:`load_problem` gives back an equal problem."""
    write_json(problem_to_dict(problem), path)


def load_problem(path: str | os.PathLike[str]) -> Problem:
    """Reads a problem file.

    Raises:
        InvalidProblemError: malformed or inconsistent; the message names file, field and value.
        OSError: the file cannot be read.
    """
    return problem_from_dict(read_json(path, FORMAT, VERSION), source=os.fspath(path))
