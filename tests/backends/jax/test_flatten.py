"""A jaxpr as a flat list of equations: what is inlined, merged, dropped and numbered, and that the
numbers stay the same."""

from contextlib import contextmanager
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from keras_remat.backends.jax import private
from keras_remat.backends.jax.flatten import flatten, nbytes
from keras_remat.backends.jax.kinds import CONVOLUTION, KERNEL_GRADIENT

VECTOR = jax.ShapeDtypeStruct((4,), "float32")


@contextmanager
def remat_primitives(enabled):
    """Has ``jax.checkpoint`` written as what is on its way to being JAX's default."""
    if not enabled:
        yield
        return
    before = jax.config.jax_remat3
    jax.config.update("jax_remat3", True)
    try:
        yield
    finally:
        jax.config.update("jax_remat3", before)


def flat(function, *specs):
    return flatten(jax.make_jaxpr(function)(*(specs or (VECTOR,))))


def kinds(program):
    return [equation.kind for equation in program.equations]


def run(program, *arguments):
    """Runs the equations one after the other; a result must have the next free number."""
    env = [*arguments, *program.constants]

    def read(atom):
        return env[atom] if isinstance(atom, int) else atom.val

    for equation in program.equations:
        results = private.bind(equation.source, [read(a) for a in equation.inputs])
        assert equation.outputs == tuple(range(len(env), len(env) + len(results)))
        env += results
    assert len(env) == len(program.avals)
    return [read(a) for a in program.outputs]


# ------------------------------------------------------------------ calls

WEIGHTS = np.linspace(-1, 1, 16, dtype="float32").reshape(4, 4)


@jax.custom_vjp
def doubled(x):
    return 2.0 * x


doubled.defvjp(lambda x: (2.0 * x, None), lambda _, gradient: (gradient * 2.0,))


@jax.custom_jvp
def tripled(x):
    return 3.0 * x


tripled.defjvp(lambda x, t: (3.0 * x[0], 3.0 * t[0]))


@jax.jit
def compiled(x):
    return jax.jit(jnp.sin)(x @ WEIGHTS) + x


@jax.checkpoint
def remembered(x):
    return jnp.sin(jnp.tanh(x @ WEIGHTS))


CALLS = {
    "jit in jit": compiled,
    "custom_jvp": tripled,
    "custom_vjp": doubled,
    "remat": remembered,
    "all in one": lambda x: remembered(doubled(compiled(tripled(x)))),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_inlined_and_compute_the_same(name):
    function = CALLS[name]
    x = jnp.asarray([0.5, -1.0, 2.0, 0.25])
    traced = jax.make_jaxpr(function)(VECTOR)
    assert {eqn.primitive.name for eqn in traced.eqns} & set(private.CALLS)
    for whole in (function, jax.grad(lambda x: function(x).sum())):
        program = flat(whole)
        assert not set(kinds(program)) & set(private.CALLS)
        np.testing.assert_allclose(run(program, x)[0], whole(x), rtol=1e-6)


def named(x):
    return jnp.cos(checkpoint_name(jnp.sin(jnp.tanh(x @ WEIGHTS)), "kept"))


@pytest.mark.parametrize("as_primitives", [False, True])
def test_what_a_remat_recomputes_is_not_decided_before(as_primitives):
    """As JAX writes it today and with ``jax_remat3``, where barriers hold back what it computes
    again, its names are calls, and what is not differentiated is one."""
    if as_primitives and not hasattr(jax.config, "jax_remat3"):
        pytest.skip("this version of JAX has no jax_remat3")

    def of(block):
        def function(x):
            gradient = jax.grad(lambda x: block(block(x)).sum())(x)
            return gradient, block(x)

        return jax.make_jaxpr(function)(VECTOR)

    with remat_primitives(as_primitives):
        before, inside = of(named), of(jax.checkpoint(named))
    names = {eqn.primitive.name for eqn in inside.eqns}
    assert names & ({private.HIGH_CALL} if as_primitives else set(private.CALLS))
    assert sorted(kinds(flatten(inside))) == sorted(kinds(flatten(before)))
    x = jnp.asarray([0.5, -1.0, 2.0, 0.25])
    for result, wanted in zip(run(flatten(inside), x), run(flatten(before), x), strict=True):
        np.testing.assert_allclose(result, wanted, rtol=1e-6)


def test_a_split_is_slices_where_that_is_asked_for():
    def function(x):
        low, high = jnp.split(x, [1])
        return jnp.sin(low).sum() + high.sum()

    closed = jax.make_jaxpr(function)(VECTOR)
    assert "split" in kinds(flatten(closed))
    program = flatten(closed, as_slices=True)
    assert kinds(program).count("slice") == 2
    x = jnp.asarray([0.5, -1.0, 2.0, 0.25])
    np.testing.assert_allclose(run(program, x)[0], function(x), rtol=1e-6)


def test_a_barrier_of_the_forward_phase_stays():
    program = flat(jax.grad(lambda x: jnp.sin(jax.lax.optimization_barrier(x) * 2.0).sum()))
    assert kinds(program).count("optimization_barrier") == 1


def test_control_flow_is_one_equation_and_carried_whole():
    def loops(x, up):
        x, _ = jax.lax.scan(lambda carry, _: (compiled(carry), None), x, length=3)
        x = jax.lax.while_loop(lambda x: x.sum() < 1.0, lambda x: x + 1.0, x)
        return jax.lax.cond(up, jnp.sin, jnp.cos, x)

    program = flat(loops, VECTOR, jax.ShapeDtypeStruct((), "bool"))
    assert [k for k in kinds(program) if k in ("scan", "while", "cond")] == [
        "scan",
        "while",
        "cond",
    ]
    assert not {"sin", "cos", "dot_general"} & set(kinds(program)), "the bodies stay inside"
    x = jnp.ones(4)
    np.testing.assert_allclose(run(program, x, True)[0], loops(x, True), rtol=1e-6)


def test_an_equation_has_the_scopes_of_its_calls_too():
    @jax.jit
    def inner(x):
        with jax.named_scope("inside"):
            return jnp.sin(x)

    def function(x):
        with jax.named_scope("outside"):
            y = inner(jnp.cos(x))
        return jnp.tanh(inner(y))

    program = flat(function)
    assert [(e.kind, e.scope) for e in program.equations] == [
        ("cos", "outside"),
        ("sin", "outside/inside"),
        ("sin", "inside"),
        ("tanh", ""),
    ]


# ------------------------------------------------------------------ what is dropped


def test_what_no_output_needs_is_dropped():
    def function(x):
        unread = jnp.exp(jnp.tanh(x))
        jnp.log(unread)
        return jnp.sin(x)

    assert kinds(flat(function)) == ["sin"]


def test_one_wanted_output_keeps_the_equation():
    program = flat(lambda x: jax.lax.top_k(x, 2)[1])
    assert kinds(program) == ["top_k"]
    assert program.outputs == (2,)
    assert len(program.avals) == 3, "the output that nobody reads has a number"


def test_an_effect_stays_in_its_place_with_what_it_reads():
    def function(x):
        y = jnp.sin(x)
        jax.debug.callback(lambda _: None, jnp.tanh(y))
        return jnp.cos(y)

    program = flat(function)
    assert kinds(program) == ["sin", "tanh", "debug_callback", "cos"]
    assert [e.has_effect for e in program.equations] == [False, False, True, False]


# ------------------------------------------------------------------ what is merged


def test_equal_equations_are_merged_and_so_are_their_readers():
    program = flat(lambda x: jnp.sin(jnp.tanh(x)) * jnp.cos(jnp.sin(jnp.tanh(x))))
    assert kinds(program) == ["tanh", "sin", "cos", "mul"]


def test_an_output_that_was_merged_is_the_first_one():
    program = flat(lambda x: (jnp.sin(x), jnp.sin(x)))
    assert kinds(program) == ["sin"]
    assert program.outputs == (1, 1)


def test_numbers_drawn_from_a_state_of_the_device_are_drawn_once_each():
    def draw(x):
        first, second = (jax.lax.rng_uniform(0.0, 1.0, x.shape) for _ in range(2))
        return x + first - second

    drawn = [e.has_effect for e in flat(draw).equations if e.kind == "rng_uniform"]
    assert drawn == [True, True]


def test_equal_effects_all_happen():
    def function(x):
        jax.debug.print("{}", x)
        jax.debug.print("{}", x)
        return x

    program = flat(function)
    assert [(e.inputs, e.has_effect) for e in program.equations] == [((0,), True)] * 2


#: Two numbers that NumPy prints alike.
SHORT = np.float32(0.001)
NEXT = np.nextafter(SHORT, np.float32(1))


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (lambda x: x * 2.0, lambda x: x * 2.0, True),
        (lambda x: x * 2.0, lambda x: x * jnp.float32(2), True),
        (lambda x: x * 2.0, lambda x: x * 3.0, False),
        (lambda x: x * 0.0, lambda x: x * -0.0, False),
        (lambda x: x * SHORT, lambda x: x * NEXT, False),
        (lambda x: jax.lax.sub(x, 2.0), lambda x: jax.lax.sub(2.0, x), False),
        (lambda x: jnp.cumsum(x), lambda x: jnp.cumsum(x), True),
        (lambda x: jnp.cumsum(x), lambda x: jax.lax.cumsum(x, reverse=True), False),
        (lambda x: x.astype("int32"), lambda x: x.astype("int8").astype("int32"), False),
        (lambda x: x.reshape(2, 2).sum(0), lambda x: x.reshape(2, 2).sum(1), False),
    ],
)  # fmt: skip
def test_only_what_is_equal_in_every_operand_and_parameter_is_merged(one, other, equal):
    program = flat(lambda x: (one(x), other(x)))
    first, second = program.outputs
    assert (first == second) is equal


def test_literals_are_told_apart_though_they_print_alike():
    with np.printoptions(precision=2):
        program = flat(lambda x: (x * 0.1234, x * 0.1231))
    assert program.outputs == (1, 2)


def test_a_literal_of_another_dtype_is_another_one():
    """Zero is written in the same four bytes in both."""
    zeros = np.zeros((), "float32")[()], np.zeros((), "int32")[()]
    program = flat(lambda x: [jax.lax.broadcast(zero, (4,)) for zero in zeros])
    assert kinds(program) == ["broadcast_in_dim"] * 2


def test_random_numbers_of_one_key_are_drawn_once():
    program = flat(
        lambda key: (jax.random.bits(key, (4,)), jax.random.bits(key, (4,))), jax.random.key(0)
    )
    assert kinds(program).count("random_bits") == 1


@pytest.mark.parametrize(("items", "times"), [((1,), 1), ([1], 2)])
def test_what_cannot_be_hashed_is_not_merged(items, times):
    listed = core.Primitive("listed")
    listed.def_abstract_eval(lambda x, *, items: x)
    closed = jax.make_jaxpr(lambda x: [listed.bind(x, items=(at,)) for at in range(2)])(VECTOR)
    for eqn in closed.eqns:
        eqn.params["items"] = items
    assert kinds(flatten(closed)) == ["listed"] * times


# ------------------------------------------------------------------ kinds


@pytest.mark.parametrize(
    ("layout", "kernel"), [("NHWC", "HWIO"), ("NCHW", "OIHW")]
)  # fmt: skip
def test_only_the_gradient_of_a_convolution_s_kernel_has_a_kind_of_its_own(layout, kernel):
    images = {"N": 2, "C": 3, "H": 8, "W": 8}
    weights = {"H": 3, "W": 3, "I": 3, "O": 5}

    def loss(x, w):
        y = jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=(layout, kernel, layout)
        )
        return (y * y).sum()

    specs = (
        jax.ShapeDtypeStruct([images[d] for d in layout], "float32"),
        jax.ShapeDtypeStruct([weights[d] for d in kernel], "float32"),
    )
    program = flat(jax.grad(loss, (0, 1)), *specs)
    convolutions = [e for e in program.equations if e.source.primitive.name == CONVOLUTION]
    shapes = {e.kind: [] for e in convolutions}
    for equation in convolutions:
        shapes[equation.kind].append(program.describe(equation.outputs[0])[0])
    assert shapes[KERNEL_GRADIENT] == [specs[1].shape]
    assert len(shapes[CONVOLUTION]) == 2, "forwards, and the gradient of the images"


# ------------------------------------------------------------------ numbers


def test_inputs_come_first_then_constants_then_results():
    constant, unread = np.arange(4, dtype="float32"), np.ones(4, "float32")

    def function(x, not_read, y):
        jnp.cos(unread)
        return jnp.sin(x + constant) * (y + constant)

    program = flat(function, VECTOR, VECTOR, VECTOR)
    assert (program.n_inputs, program.n_given) == (3, 4)
    (held,) = program.constants
    np.testing.assert_array_equal(held, constant)
    assert [(e.inputs, e.outputs) for e in program.equations] == [
        ((0, 3), (4,)),
        ((4,), (5,)),
        ((2, 3), (6,)),
        ((5, 6), (7,)),
    ]


def test_constants_of_inlined_calls_are_the_program_s():
    constant = np.arange(4, dtype="float32")
    inner = jax.jit(lambda x: x * constant)
    program = flat(lambda x: inner(x) + jnp.sin(inner(jnp.cos(x))))
    assert len(program.constants) == 1
    x = jnp.ones(4)
    np.testing.assert_allclose(
        run(program, x)[0], constant + np.sin(np.cos(1.0) * constant), rtol=1e-6
    )


def test_an_output_may_be_an_input_a_constant_or_a_literal():
    constant = np.arange(4, dtype="float32")
    program = flat(lambda x, y: (y, constant, 3.0), VECTOR, VECTOR)
    assert program.equations == ()
    assert program.outputs[:2] == (1, 2)
    assert isinstance(program.outputs[2], private.Literal)
    assert program.outputs[2].val == 3.0


# ------------------------------------------------------------------ bytes


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((3, 5), "float32", 60),
        ((3, 5), "bfloat16", 30),
        ((3, 5), "bool", 15),
        ((), "int32", 4),
        ((7, 0), "float32", 0),
    ],
)
def test_bytes_follow_shape_and_dtype(shape, dtype, expected):
    assert nbytes(jax.ShapeDtypeStruct(shape, dtype)) == expected


def test_a_key_has_bytes_too():
    keys = jax.random.split(jax.random.key(0), 3)
    assert nbytes(keys) == jax.random.key_data(keys).nbytes


def test_a_device_holds_its_shard_of_a_value():
    program = flat(lambda x, w: x @ w, jax.ShapeDtypeStruct((8, 4), "float32"),
                   jax.ShapeDtypeStruct((4, 2), "bfloat16"))  # fmt: skip
    assert program.sizes == (128, 16, 64)
    assert replace(program, shards=(4, 1, 4)).sizes == (32, 16, 16)
    assert program.describe(1) == ((4, 2), "bfloat16")
