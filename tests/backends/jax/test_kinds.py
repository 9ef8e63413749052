"""What XLA does to JAX's operations, by target: rules read in buffer assignments of XLA:GPU."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import jax_models as models
import keras
import numpy as np
import pytest
from keras import layers

from keras_remat.backends.jax import private
from keras_remat.backends.jax.flatten import flatten
from keras_remat.backends.jax.kinds import (
    KERNEL_GRADIENT,
    copied_operands,
    in_softmaxes,
    is_channels_first,
    is_emulated,
    is_of_transposed,
    kinds_of,
    reads_a_copy,
)
from keras_remat.backends.jax.profile import CUBLAS_BYTES, estimated_profile
from keras_remat.backends.jax.trace import trace
from keras_remat.backends.jax.writer import GpuWriter
from keras_remat.cards.table import card
from keras_remat.core.target import live


def test_what_a_convolution_reads_a_copy_of():
    """Of an image that is padded at one side more, and of one whose type a card has no units
    for."""
    even, uneven = {"padding": ((1, 1), (0, 0))}, {"padding": ((0, 1), (1, 1))}
    for name in ("T4", "V100", "H100"):
        assert not reads_a_copy(even, "float16", card(name))
        assert reads_a_copy(uneven, "float16", card(name))
        assert reads_a_copy(even, "bfloat16", card(name)) == (name != "H100")
    assert not is_emulated("bfloat16", live("cpu", "a CPU"))


def test_which_gradients_are_read_as_padded_copies_alone():
    """That of a ReLU behind a convolution that is padded at one side more, however images lie; it
    takes over what cuDNN returned."""
    inputs = layers.Input((8, 8, 4))
    x = layers.Conv2D(4, 3, padding="same", activation="relu")(inputs)
    x = layers.Conv2D(4, 3, 2, padding="same", activation="relu")(x)
    x = layers.Conv2DTranspose(4, 3, 2, padding="same", activation="relu")(x)
    x = layers.Conv2D(4, 3, padding="same")(x)
    outputs = layers.Dense(10)(layers.GlobalAveragePooling2D()(x))
    model = models.compiled(keras.Model(inputs, outputs))
    batch = models.batch(model, 8)

    def found(name):
        traced = trace(model, batch, target=card(name))
        gradients = ops(traced, "select_n", "backward")
        return [op.name for op in gradients if op.may_reuse]

    assert len(found("H100")) == 1
    assert "conv2d_transpose" in found("H100")[0]
    assert found("T4") == found("H100")


def test_what_a_softmax_computes_along():
    """A row's maximum, the exponentials and the sum, where XLA:GPU computes all of a large softmax
    in one kernel."""
    t4, h100 = card("T4"), card("H100")

    def inside(function, size, target, dtype="float32"):
        x = jax.ShapeDtypeStruct((4, size, 64), dtype)
        program = flatten(jax.make_jaxpr(jax.grad(lambda x: jnp.sum(function(x) ** 3)))(x))
        found = in_softmaxes(program, target)
        return sorted(e.kind for e in program.equations if not found.isdisjoint(e.outputs))

    for dtype in ("float32", "bfloat16", "float16"):
        assert inside(jax.nn.softmax, 128, h100, dtype) == ["exp", "reduce_max", "reduce_sum"]
    assert not inside(jax.nn.softmax, 128, t4)
    assert not inside(jax.nn.softmax, 128, live("cpu", "a CPU"))
    assert not inside(jax.nn.softmax, 2, h100), "small"
    assert not inside(lambda x: jax.nn.softmax(x, 1), 128, h100), "of columns"
    assert not inside(lambda x: jnp.exp(x) / jnp.sum(jnp.exp(x), -1, keepdims=True), 128, h100)


def test_where_images_lie_channels_first():
    """What is held lies as convolutions read it."""
    t4, h100 = card("T4"), card("H100")
    assert is_channels_first("float32", t4)
    assert not is_channels_first("float16", t4)
    assert not is_channels_first("float32", h100)
    assert not is_channels_first("float32", live("cpu", "a CPU"))

    def convolved(image):
        return jax.lax.conv(image, jnp.ones((4, 3, 3, 3)), (1, 1), "SAME")

    def multiplied(image):
        return convolved(image) @ jnp.ones((4, 8))

    image = jax.ShapeDtypeStruct((2, 3, 4, 4), "float32")
    for step, target, laid in (
        (convolved, t4, True),
        (multiplied, t4, False),
        (convolved, h100, False),
    ):
        program = flatten(jax.make_jaxpr(step)(image))
        held = jax.make_jaxpr(GpuWriter(program, target).hold)(image)
        assert ("layout_constraint" in str(held)) is laid


def test_a_sum_that_an_update_reads_lies_as_the_weight():
    """Not as what is added up; no other sum is laid in any way."""
    x = jax.ShapeDtypeStruct((8, 4, 16), "float32")
    program = flatten(jax.make_jaxpr(lambda x: jnp.sum(x, 0))(x))
    (total,) = program.outputs
    for gradients, is_laid in (((), False), ((total,), True)):
        writer = GpuWriter(program, card("H100"), gradients)
        written = jax.make_jaxpr(lambda x, writer=writer: writer.write(0, [x]))(x)
        assert ("layout_constraint" in str(written)) is is_laid


@pytest.mark.parametrize(("padding", "size", "strides"), [("SAME", 3, 2), ("VALID", 2, 3)])
def test_the_gradient_of_a_transposed_convolution_s_kernel(padding, size, strides):
    """Written as that of the convolution it transposes, it is the same; no other is."""

    def loss(kernel, image):
        made = jax.lax.conv_transpose(image, kernel, (strides, strides), padding)
        return jnp.sum(jnp.sin(made))

    rng = np.random.default_rng(0)
    kernel = jnp.asarray(rng.normal(size=(size, size, 5, 7)), "float32")
    image = jnp.asarray(rng.normal(size=(3, 4, 5, 5)), "float32")
    program = flatten(jax.make_jaxpr(jax.grad(loss))(kernel, image))
    writer, env = GpuWriter(program, card("H100")), [kernel, image]
    for at, equation in enumerate(program.equations):
        inputs = [env[a] if isinstance(a, int) else a.val for a in equation.inputs]
        results = private.bind(equation.source, inputs)
        env += results
        if equation.kind == KERNEL_GRADIENT:
            assert is_of_transposed(equation.source.params)
            written = jax.jit(lambda *given, at=at: writer.write(at, given))(*inputs)
            np.testing.assert_allclose(written[0], results[0], rtol=1e-4, atol=1e-5)
    assert env[program.outputs[0]].shape == kernel.shape
    strided = jax.make_jaxpr(
        jax.grad(
            lambda k: jnp.sum(jnp.sin(jax.lax.conv(jnp.ones((2, 3, 8, 8)), k, (2, 2), "SAME")))
        )
    )(jnp.ones((4, 3, 3, 3)))
    gradients = [e for e in flatten(strided).equations if e.kind == KERNEL_GRADIENT]
    assert [is_of_transposed(e.source.params) for e in gradients] == [False]


@pytest.fixture(scope="module")
def steps():
    """One step, traced for a CPU and for a card."""
    inputs = layers.Input((16, 16, 8))
    x = layers.Conv2D(16, 3, padding="same", use_bias=False)(inputs)
    x = layers.ReLU()(layers.BatchNormalization()(x))
    pooled = layers.UpSampling2D()(layers.MaxPooling2D()(x))
    x = layers.Concatenate()([x, pooled])
    x = layers.DepthwiseConv2D(3, strides=2, padding="same")(x)
    model = models.compiled(keras.Model(inputs, layers.Dense(10)(layers.Flatten()(x))))
    batch = models.batch(model, 8)
    return [trace(model, batch, target=t) for t in (live("cpu", "a CPU"), card("H100"))]


def ops(traced, kind, phase=None):
    found = [op for op in traced.graph.ops if op.kind == kind and phase in (None, op.phase)]
    assert found, kind
    return found


def test_a_relu_that_pooling_and_concatenation_read_exists_on_a_cpu_only(steps):
    """XLA:GPU takes it into their loops."""
    on_cpu, on_gpu = (
        {v.shape for op in traced.graph.ops if op.kind == "max" for v in outputs(traced, op)}
        for traced in steps
    )
    assert (8, 16, 16, 16) in on_cpu
    assert (8, 16, 16, 16) not in on_gpu


def test_a_sigmoid_with_several_readers_exists_on_a_cpu_only():
    """XLA:GPU computes it again in each of them."""
    inputs = layers.Input((16, 16, 8))
    x = layers.Activation("silu")(layers.Conv2D(16, 3)(inputs))
    model = models.compiled(keras.Model(inputs, layers.Dense(10)(layers.Flatten()(x))))
    batch = models.batch(model, 8)
    on_cpu, on_gpu = (
        {op.kind for op in trace(model, batch, target=target).graph.ops}
        for target in (live("cpu", "a CPU"), card("H100"))
    )
    assert "logistic" in on_cpu
    assert "logistic" not in on_gpu


def outputs(traced, op):
    return [traced.graph.values[v] for v in op.outputs]


def test_nothing_takes_over_what_a_library_returns_in_a_tuple(steps):
    taken = [
        {traced.graph.values[v].producer for op in traced.graph.ops for v in op.may_reuse}
        for traced in steps
    ]
    convolutions = [{op.id for op in ops(t, "conv_general_dilated")} for t in steps]
    assert taken[0] & convolutions[0]
    assert not taken[1] & convolutions[1]


def test_matrix_products_are_a_library_s_before_triton():
    assert "dot_general" in kinds_of(card("T4")).in_tuples
    assert "dot_general" not in kinds_of(card("A100-40")).in_tuples
    assert not kinds_of(live("cpu", "a CPU")).in_tuples


def test_which_operands_of_a_product_cublas_reads_a_copy_of():
    """Those of several heads, which do not lie one behind the other."""

    def attended(query, key, value):
        scores = jnp.einsum("BTNH,BSNH->BNTS", query, key)
        return jnp.einsum("BNTS,BSNH->BTNH", scores, value)

    heads = jax.ShapeDtypeStruct((2, 8, 4, 3), "float32")
    program = flatten(jax.make_jaxpr(attended)(heads, heads, heads))
    t4, h100 = card("T4"), card("H100")
    products = [e for e in program.equations if e.kind == "dot_general"]
    read = [{e.inputs[at] for at in copied_operands(e, t4)} for e in products]
    (scores,) = products[0].outputs
    assert read == [{0, 1}, {2, scores}], "values come first, and are multiplied by scores"
    assert not any(copied_operands(e, h100) for e in program.equations)
    numbers = (((3,), (2,)), ((0, 1), (0, 1)))
    straight = jax.make_jaxpr(lambda x, y: jax.lax.dot_general(x, y, numbers))(
        jnp.ones((2, 4, 8, 3)), jnp.ones((2, 4, 3, 8))
    )
    assert not any(copied_operands(e, t4) for e in flatten(straight).equations)


def test_workspaces_on_a_gpu(steps):
    """A kernel is copied for its convolution, a kernel's gradient once more, pooling's gradient
    has an index per dimension, and a strided depthwise gradient is dilated and padded."""
    traced = steps[1]
    workspace = estimated_profile(traced).op_workspace_bytes
    first, *_ = ops(traced, "conv_general_dilated", "forward")
    assert workspace[first.id] == 3 * 3 * 8 * 16 * 4
    for op in ops(traced, "conv_kernel_gradient"):
        bound = max(traced.graph.values[v].nbytes for v in op.outputs)
        assert workspace[op.id] >= bound
    (pooling,) = ops(traced, "select_and_scatter_add")
    assert workspace[pooling.id] == 4 * 4 * (8 * 8 * 8 * 16)
    product, *_ = ops(traced, "dot_general")
    assert workspace[product.id] == 0, "XLA's own, not cuBLAS's"
    on_t4 = estimated_profile(replace(traced, target=card("T4"))).op_workspace_bytes
    assert on_t4[product.id] == CUBLAS_BYTES
    strided = ops(traced, "conv_general_dilated", "backward")
    assert max(workspace[op.id] for op in strided) >= 8 * 17 * 17 * 32 * 4


def test_the_ops_of_one_element_of_the_jax_that_is_installed_are_known():
    """A new JAX may write an old function with new primitives (0.11.2 the gradient of tanh)."""
    kinds = kinds_of(live("cpu", "a CPU"))
    known = kinds.views | kinds.cheap | kinds.expensive
    functions = (
        jnp.tanh, jax.nn.sigmoid, jax.nn.gelu, jax.nn.silu, jax.nn.softplus, jax.nn.elu,
        jax.scipy.special.erf, jax.scipy.special.erfinv, jax.lax.rsqrt, jnp.sqrt, jnp.cbrt,
        jnp.log1p, jnp.log2, jnp.exp2, jnp.expm1, jnp.sinh, jnp.arctan, jnp.abs, jnp.sign,
        lambda x: x**3, lambda x: jnp.clip(x, 0.1, 0.9), lambda x: jnp.where(x > 0.5, x, -x),
    )  # fmt: skip
    for function in functions:
        gradient = jax.make_jaxpr(jax.vmap(jax.grad(function)))(jnp.full(3, 0.4))
        found = {equation.kind for equation in flatten(gradient).equations}
        assert found <= known, (function, found - known)
