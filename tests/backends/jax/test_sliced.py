"""Steps in slices on JAX compute what whole ones do, in less memory once they are compiled."""

import jax
import jax.numpy as jnp
import jax_models as models
import keras
import numpy as np
import pytest

from keras_remat.backends.jax import JaxBackend, backend, private
from keras_remat.backends.jax.lower import lower, lower_plain
from keras_remat.backends.jax.measure import added_bytes
from keras_remat.backends.jax.sliced import part_source
from keras_remat.cards.table import card
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.core.slices import Slicing
from keras_remat.planning.slicing import in_micro_batches

PARTS = 2


def head():
    return models.head(192, 4)


def rolled():
    """What is rolled is joined anew, and the gradient of a median goes to one place a row. JAX has
    the axes of both as numbers of NumPy's."""
    inputs = keras.layers.Input((16,))
    x = keras.ops.roll(keras.layers.Dense(32)(inputs), 1, axis=1)
    x = x - keras.ops.median(x, axis=1, keepdims=True)
    return models.compiled(keras.Model(inputs, keras.layers.Dense(10)(x)))


def noisy_loop():
    """A loop that draws noise in every round."""

    def noisy(x):
        def once(x, key):
            return jnp.tanh(x + jax.random.normal(key, x.shape)), None

        return jax.lax.scan(once, x, jax.random.split(jax.random.key(0), 3))[0]

    inputs = keras.layers.Input((8,))
    x = keras.layers.Lambda(noisy)(keras.layers.Dense(16)(inputs))
    return models.compiled(keras.Model(inputs, keras.layers.Dense(10)(x)))


def traced(model, batch, on=None):
    made = on or backend()
    return made.trace(model, made.example_batch(model, batch))


def follow_the_batch(step, samples, parts):
    """The ids of all ops that run in so many slices along the batch."""
    rules = step.slicer.rules
    able = (i for i, r in rules.items() if r.divides and r.divides % samples == 0)
    return tuple(sorted(i for i in able if rules[i].divides % parts == 0))


def compiled(step):
    return lower(step, Schedule.store_all(step.graph))


def cut(value, mode, part):
    if not isinstance(mode, int):
        return value
    return np.split(np.asarray(value), PARTS, mode)[part]


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(models.pooled, marks=pytest.mark.slow),
        models.recurrent,
        head,
        rolled,
        noisy_loop,
    ],
)
def test_each_equation_runs_on_a_part(build):
    """Equation by equation, on what the step computes: parts are parts to the bit, and terms of a
    sum add up to it."""
    made = build()
    model, batch = made if isinstance(made, tuple) else (made, models.batch(made))
    step = traced(model, batch)
    program, slicer = step.program, step.slicer
    env = computed(program, [*jax.tree.leaves((private.state_values(model), batch))])
    found = {}  # one for equations alike
    for one in (
        one for i in slicer.rules for one in slicer.sliced_ops[i].equations if not one.is_whole
    ):
        equation = program.equations[one.at]
        shapes = [str(program.avals[a]) for a, _ in pairs(equation, one)]
        found[equation.kind, *shapes, *one.inputs, *one.outputs] = one
    cuttable = [one for one in found.values() if not in_uneven_parts(program, env, one)]
    calls = []  # of each equation the whole, and its parts
    for one in cuttable:
        equation = program.equations[one.at]
        calls.append((equation.source, inputs_of(equation, env)))
        for part in range(PARTS):
            read = [
                cut(env[a], mode, part) if isinstance(a, int) else a.val
                for a, mode in zip(equation.inputs, one.inputs, strict=True)
            ]
            calls.append((part_source(program, one, PARTS, part), read))
    results = iter(computed_apart(calls))
    for one in cuttable:
        whole, *terms = (next(results) for _ in range(1 + PARTS))
        every = zip(whole, one.outputs, zip(*terms, strict=True), strict=True)
        for value, mode, parts in every:
            check(value, mode, parts, program.equations[one.at].kind)
    kinds = {program.equations[one.at].kind for one in cuttable}
    wanted = {
        models.pooled: {
            "conv_general_dilated", "conv_kernel_gradient", "reduce_window_max",
            "select_and_scatter_add", "reduce_sum",
        },
        models.recurrent: {"scan", "transpose", "random_bits"},
        head: {"gather", "scatter-add", "random_bits", "dot_general"},
        rolled: {"concatenate", "slice", "scatter-add"},
        noisy_loop: {"scan"},
    }[build]  # fmt: skip
    assert wanted <= kinds


def in_uneven_parts(program, env, one):
    """Whether a value that an equation reads or makes is not cut into parts of one size."""
    equation = program.equations[one.at]
    both = [*pairs(equation, one), *zip(equation.outputs, one.outputs, strict=True)]
    return any(isinstance(mode, int) and env[a].shape[mode] % PARTS for a, mode in both)


def computed_apart(calls):
    """What equations compute, each from values of its own: one program, which compiles in a third
    of the time that one for each equation takes."""

    @jax.jit
    def run(given):
        results = []
        for (source, inputs), arrays in zip(calls, map(iter, given), strict=True):
            read = [next(arrays) if hasattr(x, "shape") else x for x in inputs]
            results.append(private.bind(source, read))
        return results

    return run([[x for x in inputs if hasattr(x, "shape")] for _, inputs in calls])


def inputs_of(equation, env):
    return [env[a] if isinstance(a, int) else a.val for a in equation.inputs]


def computed(program, given):
    """All values of a program."""

    @jax.jit
    def run(given):
        env = dict(enumerate([*given, *program.constants]))
        for equation in program.equations:
            made = private.bind(equation.source, inputs_of(equation, env))
            env.update(zip(equation.outputs, made, strict=True))
        return env

    return run(list(map(jnp.asarray, given)))


def pairs(equation, one):
    """The numbered inputs of an equation, and what they are to a part."""
    both = zip(equation.inputs, one.inputs, strict=True)
    return [(a, mode) for a, mode in both if isinstance(a, int)]


def check(whole, mode, parts, kind):
    if isinstance(mode, int):
        joined = np.concatenate(parts, mode)
        if kind in ("scan", "conv_general_dilated"):
            # a loop's body is one program, and a convolution's blocks depend on the batch
            scale = float(np.max(np.abs(whole)))
            np.testing.assert_allclose(joined, whole, rtol=0, atol=1e-6 * scale)
        else:
            np.testing.assert_array_equal(joined, whole)
    elif mode == "sum":
        scale = max(1e-6, float(np.max(np.abs(np.asarray(parts, "float64")), initial=0)))
        np.testing.assert_allclose(sum(map(np.asarray, parts)), whole, rtol=0, atol=2e-6 * scale)


def test_a_step_in_slices_is_the_whole_step_up_to_the_order_of_sums():
    model = models.convnet()
    batch = models.batch(model)
    step, samples = traced(model, batch), len(batch[0])
    sliced = step.slicer.sliced(Slicing(follow_the_batch(step, samples, PARTS), PARTS))
    state = private.state_values(model)
    (logs, ours), (expected, theirs) = (
        compiled(one)(models.copy_state(state), jax.tree.map(jnp.asarray, batch))
        for one in (sliced, step)
    )
    for key in expected:
        np.testing.assert_allclose(logs[key], expected[key], rtol=1e-6)
    for mine, other, first in zip(*map(jax.tree.leaves, (ours, theirs, state)), strict=True):
        if not np.issubdtype(other.dtype, np.floating):
            np.testing.assert_array_equal(mine, other)
            continue
        changed = float(np.max(np.abs(np.asarray(other) - np.asarray(first)), initial=0))
        bound = 1e-5 * changed + 3e-7 * max(1.0, float(np.max(np.abs(other), initial=0)))
        np.testing.assert_allclose(mine, other, rtol=0, atol=bound)


def test_what_depends_on_other_samples_stays_whole():
    """A cumulative sum along the batch, and a sort of it."""
    inputs = keras.Input((8,))
    x = keras.layers.Dense(8)(inputs)
    x = keras.layers.Lambda(lambda x: keras.ops.cumsum(x, 0) + keras.ops.sort(x, 0))(x)
    model = models.compiled(keras.Model(inputs, keras.layers.Dense(10)(x)))
    step = traced(model, models.batch(model, 16))
    named = {op.kind for op in step.graph.ops if op.id in step.slicer.rules}
    assert not named & {"cumsum", "sort"}
    assert "dot_general" in named


@pytest.mark.card
def test_the_head_of_a_language_model_takes_a_fifth_on_a_card():
    model, batch = models.head(32768, 64)
    on = JaxBackend(card("H100"))
    step = traced(model, batch, on)
    problem = Problem(step.graph, on.estimated_profile(step))
    sliced, _ = in_micro_batches(step, problem, 64, 8, on.estimated_profile)
    took = [added_bytes(one) for one in (compiled(sliced), lower_plain(step))]
    assert took[0] <= took[1] / 5
