"""Counts FLOPs, bytes moved and roofline time of a compiled module from its HLO text.

The compiler's own ``cost_analysis`` counts neither cuDNN's nor cuBLAS's calls, which are most of a
step on a GPU. Here every instruction that becomes a kernel counts as one: a fusion, a call of a
library, a copy. A kernel reads its operands and writes its results once. If a fusion updates a
value in place, only the update counts as written. A fusion reads and computes only the elements
that its results need: a guard waits for one element of a large value, and XLA computes that
element, not the value. Products and convolutions count two FLOPs for a multiplication and addition;
anything else counts one per element. The body of a loop counts as often as it runs; of the branches
of a condition, the dearest counts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from keras_remat.backends.tables import names
from keras_remat.backends.xla.kernel_costs import kernel_time_s
from keras_remat.core.target import Rates

_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
#: An element of a tuple, as JAX 0.11.2's XLA writes it down.
_ELEMENT = re.compile(r".+#\d+")
#: Kinds of instructions that become no kernel.
FREE = names("""
    parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id
    optimization-barrier
""")
#: Kinds of instructions that compute nothing; some of them move elements.
MOVING = FREE | names("""
    copy transpose reshape broadcast iota slice dynamic-slice dynamic-update-slice concatenate pad
    reverse gather select convert bitcast-convert
""")
_EXPENSIVE = names("""
    exponential exponential-minus-one log log-plus-one tanh sine cosine power rsqrt sqrt logistic
    erf cbrt atan2 tan
""")
_SLICING = frozenset(["slice", "dynamic-slice", "gather"])


@dataclass(frozen=True)
class Array:
    """Describes one array of a type: its name in HLO, and its dimensions."""

    kind: str
    dims: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Returns the number of elements."""
        return math.prod(self.dims)

    @property
    def nbytes(self) -> int:
        """Returns the size in bytes."""
        if self.kind == "pred":
            return self.elements
        bits = re.search(r"\d+", self.kind)
        return self.elements * int(bits[0]) // 8 if bits else 0


@dataclass(frozen=True)
class Instruction:
    """Holds one line of a computation."""

    name: str
    arrays: tuple[Array, ...]  # of its result; several in a tuple
    kind: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool

    def of(self, pattern: str) -> str:
        """Returns the match of a pattern's group in its attributes; empty if there is none."""
        found = re.search(pattern, self.attributes)
        return found[1] if found else ""

    @property
    def nbytes(self) -> int:
        """Returns bytes of its result."""
        return sum(array.nbytes for array in self.arrays)


Computation = dict[str, Instruction]


@dataclass(frozen=True)
class Costs:
    """Holds FLOPs, bytes moved and seconds."""

    flops: float = 0.0
    bytes_moved: int = 0
    time_s: float = 0.0

    def __add__(self, other: Costs) -> Costs:
        return Costs(
            self.flops + other.flops,
            self.bytes_moved + other.bytes_moved,
            self.time_s + other.time_s,
        )

    def times(self, count: int) -> Costs:
        """Returns the costs of ``count`` runs."""
        return Costs(self.flops * count, self.bytes_moved * count, self.time_s * count)


def costs(text: str, rates: Rates) -> Costs:
    """Returns the costs of the entry computation of an optimized module.

    Args:
        text: ``Compiled.as_text()``.
        rates: the card's.
    """
    module = _Module(*_parsed(text), rates)
    return module.of(module.entry)


@dataclass
class _Module:
    computations: dict[str, Computation]
    entry: str
    rates: Rates
    known: dict[str, Costs] = field(default_factory=dict)

    def of(self, name: str) -> Costs:
        """Returns the costs of a computation whose instructions are kernels."""
        if name not in self.known:
            inside = self.computations[name]
            self.known[name] = sum((self._cost(i, inside) for i in inside.values()), Costs())
        return self.known[name]

    def _cost(self, one: Instruction, inside: Computation) -> Costs:
        if one.kind in FREE:
            return Costs()
        if one.kind == "while":
            return self.of(one.of(r"body=%([^\s,]+)")).times(
                int(one.of(r'known_trip_count":\{"n":"(\d+)"') or 1)
            )
        if one.kind == "conditional":
            branches = re.findall(r"%([^\s,}]+)", one.of(r"branch_computations=\{([^}]*)\}"))
            named = [one.of(rf"{word}_computation=%([^\s,]+)") for word in ("true", "false")]
            return max(map(self.of, branches or named), key=lambda cost: cost.time_s)
        if one.kind in ("call", "async-start"):
            return self.of(one.of(r"(?:to_apply|calls|called_computations=\{)=?%([^\s,}]+)"))
        if one.kind.endswith(("-done", "-update")):
            return Costs()
        called = one.of(r"calls=%([^\s,]+)") if one.kind == "fusion" else ""
        operands = [inside[name] for name in one.operands]
        if called:
            body = self.computations[called]
            wanted = _wanted(body)
            flops, weighted = self._fused_flops(body, wanted)
            moved = _fused_bytes(body, wanted)
        else:
            flops, weighted = self._flops_of(one, operands)
            moved = sum(operand.nbytes for operand in operands) + one.nbytes
        return Costs(flops, moved, kernel_time_s(weighted, moved, self.rates))

    def _fused_flops(self, body: Computation, wanted: dict[str, int]) -> tuple[float, float]:
        """Returns the same as :meth:`_flops_of` for a fusion; only wanted elements count."""
        found = []
        for one in body.values():
            share = wanted[one.name] / max(1, _elements(one))
            flops, weighted = self._flops_of(one, [body[name] for name in one.operands])
            found.append((share * flops, share * weighted))
        return math.fsum(f for f, _ in found), math.fsum(w for _, w in found)

    def _flops_of(self, one: Instruction, operands: Sequence[Instruction]) -> tuple[float, float]:
        """Returns FLOPs of an instruction, and their cost in FLOPs of a 32-bit product."""
        if one.kind in MOVING or not one.arrays:
            return 0.0, 0.0
        target = one.of(r'custom_call_target="([^"]+)"')
        half = any(i.arrays and i.arrays[0].nbytes == 2 * i.arrays[0].elements for i in operands)
        factor = self.rates.half_flop if half else 1.0
        if one.kind == "dot" or "gemm" in target or "matmul" in target:
            flops = _dot_flops(one, operands[0])
            return flops, flops * factor
        if one.kind == "convolution" or "conv" in target:
            flops = _convolution_flops(one, operands, target)
            grouped = int(one.of(r"feature_group_count=(\d+)") or 1) > 1
            return flops, flops * factor * (self.rates.grouped_factor if grouped else 1.0)
        read = [array.elements for operand in operands for array in operand.arrays]
        flops = float(max([one.arrays[0].elements, *read]))
        return flops, flops * (self.rates.expensive_flops if one.kind in _EXPENSIVE else 1.0)


def _dot_flops(one: Instruction, left: Instruction) -> float:
    contracted = one.of(r"lhs_contracting_dims=\{([\d,]*)\}") or one.of(
        r'lhs_contracting_dimensions":\[([^\]]*)\]'
    )
    width = math.prod(left.arrays[0].dims[int(d)] for d in re.findall(r"\d+", contracted))
    return 2.0 * one.arrays[0].elements * width


def _convolution_flops(one: Instruction, operands: Sequence[Instruction], target: str) -> float:
    """Returns FLOPs. Every element of the output is a sum over the kernel's places and input
    channels; this holds for the gradients, too."""
    result, first, second = one.arrays[0], operands[0].arrays[0], operands[1].arrays[0]
    kernel, output = second, result
    if "BackwardInput" in target:
        output = first
    elif "BackwardFilter" in target:
        kernel, output = result, second
    labels = one.of(r"dim_labels=\w+_(\w+)->")
    return 2.0 * output.elements * kernel.elements / kernel.dims[labels.index("o")]


def _wanted(body: Computation) -> dict[str, int]:
    """Returns instruction → how many of its elements a fusion's kernel computes: those that its
    results need."""
    root = _root(body)
    wanted = dict.fromkeys(body, 0)
    wanted[root.name] = _elements(root)
    for one in reversed(body.values()):  # what reads an instruction stands below it
        share = min(1.0, wanted[one.name] / max(1, _elements(one)))
        for position, name in enumerate(one.operands):
            if position == 0 and one.kind in _SLICING:
                read = wanted[one.name]
            elif position == 0 and one.kind == "dynamic-update-slice" and _is_given(name, body):
                read = 0  # in place
            else:
                read = math.ceil(share * _elements(body[name]))
            wanted[name] = min(_elements(body[name]), wanted[name] + read)
    return wanted


def _elements(one: Instruction) -> int:
    return sum(array.elements for array in one.arrays)


def _is_given(name: str, body: Computation) -> bool:
    while body[name].kind == "bitcast":
        (name,) = body[name].operands
    return body[name].kind == "parameter"


def _root(body: Computation) -> Instruction:
    (root,) = (one for one in body.values() if one.is_root)
    return root


def _fused_bytes(body: Computation, wanted: dict[str, int]) -> int:
    """Returns the bytes a fusion reads and writes."""
    moved = 0
    for one in body.values():
        if one.kind == "parameter":
            moved += round(wanted[one.name] / max(1, _elements(one)) * one.nbytes)
    root = _root(body)
    results = [body[name] for name in root.operands] if root.kind == "tuple" else [root]
    return moved + sum(_written_bytes(result, body) for result in results)


def _written_bytes(result: Instruction, body: Computation) -> int:
    while result.kind == "bitcast":
        result = body[result.operands[0]]
    if result.kind == "dynamic-update-slice":
        return body[result.operands[1]].nbytes
    return result.nbytes


# ------------------------------------------------------------------ reading


def _parsed(text: str) -> tuple[dict[str, Computation], str]:
    """Returns the computations of a module by name, and the name of the entry."""
    found: dict[str, Computation] = {}
    entry = current = ""
    for line in text.splitlines():
        begins = re.match(r"(ENTRY )?%(\S+) \(.*\{$", line)
        if begins:
            current = begins[2]
            found[current] = {}
            entry = current if begins[1] else entry
        elif line.startswith("  ") and " = " in line and current:
            one = _instruction(line)
            for operand in filter(_ELEMENT.fullmatch, one.operands):
                found[current].setdefault(operand, _element(operand, found[current]))
            found[current][one.name] = one
    return found, entry


def _element(operand: str, inside: Computation) -> Instruction:
    """Returns an element of a tuple, where it is read without an instruction that takes it."""
    name, _, index = operand.rpartition("#")
    array = inside[name].arrays[int(index)]
    return Instruction(operand, (array,), "get-tuple-element", (name,), "", is_root=False)


def _instruction(line: str) -> Instruction:
    left, _, right = line.strip().partition(" = ")
    is_root = left.startswith("ROOT ")
    cut = _closing(right) + 1 if right.startswith("(") else right.index(" ")
    kind, _, rest = right[cut:].strip().partition("(")
    end = _closing("(" + rest) - 1
    operands = tuple(re.findall(r"%([^\s,()]+)", rest[:end]))
    arrays = tuple(
        Array(name, tuple(map(int, filter(None, dims.split(",")))))
        for name, dims in _ARRAY.findall(right[:cut])
    )
    name = left.removeprefix("ROOT ").removeprefix("%")
    return Instruction(name, arrays, kind, operands, rest[end:], is_root)


def _closing(text: str) -> int:
    """Returns the position of the bracket that closes the first one."""
    depth = 0
    for at, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return at
    raise ValueError(f"no closing bracket in {text[:80]!r}")
