from functools import partial

import hlo_text
import jax
import jax_models as models
import keras
import numpy as np
import pytest
from keras import layers
from random_schedules import forget

from keras_remat.backends.jax import private
from keras_remat.backends.jax.flatten import flatten
from keras_remat.backends.jax.kinds import POOLING_GRADIENT, pooling_pieces
from keras_remat.backends.jax.lower import lower, lower_plain, step_function
from keras_remat.backends.jax.private import state_values
from keras_remat.backends.jax.profile import estimated_profile
from keras_remat.backends.jax.trace import trace
from keras_remat.backends.jax.writer import JaxWriter
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate
from keras_remat.core.target import live
from keras_remat.core.validate import check_rules
from keras_remat.solvers import solve

MODELS = {
    "mixer": partial(models.mixer, blocks=1, optimizer="adam"),
    "convnet": models.convnet,
    "recurrent": models.recurrent,
    "mixed precision": models.mixed_precision,
}


def train(compiled, state, batches):
    losses, state = [], models.copy_state(state)
    for batch in batches:
        logs, state = compiled(state, batch)
        losses.append(float(logs["loss"]))
    return losses, state


@pytest.mark.parametrize(
    "name",
    [*(n for n in MODELS if n != "convnet"), pytest.param("convnet", marks=pytest.mark.slow)],
)
def test_numbers_are_those_of_the_plain_step(name):
    """Five steps, everything recomputed: losses, weights, slots, metrics, seeds and moving
    averages. Of a convnet, the step that is written for a GPU has them in the default run."""
    model = MODELS[name]()
    batches = [models.batch(model, seed=s) for s in range(5)]
    traced = trace(model, batches[0])
    state = state_values(model)
    schedule = forget(traced.graph)
    check_rules(Problem(traced.graph, estimated_profile(traced)), schedule)
    assert schedule.recomputed
    expected, plain_state = train(lower_plain(traced), state, batches)
    losses, remat_state = train(lower(traced, schedule), state, batches)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for group, (a, b) in enumerate(zip(remat_state, plain_state, strict=True)):
        for one, other in zip(a, b, strict=True):
            if np.issubdtype(one.dtype, np.integer):
                np.testing.assert_array_equal(one, other)
            else:
                np.testing.assert_allclose(
                    one, other, rtol=1e-3, atol=1e-4, err_msg=f"state group {group}"
                )


def test_what_is_written_for_a_gpu_computes_the_same():
    """Layouts, barriers, late zeros and guards of kernels: a CPU can run them, too."""
    inputs = layers.Input((16, 16, 3))
    x = layers.MaxPooling2D()(layers.Conv2D(32, 3, padding="same", activation="relu")(inputs))
    h = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(32, 3, padding="same")(x)))
    x = layers.Add()([x, layers.Dropout(0.2)(h)])
    model = models.compiled(keras.Model(inputs, layers.Dense(10)(layers.Flatten()(x))))
    batches = [models.batch(model, seed=s) for s in range(3)]
    traced = trace(model, batches[0], target=live("gpu", "a GPU"))
    schedule = forget(traced.graph)
    step = jax.jit(step_function(traced, schedule), donate_argnums=0)
    text = step.lower(traced.state_specs, traced.batch_specs).as_text()
    assert text.count("@LayoutConstraint") >= 3
    assert text.count("optimization_barrier") >= 1
    state = state_values(model)
    expected, plain_state = train(lower_plain(traced), state, batches)
    losses, remat_state = train(step, state, batches)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for one, other in zip(*map(jax.tree.leaves, (remat_state, plain_state)), strict=True):
        np.testing.assert_allclose(
            np.asarray(one, "float64"), np.asarray(other, "float64"), rtol=1e-3, atol=1e-4
        )


def test_memory_is_saved_and_needs_the_guards(monkeypatch):
    """And store-all takes hardly more than plain: less with JAX 0.10 and 0.11; XLA:CPU of JAX 0.12
    needs a fifth less for the plain step."""
    model = models.mixer(blocks=4, dropout=0)
    traced = trace(model, models.batch(model, 64))
    blocks = {
        op.id
        for op in traced.graph.ops
        if op.phase == "forward" and op.name.split("/")[0].startswith("jvp(add")
    }
    schedule = forget(traced.graph, keep=blocks)
    store_all = models.temp_bytes(lower(traced, Schedule.store_all(traced.graph)))
    assert store_all <= 1.05 * models.temp_bytes(lower_plain(traced))
    assert models.temp_bytes(lower(traced, schedule)) <= 0.75 * store_all
    monkeypatch.setattr("keras_remat.backends.jax.writer.guard", lambda x, condition: x)
    assert models.temp_bytes(lower(traced, schedule)) > 0.9 * store_all


def test_what_is_written_again_is_left_by_the_compiler():
    """A ReLU's cheapest input is the literal 0: its guard must not be folded."""
    inputs = x = layers.Input((128,))
    for _ in range(3):
        x = layers.Dense(128, activation="relu", use_bias=False)(x)
    model = models.compiled(keras.Model(inputs, layers.Dense(10)(x)))
    traced = trace(model, models.batch(model, 64))
    again = {op.id for op in traced.graph.ops if op.phase == "forward" and op.kind == "max"}
    schedule = forget(traced.graph, keep={op.id for op in traced.graph.ops} - again)
    assert len(schedule.recomputed) >= 2
    step = jax.jit(step_function(traced, schedule), donate_argnums=0)
    lowered = step.lower(traced.state_specs, traced.batch_specs)
    text = lowered.compile().as_text()
    for name, shape in (("maximum", (64, 128)), ("dot_general", None)):
        stands = hlo_text.written(lowered.as_text(), name, shape)
        assert hlo_text.left(text, name, shape) == stands > 0, name


@pytest.mark.parametrize(("samples", "pieces"), [(64, 8), (4, 4), (10, 5), (13, 1)])
def test_the_gradient_of_pooling_is_lowered_in_pieces_of_the_batch(samples, pieces):
    """XLA expands it into arrays of its input's size; the numbers stay the same to the bit. A part
    of a batch has few samples, too, and 13 cannot be cut into pieces."""

    def loss(images):
        window = (1, 2, 2, 1)
        pooled = jax.lax.reduce_window(images, -np.inf, jax.lax.max, window, window, "VALID")
        return (pooled**2).sum()

    images = np.random.default_rng(0).normal(size=(samples, 16, 16, 16)).astype("float32")
    program = flatten(jax.make_jaxpr(jax.grad(loss))(images))
    (at,) = (i for i, e in enumerate(program.equations) if e.kind == POOLING_GRADIENT)
    equation = program.equations[at]
    assert pooling_pieces(equation.source) == pieces
    given = images[:, ::2, ::2], images
    whole, cut = (
        jax.jit(write).lower(*given).compile()
        for write in (
            lambda *inputs: private.bind(equation.source, inputs),
            lambda *inputs: JaxWriter(program).write(at, inputs),
        )
    )
    assert (models.temp_bytes(cut) <= 0.65 * models.temp_bytes(whole)) is (pieces > 1)
    np.testing.assert_array_equal(cut(*given)[0], whole(*given)[0])


def test_what_a_loop_writes_into_does_not_exist_before_it(monkeypatch):
    """JAX's zeros would all be made at the beginning, one copy for each result of each loop."""
    model = models.loops()
    traced = trace(model, models.batch(model, 512))
    schedule = forget(traced.graph, {op.id for op in traced.graph.ops if op.kind != "scan"})
    assert len(schedule.recomputed) == 3
    late = models.temp_bytes(lower(traced, schedule))
    monkeypatch.setattr("keras_remat.backends.jax.writer._late_stacks", lambda *_: [])
    assert late <= 0.6 * models.temp_bytes(lower(traced, schedule))


@pytest.mark.slow
def test_sums_that_run_again_exist(monkeypatch):
    """XLA would compute them again in each reader, and keep all that they are made of."""
    model = models.residual()
    traced = trace(model, models.batch(model, 16))
    problem = Problem(traced.graph, estimated_profile(traced))
    resident, most = (
        problem.profile.resident_bytes,
        simulate(problem, Schedule.store_all(traced.graph)).peak_bytes,
    )
    schedule = solve(
        problem.with_budget(resident + int(0.3 * (most - resident))),
        solver="greedy",
        time_limit_s=5.0,
    ).schedule
    pinned = models.temp_bytes(lower(traced, schedule))
    monkeypatch.setattr("keras_remat.backends.xla.protect.Run._pin", lambda *_: None)
    without = models.temp_bytes(lower(traced, schedule))
    assert pinned <= 0.9 * without


def test_mutable_arrays_of_the_step_are_neither_waited_for_nor_guarded():
    """Results that wait for a recomputation come right after the array."""

    def counted(x):
        twice = jax.new_ref(x)
        twice[...] *= 2.0
        return x + jax.lax.stop_gradient(twice[...])

    inputs = layers.Input((8,))
    x = layers.Lambda(counted)(layers.Dense(256, activation="tanh")(inputs))
    model = models.compiled(keras.Model(inputs, layers.Dense(10)(x)))
    batch = models.batch(model)
    traced = trace(model, batch)
    made = next(op.id for op in traced.graph.ops if "ref" in op.kind)
    first = next(op.id for op in traced.graph.ops if op.kind == "tanh")
    order = [op.id for op in traced.graph.ops]
    order.insert(order.index(made) + 1, first)
    steps = lower_plain(traced), lower(traced, Schedule(order))
    (expected, _), (losses, _) = (train(one, state_values(model), [batch]) for one in steps)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_a_nan_gradient_poisons_nothing_it_did_not_poison_before():
    """An infinite target makes the newest gradients NaN; what the plain step keeps finite must stay
    finite."""
    model = models.small()
    model.compile("sgd", "mse")
    x, _ = models.batch(model)
    y = np.zeros((32, 10), "float32")
    y[:, 3] = np.inf
    traced = trace(model, (x, y))
    state = state_values(model)
    _, plain = train(lower_plain(traced), state, [(x, y)])
    _, remat = train(lower(traced, forget(traced.graph)), state, [(x, y)])
    finite = [bool(np.isfinite(a).all()) for a in jax.tree.leaves(plain)]
    assert not all(finite)
    assert [bool(np.isfinite(a).all()) for a in jax.tree.leaves(remat)] == finite


def test_another_structure_is_refused():
    model = models.mixer(1)
    traced = trace(model, models.batch(model))
    with pytest.raises(TypeError, match="traced for"):
        step_function(traced, Schedule.store_all(traced.graph))(
            state_values(model), (np.zeros((32, 32, 64)),)
        )


def test_what_is_printed_is_printed_once_a_step(capfd):
    """A print computes nothing, and everything before it is computed again."""

    def activation(x):
        jax.debug.print("printed")
        jax.debug.print("mean {mean}", mean=x.mean())
        return jax.nn.relu(x)

    model = models.small()
    model.layers[1].activation = activation
    batch = models.batch(model)
    traced = trace(model, batch)
    state = state_values(model)
    schedule = forget(traced.graph)
    check_rules(Problem(traced.graph, estimated_profile(traced)), schedule)
    expected, _ = train(lower_plain(traced), state, [batch] * 2)
    jax.effects_barrier()
    plain = sorted(capfd.readouterr().out.splitlines())
    losses, _ = train(lower(traced, schedule), state, [batch] * 2)
    jax.effects_barrier()
    assert losses == pytest.approx(expected, rel=1e-5)
    printed = sorted(capfd.readouterr().out.splitlines())
    assert [line[:4] for line in printed] == [line[:4] for line in plain]
    assert len(plain) == 4
