"""A flat program written by hand, and a framework that writes down what it is told and can run it:
what :mod:`keras_remat.backends.xla` decides is seen without a compiler.

The operations: ``view`` and ``reshape`` are the same bytes, ``add`` is cheap, ``exp`` dear,
``sum`` a reduction, ``random`` draws, ``moved`` is cheap but takes its elements from elsewhere, and
all others (``dot``, ``call``) read and write memory.
"""

import itertools

from keras_remat.backends.xla.fusion import Equation, Kinds

KINDS = Kinds(
    views=frozenset({"view", "reshape"}),
    cheap=frozenset({"add", "moved"}),
    expensive=frozenset({"exp"}),
    reductions=frozenset({"sum"}),
    random=frozenset({"random"}),
    moving=frozenset({"moved"}),
    reshapes=frozenset({"reshape"}),
    transposing=frozenset({"kernel_gradient"}),
)
LARGE = 2**20


class FlatProgram:
    """Equations over numbered values, in the order in which :meth:`add` was called.

    Args:
        given: bytes of what the program is given.
    """

    def __init__(self, *given):
        self.sizes, self.n_given = list(given), len(given)
        self.equations, self.outputs = [], []

    def add(self, kind, *inputs, nbytes=LARGE, outputs=1, scope="", effect=False):
        """Adds an equation; returns the number of its output, or the numbers of several."""
        numbers = tuple(range(len(self.sizes), len(self.sizes) + outputs))
        self.sizes += [nbytes] * outputs
        self.equations.append(Equation(None, kind, scope, inputs, numbers, effect))
        return numbers[0] if outputs == 1 else numbers

    def describe(self, number):
        return (self.sizes[number],), "uint8"

    def returns(self, *outputs):
        self.outputs = list(outputs)
        return self


class Written:
    """A value of :class:`TextWriter`: an expression, and the number it stands for."""

    def __init__(self, text, number):
        self.text, self.number = text, number

    def __repr__(self):
        return self.text


class TextWriter:
    """Writes expressions down, and computes them with integers, so that a wrong operand shows.

    Attributes:
        written: the equations' indices, in the order in which they were written.
        guarded: what was guarded, in order.
    """

    def __init__(self, program, *, uses_branches=False, uses_barriers=False, copied=()):
        self._program, self.uses_branches = program, uses_branches
        self.uses_barriers, self._copied = uses_barriers, dict(copied)
        self.copying = ()
        self.written, self.guarded, self.drawn = [], [], []
        self._fresh = itertools.count(1000)

    def write(self, at, inputs):
        self.written.append(at)
        equation = self._program.equations[at]
        numbers = [x.number for x in inputs]
        text = f"{equation.kind}({', '.join(x.text for x in inputs)})"
        return [
            Written(f"{text}.{i}" if i else text, hash((equation.kind, i, *numbers)))
            for i in range(len(equation.outputs))
        ]

    def may_trigger(self, number):
        return True

    def keeps_layout(self, number):
        return True

    def literal(self, atom):
        return atom

    def array(self, atom):
        return Written(f"array({atom.text})", atom.number)

    def literal_bytes(self, atom):
        return 4

    def is_inexact(self, value):
        return True

    def copied(self, at):
        return self._copied.get(at, ())

    def may_guard(self, equation, value):
        return True

    def never(self, triggers, in_branch=False):
        return Written(f"never({', '.join(t.text for t in triggers)})", 0)

    def guard(self, value, condition):
        self.guarded.append(value.text)
        return Written(f"guard({value.text} | {condition.text})", value.number)

    def guard_made(self, value, condition):
        return self.guard(self.hold(value), condition)

    def hold(self, value):
        return Written(f"hold({value.text})", value.number)

    def draw(self, equations, given, wanted, condition):
        env = dict(given)
        for at in equations:
            equation = self._program.equations[at]
            inputs = [env[a] if isinstance(a, int) else a for a in equation.inputs]
            env.update(zip(equation.outputs, self.write(at, inputs), strict=True))
        self.drawn.append((condition.text, tuple(equations)))
        return [env[number] for number in wanted]
