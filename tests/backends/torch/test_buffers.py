"""What torch modules keep from step to step: buffers that are written, replaced, or written by a
normalization whose schema does not say so; and tensors that are left in attributes."""

import random

import keras
import pytest
import torch
from keras import layers
from random_schedules import random_schedule
from torch import nn

import keras_remat
from keras_remat.backends import keras_private
from keras_remat.backends.base import load_backend
from keras_remat.backends.torch.program import writes_unsaid
from keras_remat.backends.torch.recorder import Call
from keras_remat.backends.torch.variables import places_of
from keras_remat.errors import UnsupportedModelError

aten = torch.ops.aten


class Helper:
    """Is no module, and holds a tensor."""

    def __init__(self):
        self.center = torch.zeros(8)


class Module(nn.Module):
    """A layer and a buffer; ``use`` says what is done to its output."""

    def __init__(self, use):
        super().__init__()
        self.use, self.inner = use, nn.Linear(12, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("repeated", torch.arange(8.0).expand(2, 8))
        self.register_buffer("table", torch.zeros(2, 8))
        self.register_buffer("row", self.table[0])
        self.register_buffer("none", torch.empty(0, 3))
        self.normalized = nn.BatchNorm1d(8)
        self.of_series = nn.InstanceNorm1d(2, track_running_stats=True)
        self.last = None
        self.steps, self.has_begun, self.helper, self.gain = 0, False, Helper(), 2.0

    def forward(self, x):
        return self.use(self, torch.relu(self.inner(x)))


def replaces(module, x):
    module.mean = 0.9 * module.mean + 0.1 * x.mean(0).detach()
    return x - module.mean


def normalizes_twice(module, x):
    return module.normalized(torch.tanh(module.normalized(x)))


def normalizes_series(module, x):
    return module.of_series(x.reshape(-1, 2, 4)).flatten(1)


def reads_what_is_expanded(module, x):
    return x * module.repeated[1]


def writes_what_another_buffer_looks_at(module, x):
    with torch.no_grad():
        module.table.add_(x.mean(0))
    return x * torch.sigmoid(3 * module.row)


def looks_up(module, x):
    return nn.functional.embedding((x > 0.5).long(), module.inner.weight, sparse=True)[..., 0]


def sets_for_others_to_see(module, x):
    module.last = x
    return module.last * 2


def registers_late(module, x):
    if "late" not in module._buffers:
        module.register_buffer("late", torch.arange(8.0))
    return x * module.late


def reads_what_was_left(module, x):
    result = x if module.last is None else x + module.last
    module.last = x.detach().mean(0)
    return result


def counts_for_others_to_see(module, x):
    module.steps += 1
    return x


def counts(module, x):
    module.steps += 1
    return x * min(1.0, module.steps / 10)


def begins(module, x):
    if not module.has_begun:
        with torch.no_grad():
            module.mean.copy_(x.mean(0))
        module.has_begun = True
    return x - module.mean


def gains_once(module, x):
    result = x if module.gain is None else module.gain * x
    module.gain = None
    return result


def reads_what_a_helper_was_left(module, x):
    result = x - module.helper.center
    module.helper.center = 0.9 * module.helper.center + 0.1 * x.detach().mean(0)
    return result


def assigns_data(module, x):
    module.mean.data = 0.9 * module.mean.data + 0.1 * x.detach().mean(0)
    return x


def grows(module, x):
    module.mean = torch.cat([module.mean, module.mean])
    return x


class _First(nn.Module):
    """The outputs of a recurrent layer, without its states."""

    def forward(self, results):
        return results[0].flatten(1)


def model_of(use):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((12,))
    module = Module(lambda module, x: x)  # Keras calls it to build the model
    x = keras.layers.TorchModuleWrapper(module, output_shape=(None, 8))(inputs)
    model = keras.Model(inputs, layers.Dense(3)(x))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    data = torch.rand(6, 12), torch.rand(6, 3)
    keras_private.build(model, data)
    module.use = use
    model.make_train_function()
    model.train()
    return model, data


def state(model):
    return [place.tensor.detach().clone() for place in places_of(model).own]


@pytest.mark.parametrize(
    "use",
    [
        replaces,
        normalizes_twice,
        normalizes_series,
        reads_what_is_expanded,
        writes_what_another_buffer_looks_at,
        sets_for_others_to_see,
        counts_for_others_to_see,
        registers_late,
    ],
)
def test_buffers_are_those_of_plain_steps_whatever_runs_again(use):
    model, data = model_of(use)
    backend = load_backend()
    put_back = backend.snapshot(model)
    traced = backend.trace(model, data)
    assert model.layers[1].module.last is None
    assert "late" not in model.layers[1].module._buffers
    for _ in range(2):
        model.train_function([data])
    model.layers[1].module._buffers.pop("late", None)
    expected = state(model)
    problem = keras_remat.Problem(traced.graph, backend.estimated_profile(traced))
    for seed in range(3):
        put_back()
        schedule = random_schedule(random.Random(seed), traced.graph, recompute=0.4)
        keras_remat.validate(problem, schedule)
        run = backend.lower(traced, problem, schedule)
        for _ in range(2):
            run(data)
        assert all(map(torch.equal, expected, state(model)))


def test_a_normalization_may_run_again():
    model, data = model_of(normalizes_twice)
    ops = load_backend().trace(model, data).graph.ops
    assert [op.recomputable for op in ops if "batch_norm" in op.kind] == [True] * 4


@pytest.mark.parametrize(
    ("use", "reason"),
    [
        (reads_what_was_left, r"left in Module\.last.*line .*x \+ module\.last"),
        (reads_what_a_helper_was_left, r"left in Helper\.center.*line .*x - module\.helper"),
        (counts, r"follows from Module\.steps, which it changes in Python"),
        (begins, r"follows from Module\.has_begun, which"),
        (gains_once, r"follows from Module\.gain, which"),
        (assigns_data, r"assigns to the \.data of 'mean'"),
        (grows, r"a tensor of shape \(16,\).*in the place of the buffer 'mean'.*shape \(8,\)"),
        (looks_up, r"layout torch\.sparse_coo.*sparse=True"),
    ],
)
def test_what_no_plan_can_carry_over_to_the_next_step_is_refused(use, reason):
    model, data = model_of(use)
    with pytest.raises(UnsupportedModelError, match=reason):
        load_backend().trace(model, data)
    module = model.layers[1].module
    assert (module.steps, module.has_begun, module.gain) == (0, False, 2.0)
    assert torch.equal(module.helper.center, torch.zeros(8))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("moving", [None, 3])
def test_a_normalization_of_cudnn_that_writes_runs_once(training, moving):
    args = (0, 1, 2, moving, moving, training, 0.1, 1e-3)
    call = Call(aten.cudnn_batch_norm.default, args, {}, (4,), (), "forward", (), 0)
    assert writes_unsaid(call) is (training and moving is not None)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch lacks oneDNN")
@pytest.mark.parametrize(
    ("kind", "is_named"),
    [(lambda: nn.LSTM(4, 4), True), (lambda: nn.LSTM(4, 4, proj_size=2), False),
     (lambda: nn.GRU(4, 4), False)],
)  # fmt: skip
def test_a_kernel_that_is_recorded_as_its_ops_is_named(kind, is_named):
    """Its numbers are those of Keras's own step to the bit, or differ by rounding."""
    keras.utils.set_random_seed(0)
    module = kind()
    inner = nn.Sequential(nn.Linear(12, 8), nn.Unflatten(1, (2, 4)), module, _First())
    width = 2 * (module.proj_size or 4)
    inputs = keras.Input((12,))
    x = keras.layers.TorchModuleWrapper(inner, output_shape=(None, width))(inputs)
    model = keras.Model(inputs, layers.Dense(3)(x))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    data = torch.rand(6, 12), torch.rand(6, 3)
    keras_private.build(model, data)
    model.make_train_function()
    model.train()
    backend = load_backend()
    put_back, traced = backend.snapshot(model), backend.trace(model, data)
    assert [("oneDNN" in text) for text in traced.differences] == [True] * is_named
    model.train_function([data])
    expected = state(model)
    put_back()
    problem = keras_remat.Problem(traced.graph, backend.estimated_profile(traced))
    backend.lower(traced, problem, keras_remat.Schedule.store_all(traced.graph))(data)
    for one, other in zip(expected, state(model), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4 * is_named, atol=1e-6 * is_named)


def test_sparse_gradients_train_plainly():
    """They are counted, too."""
    model, data = model_of(looks_up)
    remat = keras_remat.RematAutotune("8GiB", "keep", verbose=0)
    with pytest.warns(UserWarning, match="sparse_coo"):
        model.fit(*data, batch_size=3, epochs=2, verbose=0, callbacks=[remat])
    assert remat.plan is None
    weight = model.layers[1].module.inner.weight
    assert weight.grad.is_sparse
    counted = load_backend().device
    counted.trains(model)
    indices, values = weight.grad._indices(), weight.grad._values()
    with_gradient = counted.in_use_bytes()
    weight.grad = None
    assert with_gradient - counted.in_use_bytes() == indices.nbytes + values.nbytes
