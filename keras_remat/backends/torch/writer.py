"""Writes an order of ops as one Python function: a line an op, and a ``del`` at the last use.

::

    v7 = f3(v2, p9, [1, 1])
    del v2

A view is made when it is first read, and lives as long as the value it looks at. A write happens in
place if the old value dies. Otherwise the operator that returns a new tensor takes its place, or a
copy is written. Nothing runs between the lines, so an op costs less than in PyTorch's own eager
mode, whose Python takes most of a small model's step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from keras_remat.backends.torch import in_place, private
from keras_remat.backends.torch.program import (
    EFFECT,
    GET_STATE,
    PURE,
    SET_STATE,
    WRITE,
    Node,
    Program,
)
from keras_remat.backends.torch.recorder import Call, Generator, Ref, Scalar
from keras_remat.core.graph import Graph
from keras_remat.core.simulate import last_reads

Given = dict[int, str]


class Writer:
    """Writes the function of one order.

    Args:
        program: the program of the nodes.
        graph: the graph of the nodes.
        order: ids of the nodes, which may repeat.
        is_probed: whether the function calls ``probe(position)`` before every op.

    Attributes:
        namespace: the names that the function finds outside of itself, and their objects.
        inputs: indices, among the recording's inputs, of the inputs that the function takes.
        constants: numbers of the constants that the function takes after the inputs.
    """

    def __init__(
        self, program: Program, graph: Graph, order: Sequence[int], *, is_probed: bool = False
    ):
        self._program, self._graph, self._is_probed = program, graph, is_probed
        self._order = tuple(order)
        self.namespace: dict[str, Any] = {
            "torch": torch, "seeded": private.seeded, "inf": float("inf"), "nan": float("nan"),
        }  # fmt: skip
        self.inputs: dict[int, None] = {}
        self.constants: dict[int, None] = {}
        self._place_of = {number: at for at, number in enumerate(program.recording.inputs)}
        self._lines: list[str] = []
        self._names: dict[Any, str] = {}  # operator or literal → its name
        self._views: dict[int, dict[int, str]] = defaultdict(dict)  # value → tensor → variable
        self._asked: dict[Any, str] = {}  # predicates → variables
        self._dying = self._ends()

    def write(self) -> str:
        """Returns the function's source: ``step(inputs and constants) → tensors``."""
        for position, op_id in enumerate(self._order):
            self._op(position, self._program.nodes[op_id])
        results = [self._tensor(n, v) for n, v in self._program.results.items()]
        self._lines.append(f"return ({''.join(f'{name}, ' for name in results)})")
        given = [f"p{at}" for at in self.inputs] + [f"c{number}" for number in self.constants]
        head = [f"{''.join(f'{name}, ' for name in given)} = given", "del given"]
        return "def step(given):\n  " + "\n  ".join([*(head if given else []), *self._lines]) + "\n"

    def _ends(self) -> list[list[int]]:
        """Returns, for every position, the values that are not needed any more after it."""
        dying: list[list[int]] = [[] for _ in self._order]
        for instances in last_reads(self._graph, self._order):
            for value, position in instances.items():
                if position < len(dying) - 1 or value not in self._graph.outputs:
                    dying[position].append(value)
        return dying

    # ---------------------------------------------------------------- one op

    def _op(self, position: int, node: Node) -> None:
        if self._is_probed:
            self._lines.append(f"probe({position})")
        guard = self._guard(node)
        if node.state is not None:
            self._lines.append(f"{guard}{self._state_function('set', node)}(v{node.state[0]})")
        if node.kind == GET_STATE:
            self._lines.append(f"v{node.values[0]} = {self._state_function('get', node)}()")
        elif node.kind == SET_STATE:
            self._lines.append(f"{self._state_function('set', node)}(v{node.inputs[0]})")
        elif node.kind == WRITE:
            self._write_temporaries(node, guard, set(self._dying[position]))
        elif node.kind == PURE:
            self._return(node, guard, set(self._dying[position]))
        elif node.kind == EFFECT and node.call is not None:
            self._lines.append(guard + self._call(node.call, node.reads))
        if node.state is not None:
            self._lines.append(f"{guard}v{node.state[1]} = {self._state_function('get', node)}()")
            if guard:  # nothing was drawn
                unless = guard.replace("if ", "if not (", 1).replace(": ", "): ", 1)
                self._lines.append(f"{unless}v{node.state[1]} = v{node.state[0]}")
        self._end(position)

    def _end(self, position: int) -> None:
        """Writes the lines that delete what dies after an op."""
        drop: list[str] = []
        for value in self._dying[position]:
            names = [f"v{value}", *self._views.pop(value, {}).values()]
            if self._guard_of(value):
                self._lines.append(f"{' = '.join(names)} = None")  # the value may not exist
            else:
                drop += names
        if drop:
            self._lines.append(f"del {', '.join(drop)}")

    def _guard_of(self, value: int) -> str:
        """Returns the condition of the lines that look at a value: of those that computed it."""
        producer = self._program.stored[value].producer
        return "" if producer is None else self._guard(self._program.nodes[producer])

    def _guard(self, node: Node) -> str:
        """Returns the condition of a node's lines; empty if there is none. A predicate's tensor is
        read once."""
        names: list[str] = []
        for at, (number, wanted) in enumerate(node.predicate):
            key = node.predicate[:at], number
            if key not in self._asked:
                tensor = self._tensor(number, node.reads[number])
                self._asked[key] = f"q{len(self._asked)}"
                known = " and ".join([*names, f"bool({tensor})"])
                self._lines.append(f"{self._asked[key]} = {known}")
            names.append(self._asked[key] if wanted else f"not {self._asked[key]}")
        return f"if {' and '.join(names)}: " if names else ""

    def _state_function(self, verb: str, node: Node) -> str:
        module: Any = torch.cuda if node.device == "cuda" else torch
        return self._name((verb, node.device), getattr(module, f"{verb}_rng_state"))

    def _return(self, node: Node, guard: str, dying: set[int]) -> None:
        assert node.call is not None
        names = ["_" if pair is None else f"v{pair[1]}" for pair in node.outputs]
        operator = None
        if any(v in dying for v in self._graph.ops[node.id].may_reuse):
            operator = in_place.written_in_place(node.call.operator)
        text = self._call(node.call, node.reads, operator=operator)
        is_list = private.returns_list(node.call.operator)
        targets = f"{names[0]}," if len(names) == 1 and is_list else ", ".join(names)
        self._lines.append(f"{guard}{targets} = {text}")
        if "_" in names:
            self._lines.append(f"{guard}_ = None")

    def _write_temporaries(self, node: Node, guard: str, dying: set[int]) -> None:
        assert node.call is not None
        call, given = node.call, {}
        for number, value in node.new.items():
            old = node.old[number]
            if old is None:
                self._lines.append(f"{guard}v{value} = {self._memory(value)}")
            elif old in dying and old not in self._program.sources:
                self._lines.append(f"{guard}v{value} = {self._base(old)}")
            else:
                operator = in_place.without_writes(call.operator)
                is_whole = self._program.is_whole(self._program.canonical(number), old)
                if operator is not None and is_whole and len(node.new) == 1:
                    text = self._call(call, node.reads, operator=operator)
                    self._lines.append(f"{guard}v{value} = {text}")
                    return
                self._lines.append(f"{guard}v{value} = {self._base(old)}.clone()")
            given[number] = self._tensor(number, value)
        self._lines.append(guard + self._call(call, node.reads, given=given))

    def _memory(self, value: int) -> str:
        layout = self._program.layouts[self._program.base(value)]
        return (
            f"torch.empty_strided({layout.shape}, {layout.stride}, "
            f"dtype={self._literal(layout.dtype)}, device={self._literal(layout.device)})"
        )

    # ---------------------------------------------------------------- tensors

    def _base(self, value: int) -> str:
        """Returns the variable name of a whole value."""
        source = self._program.sources.get(value)
        if source is None:
            return f"v{value}"
        if source in self._place_of:
            self.inputs[self._place_of[source]] = None
            return f"p{self._place_of[source]}"
        self.constants[source] = None
        return f"c{source}"

    def _tensor(self, number: int, value: int) -> str:
        """Returns the variable name of a tensor, and makes its view if that does not exist."""
        number = self._program.canonical(number)
        if number not in self._program.recipes or self._program.is_whole(number, value):
            return self._base(value)
        if number not in self._views[value]:
            call, at, parent = self._program.recipes[number]
            text = self._call(call, {}, given={parent: self._tensor(parent, value)})
            several = sum(output is not None for output in call.outputs) > 1
            if several or private.returns_list(call.operator):
                text = f"{text}[{at}]"
            name = self._views[value][number] = f"w{number}_{value}"
            self._lines.append(f"{self._guard_of(value)}{name} = {text}")
        return self._views[value][number]

    # ---------------------------------------------------------------- text

    def _call(
        self,
        call: Call,
        reads: dict[int, int],
        *,
        given: Given | None = None,
        operator: Any = None,
    ) -> str:
        """Returns the text of a call.

        Args:
            reads: number of a tensor → the value it belongs to.
            given: number of a tensor → the variable to use in its place.
            operator: operator to call in the place of the call's own.
        """

        def text(argument: Any) -> str:
            return self._argument(argument, reads, given or {})

        parts = [*map(text, call.args), *(f"{k}={text(v)}" for k, v in call.kwargs.items())]
        run = operator or call.operator
        return f"{self._name(run, private.callable_of(run))}({', '.join(parts)})"

    def _argument(self, argument: Any, reads: dict[int, int], given: Given) -> str:
        if isinstance(argument, Ref):
            if argument.number in given:
                return given[argument.number]
            return self._tensor(argument.number, reads[argument.number])
        if isinstance(argument, Generator):
            tensor = self._tensor(argument.number, reads[argument.number])
            return f"seeded({tensor}, {self._literal(private.device())})"
        if isinstance(argument, Scalar):
            for name, number in argument.symbols:
                tensor = self._tensor(number, reads[number])
                self._lines.append(f"{self._guard_of(reads[number])}{name} = {tensor}.item()")
            return f"({argument.text})"
        if isinstance(argument, (list, tuple)):
            return f"[{', '.join(self._argument(one, reads, given) for one in argument)}]"
        return self._literal(argument)

    def _literal(self, thing: Any) -> str:
        if thing is None or isinstance(thing, (bool, int, float, complex, str)):
            return repr(thing)
        return self._name((type(thing), str(thing)), thing)

    def _name(self, key: Any, thing: Any) -> str:
        """Returns the name of an object in the namespace."""
        if key not in self._names:
            self._names[key] = f"f{len(self._names)}"
            self.namespace[self._names[key]] = thing
        return self._names[key]


def compiled(
    program: Program,
    graph: Graph,
    order: Sequence[int],
    probe: Callable[[int], None] | None = None,
) -> tuple[Callable[[Any], Any], Writer]:
    """Returns the function of an order, and its writer, which knows the function's inputs.

    Args:
        probe: is called with every position, before its op.
    """
    writer = Writer(program, graph, order, is_probed=probe is not None)
    source = writer.write()
    writer.namespace["probe"] = probe
    exec(compile(source, "<rematerialized step>", "exec"), writer.namespace)
    return writer.namespace["step"], writer
