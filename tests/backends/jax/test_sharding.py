"""How values lie on devices, guessed from how the inputs lie."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from keras_remat.backends.jax.flatten import flatten
from keras_remat.backends.jax.sharding import layouts

MESH = AbstractMesh((4,), ("batch",), axis_types=(AxisType.Auto,))
SAMPLES = ("batch",)


def lying(*shape, spec=("batch",)):
    sharding = NamedSharding(MESH, PartitionSpec(*spec))
    return jax.ShapeDtypeStruct(shape, "float32", sharding=sharding)


def found(step, *given):
    """The program of a step, and how its values lie."""
    program = flatten(jax.make_jaxpr(step)(*given))
    return program, layouts(program, given, MESH)


@pytest.mark.parametrize(
    ("step", "shape", "expected"),
    [
        (jnp.exp, (8, 4), (SAMPLES, None)),
        (jnp.exp, (6, 4), (None, None)),  # four devices cannot have as many samples each
        (jnp.transpose, (8, 4), (None, SAMPLES)),
        (lambda x: x.sum(1), (8, 4), (SAMPLES,)),
        (lambda x: x.sum(0), (8, 4), (None,)),
        (lambda x: x[:, None] + jnp.ones((3, 1)), (8, 4), (SAMPLES, None, None)),
        (lambda x: x.reshape(8, 2, 2), (8, 4), (SAMPLES, None, None)),
        (lambda x: x.T.reshape(2, 2, 8), (8, 4), (None, None, SAMPLES)),
        (lambda x: x.reshape(2, 16), (8, 4), (None, None)),  # of two rows, none is on one device
        (lambda x: x @ jnp.ones((4, 2)), (8, 4), (SAMPLES, None)),
        (lambda x: jnp.ones((2, 4)) @ x.T, (8, 4), (None, SAMPLES)),
        (lambda x: x.T @ x, (8, 4), (None, None)),
        (lambda x: jnp.einsum("bi,bj->bij", x, x), (8, 4), (SAMPLES, None, None)),
        (
            lambda x: jax.lax.conv(x, jnp.ones((5, 4, 3, 3)), (1, 1), "SAME"),
            (8, 4, 6, 6),
            (SAMPLES, None, None, None),
        ),
    ],
)
def test_what_treats_samples_alike_lies_as_they_do(step, shape, expected):
    program, lie = found(step, lying(*shape))
    assert lie[program.outputs[0]] == expected


def test_random_numbers_lie_as_what_reads_them():
    def step(x):
        return x * jax.random.uniform(jax.random.key(0), x.shape)

    program, lie = found(step, lying(8, 4))
    (drawn,) = (e.outputs[0] for e in program.equations if e.kind == "random_bits")
    assert lie[drawn] == (SAMPLES, None)


def test_a_print_lies_nowhere():
    def step(x):
        jax.debug.print("{x}", x=x)
        return jnp.exp(x)

    program, lie = found(step, lying(8, 4))
    assert any(not equation.outputs for equation in program.equations)
    assert lie == ((SAMPLES, None),) * 2


def test_a_dimension_that_is_left_to_the_compiler_counts_as_whole():
    left = PartitionSpec("batch", PartitionSpec.UNCONSTRAINED)

    def step(x):
        return jax.lax.with_sharding_constraint(x, NamedSharding(MESH, left))

    _, lie = found(step, lying(8, 4, spec=left))
    assert lie == ((SAMPLES, None),) * 2
