"""Counts operations in the text of a JAX step, before and after XLA's compiler worked on it: a
recomputation that was merged with what it repeats is written, and gone."""

import re

#: Patterns in optimized HLO of an operation, by its name in StableHLO; on a GPU libraries run some.
OPTIMIZED = {
    "dot_general": r"\S* dot\(|.* custom_call_target=\"__cublas\S*",
    "convolution": r"\S* convolution\(|.* custom_call_target=\"__cudnn\$conv\S*",
    "maximum": r"\S* maximum\(",
}
PRODUCTS = ("dot_general", "convolution")


def written(text, name, shape=None):
    """How many operations of a kind stand in StableHLO.

    Args:
        text: ``Lowered.as_text()``.
        name: such as ``"maximum"``.
        shape: of the result; any, if not given.
    """
    lines = [line for line in text.splitlines() if re.search(rf"stablehlo\.{name}\b", line)]
    if shape is None:
        return len(lines)
    of_shape = f"tensor<{'x'.join(map(str, shape))}x"
    return sum(of_shape in re.split(r"->|:", line)[-1] for line in lines)


def left(text, name, shape=None):
    """How many of them stand in the optimized HLO, ``Compiled.as_text()``."""
    of_shape = "" if shape is None else rf"\w+\[{','.join(map(str, shape))}\]"
    return len(re.findall(rf" = {of_shape}(?:{OPTIMIZED[name]})", text))


def drawn(text):
    """How many rounds of random numbers stand in optimized HLO: exclusive ors of large arrays."""
    return len(re.findall(r" = u32\[\d[\d,]{3,}\]\S* xor\(", text))
