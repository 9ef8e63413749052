"""Recorded steps are Keras's own to the bit, in any order and with any ops run again; what cannot
be recorded is refused with its line."""

import gc
import random
import weakref

import keras
import numpy as np
import pytest
import torch
import torch_kinds as kinds
import torch_models as models
from keras import layers, ops
from random_schedules import random_schedule
from torch.utils._python_dispatch import TorchDispatchMode

import keras_remat
from keras_remat.backends import keras_private
from keras_remat.backends.base import load_backend
from keras_remat.backends.torch import private
from keras_remat.backends.torch.variables import places_of
from keras_remat.errors import UnsupportedModelError

STEPS = 3


def ready(make):
    """A built model in training, and a batch of tensors; draws without a seed begin anew."""
    model, batch = make()
    data = tuple(map(torch.as_tensor, batch))
    keras_private.build(model, data)
    model.make_train_function()
    model.train()
    torch.manual_seed(3)
    return model, data


def copies(tensors):
    return [torch.as_tensor(t).detach().clone() for t in tensors]


def state(model):
    return copies(place.tensor for place in places_of(model).own)


def assert_same(expected, got):
    assert len(expected) == len(got)
    for one, other in zip(expected, got, strict=True):
        assert torch.equal(one.nan_to_num(7), other.nan_to_num(7))


def traced_step(backend, model, data):
    """The traced step and its problem; the model, and what is drawn next, are what they were."""
    before = state(model), torch.get_rng_state()
    traced = backend.trace(model, data)
    assert_same([*before[0], before[1]], [*state(model), torch.get_rng_state()])
    assert all(weight.value.grad is None for weight in model.trainable_weights)
    return traced, keras_remat.Problem(traced.graph, backend.estimated_profile(traced))


def run_again_at_random(graph, rng, share=0.3):
    """An order in which that share of what an op reads is computed again for it."""
    order, before_writes = [], set()
    for op in graph.ops:
        for producer in sorted(graph.producers(op.id)):
            again = graph.ops[producer].recomputable and producer not in before_writes
            if again and rng.random() < share:
                order.append(producer)
        order.append(op.id)
        before_writes |= set(op.after)  # none of these after this one
    return keras_remat.Schedule(order)


#: A kind of layers, or an optimizer, each.
EQUAL = [
    pytest.param(make, id=name)
    for cases in (models.CASES, kinds.EQUAL)
    for name, make in cases.items()
]


@pytest.mark.parametrize("make", EQUAL)
def test_steps_are_keras_own_to_the_bit(make):
    model, data = ready(make)
    backend = load_backend()
    put_back = backend.snapshot(model)
    logs = [copies(model.train_function([data]).values()) for _ in range(STEPS)]
    expected, drawn = state(model), torch.get_rng_state()
    put_back()
    traced, problem = traced_step(backend, model, data)
    again = run_again_at_random(traced.graph, random.Random(0))
    assert len(again) > len(traced.graph.ops)
    for schedule in (keras_remat.Schedule.store_all(traced.graph), again):
        keras_remat.validate(problem, schedule)
        step = backend.lower(traced, problem, schedule)
        for before in logs:
            assert_same(before, copies(step(data).values()))
        assert_same([*expected, drawn], [*state(model), torch.get_rng_state()])
        put_back()


def test_what_a_step_writes_that_no_model_knows_is_put_back():
    """A counter of a layer's, which is a tensor that nobody has registered."""
    counter = torch.zeros(3)

    def counted(x):
        if x.device.type != "meta":
            counter.add_(1.0)
        return x

    model, data = ready(kinds.of(counted))
    backend, before = load_backend(), counter.clone()
    traced, problem = traced_step(backend, model, data)
    assert torch.equal(counter, before)
    put_back = backend.snapshot(model)
    backend.lower(traced, problem, keras_remat.Schedule.store_all(traced.graph))(data)
    assert torch.equal(counter, before + 1)
    put_back()
    assert torch.equal(counter, before)


def test_what_keras_leaves_in_reference_cycles_is_freed_before_a_planned_step():
    """A batch among it, until Python collects garbage."""
    model, (x, y) = ready(models.CASES["sgd"])
    backend = load_backend()
    traced, problem = traced_step(backend, model, (x, y))
    watch = weakref.ref(x)
    gc.disable()
    try:
        model.train_function([(x, y)])
        del x
        backend.lower(traced, problem, keras_remat.Schedule.store_all(traced.graph))
        assert watch() is None
    finally:
        gc.enable()


def test_any_order_computes_the_same():
    model, data = ready(models.CASES["sgd"])
    backend = load_backend()
    put_back = backend.snapshot(model)
    logs = copies(model.train_function([data]).values())
    expected = state(model)
    put_back()
    traced, problem = traced_step(backend, model, data)
    for seed in range(3):
        schedule = random_schedule(random.Random(seed), traced.graph, recompute=0.05)
        keras_remat.validate(problem, schedule)
        assert_same(logs, copies(backend.lower(traced, problem, schedule)(data).values()))
        assert_same(expected, state(model))
        put_back()


def test_a_batch_of_shapes_alone_is_traced_as_one_of_arrays():
    model, data = ready(models.CASES["sgd"])
    backend = load_backend()
    same, larger = (backend.resized_spec(data, size) for size in (8, 16))
    fingerprint = backend.trace(model, data).graph.fingerprint
    assert backend.trace(model, same).graph.fingerprint == fingerprint
    assert backend.trace(model, larger).graph.fingerprint != fingerprint


def test_a_batch_whose_axes_are_permuted_is_one_without_gaps():
    """Its rows were looked at as one axis, as those of the batch that was recorded."""
    model, (x, y) = ready(models.images())
    backend = load_backend()
    put_back = backend.snapshot(model)
    traced, problem = traced_step(backend, model, (x, y))
    step = backend.lower(traced, problem, keras_remat.Schedule.store_all(traced.graph))
    logs, expected = copies(step((x, y)).values()), state(model)
    put_back()
    permuted = x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
    assert_same(logs, copies(step((permuted, y)).values()))
    assert_same(expected, state(model))


class Kinds(TorchDispatchMode):
    """Notes the kinds of the ops that run."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.add(func.name())
        return func(*args, **(kwargs or {}))


def test_an_image_is_not_copied_to_channels_first_and_back():
    """As Keras's convolutions do; what is copied there for good (by pooling, in newer
    versions of Keras) still is."""
    inner = [lambda filters=n: layers.Conv2D(filters, 3, use_bias=False) for n in (6, 7)]
    model, data = ready(models.images(*inner, lambda: layers.MaxPooling2D(2)))
    graph = load_backend().trace(model, data).graph
    copies = {
        graph.values[op.outputs[0]].shape
        for op in graph.ops
        if op.id in graph.needed and op.kind == "clone.default"
    }
    assert (4, 6, 10, 10) not in copies
    with Kinds() as ran:
        layers.MaxPooling2D(2)(torch.ones(4, 8, 8, 7))
    assert ((4, 7, 8, 8) in copies) == ("aten::clone" in ran.seen)


def test_what_is_written_is_written_once_and_after_all_readers():
    model, data = ready(models.CASES["sgd"])
    traced = load_backend().trace(model, data)
    effects = [op for op in traced.graph.ops if traced.handles[op.id].kind == "effect"]
    assert effects
    assert not any(op.recomputable or op.outputs for op in effects)
    assert any(op.after for op in effects)


# ------------------------------------------------------------------ refusals


OUTSIDE = torch.ones(16, requires_grad=True)


def seeded_anew(x):
    if x.device.type != "meta":
        torch.manual_seed(1)  # it seeds
    return x


def put_back_a_state(x):
    torch.set_rng_state(torch.zeros(5056, dtype=torch.uint8))
    return x


@torch.library.custom_op("keras_remat_tests::moved", mutates_args=("x",))
def moved(x: torch.Tensor) -> torch.Tensor:
    """Writes what it is given, and returns another tensor."""
    x.add_(1)
    return 2 * x


moved.register_fake(torch.empty_like)


def grows_in_place(x):
    if x.device.type != "meta":
        made = torch.empty(0)
        torch.add(x.detach(), 1, out=made)
        x = x + made
    return x


def gets_other_data(x):
    if x.device.type != "meta":
        made = 2 * x.detach()
        made.data = 3 * made.data
        x = x + made
    return x


def branches(x):
    if x.device.type != "meta" and ops.sum(x) > 0:  # the line
        return x
    return -x


@pytest.mark.parametrize(
    ("does", "reason"),
    [
        (branches, "asks in Python for the value.*# the line"),
        (lambda x: x * (1 + bool(ops.max(x) > 0)) if x.device.type != "meta" else x, "asks in"),
        (lambda x: ops.cond(ops.sum(x) > 0, lambda: x, lambda: -x), "differentiated through a"),
        (lambda x: x + torch.rand(1, generator=torch.Generator()) if x.device.type != "meta" else x,
         "torch.Generator of its own"),
        (seeded_anew, r"seeds PyTorch's generator by torch\.manual_seed.*# it seeds"),
        (lambda x: put_back_a_state(x) if x.device.type != "meta" else x, "has not taken down"),
        (lambda x: x + moved(x.detach().clone()) if x.device.type != "meta" else x,
         r"moved\.default, which writes a tensor that it is given and returns another"),
        (lambda x: x + float(f"{ops.mean(x).item():.1f}") if x.device.type != "meta" else x,
         "without memory.*TypeError: unsupported format string"),
        (lambda x: x * OUTSIDE if x.device.type != "meta" else x,
         "no variable of the model"),
        (grows_in_place, r"shape \(0,\) another shape or other memory"),
        (gets_other_data, r"other memory in place.*assignment to \.data"),
        (lambda x: x + torch.ones(16, device="meta") if x.device.type != "meta" else x,
         "tensors of two devices"),
    ],
)  # fmt: skip
def test_what_cannot_be_recorded_is_refused_with_its_line(does, reason):
    model, data = ready(kinds.of(does))
    before = state(model)
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        load_backend().trace(model, data)
    assert "test_trace.py" in str(caught.value) or "no plan can move" in str(caught.value)
    assert_same(before, state(model))


def test_two_types_of_a_memory_that_is_closed_over_are_refused():
    as_integers = kinds.FIRST.view(torch.int32)
    both = kinds.of(lambda x: x * kinds.FIRST + as_integers if x.device.type != "meta" else x)
    model, data = ready(both)
    with pytest.raises(UnsupportedModelError, match=r"one memory, of torch\.int32 and torch"):
        load_backend().trace(model, data)


@pytest.mark.parametrize("case", kinds.REFUSED)
def test_kinds_that_cannot_be_recorded_are_refused(case):
    make, reason = kinds.REFUSED[case]
    model, data = ready(make)
    with pytest.raises(UnsupportedModelError, match=reason):
        load_backend().trace(model, data)


def test_a_script_is_refused():
    keras.utils.set_random_seed(0)
    script = torch.jit.script(torch.nn.Linear(12, 6))
    wrapper = layers.TorchModuleWrapper(script, output_shape=(None, 6))
    model = keras.Sequential([keras.Input((12,)), wrapper, layers.Dense(3)])
    model.compile("sgd", "mse")
    with pytest.raises(UnsupportedModelError, match="TorchScript"):
        load_backend().trace(model, (models.X, models.X[:, :3]))


def test_a_check_runs_once():
    def solved(x):
        if x.device.type == "meta":
            return x
        square = x.T @ x + torch.eye(16, device=x.device)
        return torch.linalg.solve(square, x.T).T + torch.linalg.inv(square)[0]

    model, data = ready(kinds.of(solved))
    ops = load_backend().trace(model, data).graph.ops
    checks = [op for op in ops if "check_errors" in op.kind]
    assert checks
    assert not any(op.recomputable for op in checks)


def test_gradients_that_are_added_up_over_steps_are_refused():
    class Adding(keras.Model):
        def train_step(self, data):
            x, y = data
            loss = self.compute_loss(x=x, y=y, y_pred=self(x))
            loss.backward()
            return {"loss": loss}

    keras.utils.set_random_seed(0)
    inputs = keras.Input((12,))
    model = Adding(inputs, layers.Dense(3, "softmax")(inputs))
    model.compile("sgd", "sparse_categorical_crossentropy")
    data = tuple(map(torch.as_tensor, (models.X, models.LABELS)))
    with pytest.raises(UnsupportedModelError, match="zero_grad"):
        load_backend().trace(model, data)


class Stepping(keras.Model):
    """Its ``update`` has the weights moved once they have gradients."""

    def update(self):
        with torch.no_grad():
            weights = self.trainable_weights
            self.optimizer.apply([weight.value.grad for weight in weights], weights)

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        loss = self.compute_loss(x=x, y=y, y_pred=self(x))
        loss.backward()
        self.update()
        return {"loss": loss}


def stepping(kind):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((12,))
    model = kind(inputs, layers.Dense(3, "softmax")(inputs))
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model, (models.X, models.LABELS)


def test_a_step_that_would_train_nothing_is_refused():
    """PyTorch's optimizer finds no gradients on the weights, in whose place stand-ins are."""

    class Torchs(Stepping):
        def update(self):
            self.second.step()

    model, data = ready(lambda: stepping(Torchs))
    model.second = torch.optim.SGD(list(model.parameters()), lr=0.1)
    with pytest.raises(UnsupportedModelError, match=r"updates no weight.*torch\.optim"):
        load_backend().trace(model, data)


def test_what_a_step_sets_is_not_there_once_it_is_recorded():
    class Remembers(Stepping):
        steps = 0

        def update(self):
            super().update()
            self.steps += 1
            self.kept = self.trainable_weights[0].value.grad

    model, data = ready(lambda: stepping(Remembers))
    load_backend().trace(model, data)
    assert model.steps == 0
    assert not hasattr(model, "kept")
    model.train_step(data)
    assert model.steps == 1
    assert not private.is_fake(model.kept)


def test_a_count_or_a_first_call_is_no_reason_to_refuse_a_step_that_draws_numbers():
    class Autoencoder(keras.Model):
        def __init__(self):
            super().__init__()
            inputs = keras.Input((4,))
            self.net = keras.Model(inputs, layers.Dense(4)(inputs))
            self.seeds = keras.random.SeedGenerator(5)
            self.built, self.steps = True, 0

        def train_step(self, data):
            self.steps += 1
            self.zero_grad()
            noise = keras.random.normal(ops.shape(data[0]), seed=self.seeds)
            loss = ops.mean((self.net(data[0] + noise, training=True) - data[0]) ** 2)
            loss.backward()
            weights = self.trainable_weights
            with torch.no_grad():
                self.optimizer.apply([weight.value.grad for weight in weights], weights)
            return {"loss": loss}

    model = Autoencoder()
    model.compile("adam")
    model.optimizer.build(model.trainable_weights)
    assert load_backend().trace(model, (torch.ones(8, 4),)).graph.ops


def test_losses_that_layers_add_are_those_of_before_the_recording():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((4,))
    model = keras.Model(inputs, layers.Dense(1, activity_regularizer="l2")(inputs))
    model.compile("sgd", "mse")
    batch = torch.ones(8, 4), torch.ones(8, 1)
    model.train_on_batch(*batch)
    before = [float(loss.detach()) for loss in model.losses]
    load_backend().trace(model, batch)
    assert not any(map(private.is_fake, model.losses))
    assert before == [float(loss.detach()) for loss in model.losses] != []


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_numbers_drawn_in_python_are_refused_and_not_drawn(draw, monkeypatch):
    monkeypatch.setattr("keras_remat.backends.torch.trace._other_threads", list)
    model, data = ready(kinds.of(lambda x: x * draw()))
    random.seed(1)
    np.random.seed(1)
    expected = draw()
    random.seed(1)
    np.random.seed(1)
    with pytest.raises(UnsupportedModelError, match=r"by Python's random or by numpy\.random"):
        load_backend().trace(model, data)
    assert draw() == expected
    monkeypatch.setattr("keras_remat.backends.torch.trace._other_threads", lambda: ["a loader's"])
    load_backend().trace(model, data)  # which of them drew is not known


def test_autocast_around_a_fit_is_refused_and_inside_of_a_model_it_is_not():
    def cast(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return ops.cast(x @ torch.ones(16, 16, device=x.device), "float32")

    model, data = ready(kinds.of(cast))
    load_backend().trace(model, data)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(UnsupportedModelError, match="autocast"),
    ):
        load_backend().trace(model, data)


def test_variables_that_a_step_makes_are_refused():
    class Late(keras.Model):
        def train_step(self, data):
            loss = ops.mean(self(data[0]))
            self.zero_grad()
            loss.backward()
            with torch.no_grad():
                self.second.apply([w.value.grad for w in self.trainable_weights],
                                  self.trainable_weights)  # fmt: skip
            return {"loss": loss}

    inputs = keras.Input((12,))
    model = Late(inputs, layers.Dense(3)(inputs))
    model.compile("sgd", "mse")
    model.second = keras.optimizers.Adam()
    with pytest.raises(UnsupportedModelError, match=r"has no variables yet"):
        load_backend().trace(model, tuple(map(torch.as_tensor, (models.X, models.X[:, :3]))))


def test_keras_segment_sums_of_many_rows_are_recorded():
    """Keras repeats the number of each row as often as a product of dimensions says, a tensor."""
    senders, receivers = np.arange(6000) % 5, np.arange(6000) % 3

    class Graph(Stepping):
        def call(self, x, training=None):
            messages = ops.take(super().call(x), senders, axis=0)
            return ops.segment_sum(messages, receivers, num_segments=len(models.X))

    model, data = ready(lambda: stepping(Graph))
    traced, problem = traced_step(load_backend(), model, data)
    run = load_backend().lower(traced, problem, keras_remat.Schedule.store_all(traced.graph))
    other, _ = ready(lambda: stepping(Graph))
    run(data)
    other.train_function([data])
    assert_same(state(other), state(model))


def test_a_layer_that_a_step_would_build_is_refused_and_can_be_built_by_keras_step():
    """A teacher, say, that only the step calls."""

    class Taught(Stepping):
        def train_step(self, data):
            with torch.no_grad():
                self.teacher(data[0])
            return super().train_step(data)

    model, data = ready(lambda: stepping(Taught))
    model.teacher = keras.Sequential([layers.LayerNormalization(), layers.Dense(3)])
    model.teacher.trainable = False
    with pytest.raises(UnsupportedModelError, match=r"has no weights yet.*test_trace\.py"):
        load_backend().trace(model, data)
    model.train_function([data])
    assert len(model.teacher.weights) == 4
    load_backend().trace(model, data)


def test_ops_of_the_forward_phase_are_named_by_their_layers():
    model, data = ready(models.CASES["sgd"])
    traced = load_backend().trace(model, data)
    names = {op.name for op in traced.graph.ops if op.phase == "forward"}
    layer = next(one.name for one in model.layers if isinstance(one, layers.Dense))
    assert any(name.startswith(f"{layer}/") for name in names)
    assert not any("/" in op.kind for op in traced.graph.ops)
