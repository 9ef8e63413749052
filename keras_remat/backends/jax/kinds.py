"""What JAX calls the operations that the model of XLA's fusion
(:mod:`keras_remat.backends.xla.fusion`) knows; tables, no logic."""

from keras_remat.backends.xla.fusion import Kinds

VIEWS = frozenset(
    {
        "reshape",
        "squeeze",
        "expand_dims",
        "copy",
        "copy_p",
        "transpose",
        "stop_gradient",
        "random_wrap",
        "random_unwrap",
    }
)
"""Equations whose result is the same bytes; a transposition is one to a matrix product, which reads
either layout."""

CHEAP = frozenset(
    {
        "abs",
        "add",
        "add_any",
        "and",
        "broadcast_in_dim",
        "ceil",
        "clamp",
        "convert_element_type",
        "div",
        "eq",
        "floor",
        "ge",
        "gt",
        "imag",
        "integer_pow",
        "iota",
        "is_finite",
        "le",
        "lt",
        "max",
        "min",
        "mul",
        "ne",
        "neg",
        "not",
        "or",
        "pad",
        "real",
        "reduce_precision",
        "rem",
        "rev",
        "round",
        "select_n",
        "shift_left",
        "shift_right_arithmetic",
        "shift_right_logical",
        "sign",
        "slice",
        "square",
        "sub",
        "xor",
        "bitcast_convert_type",
        "nextafter",
        "population_count",
    }
)
"""Fusible, and copied into every reader."""

EXPENSIVE = frozenset(
    {
        "acos",
        "acosh",
        "asin",
        "asinh",
        "atan",
        "atan2",
        "atanh",
        "cbrt",
        "cos",
        "cosh",
        "digamma",
        "erf",
        "erf_inv",
        "erfc",
        "exp",
        "exp2",
        "expm1",
        "lgamma",
        "log",
        "log1p",
        "logistic",
        "pow",
        "rsqrt",
        "sin",
        "sinh",
        "sqrt",
        "tan",
        "tanh",
    }
)
"""Fusible, but computed once per reader only when there is one reader."""

REDUCTIONS = frozenset(
    {
        "reduce_sum",
        "reduce_max",
        "reduce_min",
        "reduce_prod",
        "reduce_and",
        "reduce_or",
        "argmax",
        "argmin",
    }
)
"""They take their input into their own loop, but their result exists."""

RANDOM = frozenset({"random_bits", "threefry2x32"})
"""Fusible like an expensive one. On CPU each is a loop over several buffers of the result's
size."""

CONVOLUTION = "conv_general_dilated"
KERNEL_GRADIENT = "conv_kernel_gradient"
"""A ``conv_general_dilated`` that sums over the samples."""

KINDS = Kinds(
    views=VIEWS,
    cheap=CHEAP,
    expensive=EXPENSIVE,
    reductions=REDUCTIONS,
    random=RANDOM,
    moving=frozenset({"broadcast_in_dim", "iota", "pad", "rev", "slice"}),
    reshapes=frozenset({"reshape"}),
    transposing=frozenset({KERNEL_GRADIENT}),
)
