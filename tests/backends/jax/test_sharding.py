"""How values lie on devices, guessed from how the inputs lie."""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from keras_remat.backends.jax.flatten import flatten
from keras_remat.backends.jax.sharding import layouts


def test_what_treats_samples_alike_lies_as_they_do_and_a_print_lies_nowhere():
    mesh = Mesh(np.array(jax.devices()[:1]), ("batch",))
    sharding = NamedSharding(mesh, PartitionSpec("batch"))
    given = jax.ShapeDtypeStruct((8, 4), "float32", sharding=sharding)

    def step(x):
        jax.debug.print("{x}", x=x)
        return jax.numpy.exp(x)

    program = flatten(jax.make_jaxpr(step)(given))
    assert any(not equation.outputs for equation in program.equations)
    found = layouts(program, [given], mesh)
    assert found == ((("batch",), None), (("batch",), None))


def test_a_dimension_that_is_left_to_the_compiler_counts_as_whole():
    mesh = Mesh(np.array(jax.devices()[:1]), ("batch",))
    left = PartitionSpec("batch", PartitionSpec.UNCONSTRAINED)
    given = jax.ShapeDtypeStruct((8, 4), "float32", sharding=NamedSharding(mesh, left))

    def step(x):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, left))

    program = flatten(jax.make_jaxpr(step)(given))
    assert layouts(program, [given], mesh) == ((("batch",), None), (("batch",), None))
