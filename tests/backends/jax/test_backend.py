"""What the backend compiles, how often, and what it makes of a compilation that runs out of
memory."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import jax_models as models
import keras
import pytest

import keras_remat
from keras_remat.backends.base import load_backend, preserved_state
from keras_remat.backends.jax import JaxBackend, LoweredStep, lowering
from keras_remat.backends.jax.measure import added_bytes
from keras_remat.backends.jax.private import state_values
from keras_remat.backends.xla.compiled_memory import RULED_OUT
from keras_remat.cards.table import card
from keras_remat.core.limit import Limit
from keras_remat.core.target import live
from keras_remat.core.writing import Writing
from keras_remat.errors import UnsupportedModelError
from keras_remat.planning.request import PlanRequest, plan_for
from keras_remat.units import MIB


def compiled(temp_bytes):
    sizes = SimpleNamespace(
        argument_size_in_bytes=0,
        output_size_in_bytes=0,
        alias_size_in_bytes=0,
        temp_size_in_bytes=temp_bytes,
    )
    return SimpleNamespace(memory_analysis=lambda: sizes)


@pytest.fixture(scope="module")
def step():
    model = models.mixer(blocks=3, dropout=0)
    backend = load_backend()
    arrays = backend.example_batch(model, models.batch(model, 64))
    return model, arrays


@pytest.mark.parametrize(
    "make", [models.mixer, pytest.param(models.convnet, marks=pytest.mark.slow)]
)
def test_a_plain_step_of_one_size_tells_what_another_takes(make):
    """Near enough for a step that is told to be far over a budget not to be compiled."""
    model, backend = make(), load_backend()
    store_all, budget_bytes = [], None
    for size in (64, 256):
        traced = backend.trace(model, backend.example_batch(model, models.batch(model, size)))
        problem = keras_remat.Problem(traced.graph, backend.estimated_profile(traced, 0))
        schedule = keras_remat.Schedule.store_all(traced.graph)
        told = backend.memory.peak_bytes(problem.with_budget(budget_bytes), schedule)
        store_all.append((told, backend.memory.peak_bytes(problem, schedule)))
        budget_bytes = 1
    (_, _), (told, takes) = store_all
    assert told != takes, "nothing was told: it was compiled"
    assert takes / RULED_OUT < told < RULED_OUT * takes


class Seen(list):
    """What is compiled."""

    def __init__(self):
        super().__init__()
        self.takes = {}


@pytest.fixture
def compiler(monkeypatch):
    """Notes what is compiled; a schedule takes 0.6 of what is alive, or what is said of the way in
    which it is written."""
    seen = Seen()

    def lower(traced, schedule, writing=Writing.STRICT):
        seen.append(writing.name)
        problem = keras_remat.Problem(traced.graph, load_backend().estimated_profile(traced))
        alive = keras_remat.simulate(problem, schedule).peak_bytes - problem.profile.resident_bytes
        return compiled(seen.takes.get(writing, int(0.6 * alive)))

    def lower_plain(traced):
        seen.append("plain")
        return compiled(200 * MIB)

    monkeypatch.setattr(lowering, "lower", lower)
    monkeypatch.setattr(lowering, "lower_plain", lower_plain)
    return seen


def planned(step, budget_bytes=None):
    model, arrays = step
    backend = load_backend()
    traced = backend.trace(model, arrays)
    problem = keras_remat.Problem(
        traced.graph, backend.estimated_profile(traced, backend.device.in_use_bytes())
    )
    resident = problem.profile.resident_bytes
    limit = Limit(budget_bytes or resident + 100 * MIB)
    request = PlanRequest.on(backend, problem=problem, batch_size=1, limit=limit, seconds=5.0)
    return backend, traced, problem, plan_for(request)


LARGE = dict.fromkeys((Writing.LOOSE, Writing.PHASED, Writing.HELD), 200 * MIB)
LITTLE = {Writing.LOOSE: 100 * MIB + 4096}


@pytest.mark.parametrize(
    ("target", "takes", "expected"),
    [
        (live("cpu", "a device"), {}, ["plain", "STRICT"]),
        (live("gpu", "a device"), {}, ["plain", "LOOSE"]),
        (live("gpu", "a device"), LITTLE, ["plain", "LOOSE", "UPDATED"]),
        (live("gpu", "a device"), LARGE, ["plain", "LOOSE", "PHASED", "HELD", "STRICT"]),
    ],
)
def test_before_the_first_step_two_programs_are_compiled(
    step, compiler, monkeypatch, target, takes, expected
):
    """Keras's own, to know its bytes, and the one that runs, with the kernels that run; on a GPU
    strictly only where it does not keep to the limit else, and with early updates only where these
    may be what is over it."""
    monkeypatch.setattr("keras_remat.backends.jax.live_target", lambda: target)
    compiler.takes = takes
    backend, traced, problem, plan = planned(step)
    backend.lower(traced, problem, plan.solution.schedule)
    assert compiler == expected


def test_kernels_of_convolutions_are_no_reason_to_update_early(compiler):
    """With 64 filters they are large; the dense layer's is small."""
    backend, model = JaxBackend(card("H100")), models.convnet(filters=64)
    traced = backend.trace(model, backend.example_batch(model, 8))
    compiler.takes = {Writing.LOOSE: MIB + 4096, Writing.PHASED: MIB}
    lowering.lower_within(traced, keras_remat.Schedule.store_all(traced.graph), MIB)
    assert compiler == ["LOOSE", "PHASED"]


@pytest.mark.parametrize(("name", "second"), [("T4", "UPDATED"), ("H100", "PHASED")])
def test_copies_are_made_late_before_values_are_held(compiler, name, second):
    """Before Ampere cuBLAS reads transposed copies of queries, keys, values and scores."""
    inputs = keras.Input((64, 32))
    attended = keras.layers.MultiHeadAttention(4, 8)(inputs, inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(attended))
    model.compile("sgd", "mse")
    backend = JaxBackend(card(name))
    traced = backend.trace(model, backend.example_batch(model, 8))
    compiler.takes = dict.fromkeys(Writing, MIB) | {Writing.LOOSE: 2 * MIB}
    schedule = keras_remat.Schedule.store_all(traced.graph)
    lowering.lower_within(traced, schedule, int(1.5 * MIB))
    assert compiler == ["LOOSE", second]


def test_large_dense_kernels_are_updated_early_at_once(compiler):
    """Of a small batch their gradients are most of what the step takes."""
    backend, model = JaxBackend(card("T4")), models.mixer(blocks=3, dropout=0)
    traced = backend.trace(model, backend.example_batch(model, 1))
    lowering.lower_within(traced, keras_remat.Schedule.store_all(traced.graph), None)
    assert compiler == ["UPDATED"]


def test_a_schedule_is_written_strictly_once_a_lower_limit_asks_for_it(step, compiler, monkeypatch):
    """Its loose step is known then, and does not keep to that limit."""
    monkeypatch.setattr("keras_remat.backends.jax.live_target", lambda: live("gpu", "a device"))
    compiler.takes = dict.fromkeys((Writing.LOOSE, Writing.PHASED, Writing.HELD), 60 * MIB)
    backend, traced, problem, plan = planned(step)
    schedule, resident = plan.solution.schedule, problem.profile.resident_bytes
    loose = backend.lower(traced, problem.with_budget(plan.budget_bytes), schedule)
    assert compiler == ["plain", "LOOSE"]
    lower = problem.with_budget(resident + 50 * MIB)
    peak = backend.memory.compiled_peak_bytes(lower, schedule)
    strict = backend.lower(traced, lower, schedule)
    assert compiler == ["plain", "LOOSE", "PHASED", "HELD", "STRICT"]
    assert peak <= lower.budget_bytes < plan.predicted.peak_bytes
    assert added_bytes(strict.compiled) == peak - resident
    assert added_bytes(loose.compiled) == 60 * MIB
    again = backend.lower(traced, problem, schedule)
    assert again.compiled is strict.compiled, "no step is compiled twice"


def test_a_compilation_that_runs_out_of_memory_does_not_fit(step, compiler, monkeypatch):
    backend, traced, problem, plan = planned(step)
    assert isinstance(backend.lower(traced, problem, plan.solution.schedule), LoweredStep)

    def lower(traced, schedule, writing=Writing.STRICT):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: while choosing kernels")

    monkeypatch.setattr(lowering, "lower", lower)
    backend = load_backend()
    traced = backend.trace(step[0], step[1])
    peak = backend.memory.compiled_peak_bytes(problem, plan.solution.schedule)
    assert peak > backend.device.total_bytes()
    run = backend.lower(traced, problem, plan.solution.schedule)
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        run(step[1])
    assert backend.is_out_of_memory(caught.value)


def test_a_compilation_that_fails_otherwise_says_so(step, compiler, monkeypatch):
    def lower(traced, schedule, writing=Writing.STRICT):
        raise jax.errors.JaxRuntimeError("INTERNAL: a defect")

    monkeypatch.setattr(lowering, "lower", lower)
    with pytest.raises(UnsupportedModelError, match=r"XLA does not compile .* INTERNAL: a defect"):
        planned(step)


def test_the_same_arrays_in_another_structure_are_trained_by_another_step(step):
    """``train_on_batch`` hands weights of samples over that are none, and ``fit`` does not."""
    model, (x, y) = step
    backend, losses = load_backend(), []
    for batch in ((x, y), (x, y, None)):
        traced = backend.trace(model, batch)
        problem = keras_remat.Problem(traced.graph, backend.estimated_profile(traced))
        run = backend.lower(traced, problem, keras_remat.Schedule.store_all(traced.graph))
        losses.append(float(run(batch)["loss"]))
    assert len(losses) == 2


def test_a_train_function_made_anew_runs_the_step_as_it_is_now():
    """What has changed is a number in the step, which its graph does not tell."""
    model = models.small()
    backend = load_backend()
    batch = backend.example_batch(model, models.batch(model))
    model.make_train_function()
    installed = backend.install(model, SimpleNamespace())

    def loss():
        traced = backend.trace(model, batch)
        problem = keras_remat.Problem(traced.graph, backend.estimated_profile(traced))
        run = backend.lower(traced, problem, keras_remat.Schedule.store_all(traced.graph))
        with preserved_state(backend, model):
            return float(run(batch)["loss"])

    for factor in (1.0, 3.0):
        model.layers[-1].activation = lambda x, factor=factor: x * factor
        model.make_train_function(force=True)
        installed.take_place()
        ours = loss()
        with preserved_state(backend, model):
            model.reset_metrics()
            state = jax.tree.map(jnp.copy, state_values(model))
            logs, _ = jax.jit(lambda *given: model.train_step(*given))(state, batch)
        assert ours == pytest.approx(float(logs["loss"]), rel=1e-5)
    installed.restore()
