"""Names JAX's operations for the model of XLA's fusion (:mod:`keras_remat.backends.xla.fusion`),
and says which of them a target's compiler treats otherwise."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from keras_remat.backends.tables import names
from keras_remat.backends.xla.fusion import HELD_BYTES, Equation, Kinds, on_gpu
from keras_remat.core.target import Target

CONVOLUTION = "conv_general_dilated"
KERNEL_GRADIENT = "conv_kernel_gradient"
"""A ``conv_general_dilated`` that sums over the samples."""

PRODUCT, SCAN = "dot_general", "scan"

IMAGE_RANK = 4
"""Rank of images and of their convolutions' kernels, the values with more than one usual layout."""

KINDS = Kinds(
    views=names("""
        reshape squeeze expand_dims copy copy_p transpose stop_gradient random_wrap random_unwrap
    """),
    cheap=names("""
        abs add add_any and broadcast_in_dim ceil clamp clz complex conj convert_element_type div eq
        eq_to floor ge gt imag integer_pow iota is_finite le le_to lt lt_to max min mul mulhi ne neg
        not one_minus_square or pad real reduce_precision rem rev round select_n shift_left
        shift_right_arithmetic shift_right_logical sign slice square sub xor bitcast_convert_type
        nextafter population_count
    """),
    expensive=names("""
        acos acosh asin asinh atan atan2 atanh cbrt cos cosh digamma erf erf_inv erfc exp exp2 expm1
        lgamma log log1p log2 logistic polynomial pow rsqrt sin sinh sqrt tan tanh
    """),
    reductions=names("""
        reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin
    """),
    random=names("random_bits threefry2x32"),
    moving=names("broadcast_in_dim iota pad rev slice"),
    reshapes=names("reshape"),
    transposing=names(KERNEL_GRADIENT),
)

POOLING_GRADIENT = "select_and_scatter_add"
"""The gradient of max pooling. XLA expands it into a reduction over five arrays of its input's size
and a scatter, which on a CPU all exist."""

POOLING_PIECES = 8
"""Most pieces of the batch in which the gradient of max pooling is lowered on a CPU. Its samples
have nothing to do with each other, so the numbers stay the same to the bit."""


GPU_KINDS = on_gpu(
    KINDS,
    sigmoids=names("logistic"),
    joining=names("concatenate"),
    pooling=names("reduce_window_max reduce_window_min reduce_window_sum"),
    pooling_gradients={POOLING_GRADIENT: 1},
    in_tuples=frozenset({CONVOLUTION, KERNEL_GRADIENT}),
    cut=names("slice"),
)


def kinds_of(target: Target) -> Kinds:
    """Returns the names, grouped by what XLA does to them on a target."""
    if not target.on_gpu:
        return KINDS
    if target.before_ampere:  # cuBLAS returns a tuple, too
        return replace(GPU_KINDS, in_tuples=GPU_KINDS.in_tuples | {PRODUCT})
    return GPU_KINDS


def copied_operands(equation: Equation, target: Target) -> tuple[int, ...]:
    """Returns the positions of a product's operands that cuBLAS reads as a transposed copy.

    If several dimensions number samples, as with several heads, XLA brings the first operand's
    dimensions into the order samples, own, summed, and the second one's into samples, summed, own.
    An operand in another order is copied.

    Args:
        equation: any equation.
        target: the device it will run on.
    """
    if equation.kind != PRODUCT or PRODUCT not in kinds_of(target).in_tuples:
        return ()
    (summed, samples) = equation.source.params["dimension_numbers"]
    if len(samples[0]) < 2:
        return ()
    found = []
    for at, variable in enumerate(equation.source.invars):
        known = {*samples[at], *summed[at]}
        own = [d for d in range(variable.aval.ndim) if d not in known]
        order = [*samples[at], *own, *summed[at]] if at == 0 else [*samples[at], *summed[at], *own]
        if order != sorted(order):
            found.append(at)
    return tuple(found)


def is_emulated(dtype: Any, target: Target) -> bool:
    """Returns whether a GPU has no units for a type. It then computes convolutions and products of
    that type in 32 bits, on copies."""
    return target.before_ampere and str(dtype) == "bfloat16"


def is_channels_first(dtype: Any, target: Target) -> bool:
    """Returns whether XLA:GPU lays images of a type channels first. It does if the card's tensor
    units do not compute convolutions of the type."""
    return target.before_ampere and str(dtype) != "float16"


def holds_images_first(program: Any, target: Target) -> bool:
    """Returns whether images that are held lie channels first, as convolutions read them.

    They do if no product reads or makes an image. A product's rows have channels last, and XLA lays
    all values between products and convolutions in one way. With images held channels first, a plan
    of ConvNeXtTiny for a T4 transposed each image around each product, and moved more than twice
    the bytes.
    """

    def is_image(number: int) -> bool:
        aval = program.avals[number]
        return len(aval.shape) == IMAGE_RANK and is_channels_first(aval.dtype, target)

    products = (e for e in program.equations if e.kind == PRODUCT)
    return target.before_ampere and not any(
        is_image(number) for e in products for number in (*e.reads, *e.outputs)
    )


def kernel_shapes(program: Any) -> frozenset[tuple[int, ...]]:
    """Returns the shapes of convolutions' kernels, and of the gradients of kernels."""
    found = {CONVOLUTION: lambda e: e.inputs[1], KERNEL_GRADIENT: lambda e: e.outputs[0]}
    numbers = (found[e.kind](e) for e in program.equations if e.kind in found)
    return frozenset(program.avals[at].shape for at in numbers if isinstance(at, int))


def is_of_transposed(params: Mapping[str, Any]) -> bool:
    """Returns whether a kernel's gradient is that of a transposed convolution: its image is dilated
    and its gradient is not. A transposed convolution with groups is not recognized."""
    groups = max(params["feature_group_count"], params["batch_group_count"])
    strides = max([*params["window_strides"], *params["rhs_dilation"]], default=1)
    return max(params["lhs_dilation"], default=1) > 1 and groups == strides == 1


def turned(
    params: Mapping[str, Any], image: Sequence[int], gradient: Sequence[int]
) -> dict[str, Any]:
    """Returns the parameters of a kernel's gradient with image and gradient exchanged.

    The gradient then slides over the dilated image, instead of the image over the gradient, and the
    result is reversed.

    Args:
        params: parameters of an equation for which :func:`is_of_transposed` is true.
        image: shape of its first input.
        gradient: shape of its second one.
    """
    numbers, dilation = params["dimension_numbers"], params["lhs_dilation"]
    of_image, of_gradient, of_kernel = numbers
    padding = []
    for (low, high), apart, i, g in zip(
        params["padding"], dilation, of_image[2:], of_gradient[2:], strict=True
    ):
        reach = low + high + (image[i] - 1) * apart + 1 - gradient[g]  # the kernel's size less 1
        padding.append((reach - low, reach - high))
    same = ("window_strides", "feature_group_count", "batch_group_count", "precision")
    return {key: params[key] for key in (*same, "preferred_element_type")} | {
        "padding": tuple(padding),
        "lhs_dilation": (1,) * len(padding),
        "rhs_dilation": dilation,
        "dimension_numbers": numbers._replace(
            lhs_spec=of_gradient,
            rhs_spec=of_image,
            out_spec=(of_kernel[1], of_kernel[0], *of_kernel[2:]),
        ),
    }


def reads_a_copy(params: Mapping[str, Any], dtype: Any, target: Target) -> bool:
    """Returns whether a convolution on a GPU reads a copy of its image: cuDNN pads both sides
    alike, and computes in the card's own types.

    Args:
        params: parameters of the equation.
        dtype: the image's dtype.
        target: the GPU.
    """
    uneven = any(before != after for before, after in params["padding"])
    return uneven or is_emulated(dtype, target)


def padded_operand(
    equation: Equation, avals: Sequence[Any]
) -> tuple[int, Mapping[str, Any]] | None:
    """Returns the operand that a convolution on a GPU reads as a copy because it is padded at one
    side more, and the parameters of its padding; ``None`` if there is none. The input gradient of a
    strided convolution reads no copy."""
    if equation.kind not in (CONVOLUTION, KERNEL_GRADIENT):
        return None
    at, params = 0, equation.source.params
    if equation.kind == KERNEL_GRADIENT and is_of_transposed(params):
        image, gradient = (avals[number].shape for number in equation.reads)
        at, params = 1, turned(params, image, gradient)
    strided = max(params["lhs_dilation"], default=1) > 1
    uneven = any(before != after for before, after in params["padding"])
    return (at, params) if uneven and not strided else None


def read_padded(program: Any, target: Target) -> frozenset[int]:
    """Returns the numbers of values that convolutions read only as padded copies.

    Reductions may read such values, too, because they compute them along. XLA:GPU writes a padded
    copy of what the value is made of. For the gradient of a ReLU, the mask is in memory, a byte for
    an element, and the gradient that it is made of.
    """
    if not target.on_gpu:
        return frozenset()
    padded: set[int] = set()
    others: set[int] = set()
    for equation in program.equations:
        padded_at, _ = padded_operand(equation, program.avals) or (None, {})
        for at, number in enumerate(equation.inputs):
            if isinstance(number, int) and equation.kind not in KINDS.reductions:
                (padded if at == padded_at else others).add(number)
    return frozenset(padded - others)


def in_softmaxes(program: Any, target: Target) -> frozenset[int]:
    """Returns the numbers of values inside large softmaxes that exist nowhere.

    These are a row's maximum, the exponentials, and a row's sum. From Ampere on XLA:GPU computes a
    whole softmax in one kernel, and its gradient in another, both from the scores. If a plan keeps
    a row's maximum or sum, three kernels take the place of the one. Plans of a ViT at the bytes of
    XLA's own pass took 1.17 to 1.18 of plain's time that way, and take 1.11 to 1.12 without
    (``benchmarks/cards.py --peers``). Rows of 16 bits are added up in 32.
    """
    if not target.on_gpu or target.before_ampere:
        return frozenset()
    makers = {out: e for e in program.equations for out in e.outputs}

    def made(number: Any, kind: str, *between: str) -> Equation | None:
        """Returns the equation of a kind that a number comes from."""
        maker = makers.get(number) if isinstance(number, int) else None
        while maker is not None and maker.kind in between:
            maker = makers.get(next(iter(maker.reads), -1))
        return maker if maker is not None and maker.kind == kind else None

    found: set[int] = set()
    for sums in program.equations:
        if sums.kind != "reduce_sum" or not _is_of_rows(sums, program):
            continue
        exponentials = made(sums.inputs[0], "exp", "convert_element_type")
        less = exponentials and made(exponentials.inputs[0], "sub")
        most = less and made(less.inputs[1], "reduce_max", "max", "broadcast_in_dim", *KINDS.views)
        if exponentials and most and _is_of_rows(most, program):
            found.update((sums.outputs[0], exponentials.outputs[0], most.outputs[0]))
    return frozenset(found)


def _is_of_rows(reduction: Equation, program: Any) -> bool:
    """Returns whether a reduction of a large value is over its last dimension."""
    (reduced,) = reduction.inputs
    if not isinstance(reduced, int) or program.sizes[reduced] < HELD_BYTES:
        return False
    return tuple(reduction.source.params["axes"]) == (program.avals[reduced].ndim - 1,)


def pooling_pieces(eqn: Any) -> int:
    """Returns the number of pieces of the batch in which an equation is lowered on a CPU; it is 1
    except for a :data:`POOLING_GRADIENT`."""
    if eqn.primitive.name != POOLING_GRADIENT:
        return 1
    whole = (eqn.params["window_dimensions"][0], eqn.params["window_strides"][0]) == (1, 1)
    alike = whole and tuple(eqn.params["padding"][0]) == (0, 0)
    samples = eqn.invars[0].aval.shape[0]
    return max(n for n in range(1, POOLING_PIECES + 1) if samples % n == 0) if alike else 1
