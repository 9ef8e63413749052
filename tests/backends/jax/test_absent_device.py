"""Steps compiled for a GPU that is not there.

Needs the packages of the extra ``cards``; a machine without them skips what compiles, and says why.
"""

import tempfile
from pathlib import Path

import hlo_text
import jax
import jax_models as models
import keras
import pytest
from assigned_buffers import alive, heap_and_buffers
from keras import layers

from keras_remat.backends.jax import absent_device, hlo, lowering, private, tracing
from keras_remat.backends.jax.measure import added_bytes
from keras_remat.backends.jax.profile import estimated_profile
from keras_remat.backends.jax.trace import trace
from keras_remat.backends.xla.module_costs import costs
from keras_remat.backends.xla.packing import heap_bytes
from keras_remat.backends.xla.protect import Run
from keras_remat.cards.table import card
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate
from keras_remat.core.writing import Writing
from keras_remat.errors import UnsupportedModelError
from keras_remat.solvers import solve
from keras_remat.units import MIB


def mlp():
    """Dense layers and dropout, on a batch much larger than they are."""
    inputs = x = layers.Input((128,))
    for _ in range(5):
        x = layers.Dropout(0.1)(layers.Dense(128, activation="gelu")(x))
    return inputs, layers.Dense(10)(x), 8192


def transformer():
    """Two blocks of attention and dense layers, with dropout."""
    inputs = x = layers.Input((64, 64))
    for _ in range(2):
        h = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(2, 32)(h, h)
        h = layers.Dense(256, activation="gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dropout(0.1)(layers.Dense(64)(h))
    return inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)), 128


def cnn():
    """Convolutions with batch normalization, ReLU, and max pooling."""
    inputs = x = layers.Input((32, 32, 16))
    for _ in range(4):
        x = layers.Conv2D(32, 3, padding="same", use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
    x = layers.Conv2D(32, 3)(layers.MaxPooling2D()(x))
    return inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)), 64


def recurrent():
    """Two recurrent layers, whose results are most of what is held."""
    inputs = x = layers.Input((64, 32))
    x = layers.Dense(64)(layers.LSTM(64, return_sequences=True)(x))
    return inputs, layers.Dense(10)(layers.LSTM(64)(x)), 64


CASES = [
    (recurrent, "float32", "H100"),
    (mlp, "float32", "H100"),
    (transformer, "mixed_bfloat16", "H100"),
    (cnn, "float32", "T4"),
    (cnn, "mixed_bfloat16", "H100"),
]


def built(build, policy):
    """The compiled model, and a batch."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        inputs, outputs, size = build()
        model = models.compiled(keras.Model(inputs, outputs))
    finally:
        keras.config.set_dtype_policy(before)
    return model, models.batch(model, size)


def sizes(memory):
    """The bytes of a compiler's memory analysis."""
    parts = ("argument", "output", "alias", "temp")
    return [getattr(memory, f"{part}_size_in_bytes") for part in parts]


class Step:
    """A step as it is written for a card, and what the compiler left of it."""

    def __init__(self, traced, schedule, writing=Writing.STRICT):
        function = traced.train_step
        if schedule is not None:
            function = lowering.step_function(traced, schedule, writing)
        lowered = absent_device.lowered(function, traced.state_specs, traced.batch_specs)
        self.module = private.bytecode(lowered)
        compiled = absent_device.compiler().compiled(self.module, traced.target)
        self.text, self.optimized = lowered.as_text(), compiled.as_text()
        self.sizes, self.added_bytes = sizes(compiled), compiled.added_bytes


@pytest.mark.card
@pytest.mark.parametrize(("build", "policy", "name"), CASES)
def test_a_step_for_a_card(build, policy, name):
    """It compiles, plain and lowered; what is computed again is left; a limit is worth bytes."""
    model, batch = built(build, policy)
    traced = trace(model, batch, target=card(name))
    problem = Problem(traced.graph, estimated_profile(traced))
    store_all = Schedule.store_all(traced.graph)
    plain, kept = Step(traced, None), Step(traced, store_all)
    resident = problem.profile.resident_bytes
    most = simulate(problem, store_all).peak_bytes - resident
    limit = resident + int(0.6 * min(most, plain.added_bytes))
    tight = solve(problem.with_budget(limit), solver="greedy", time_limit_s=10.0).schedule
    assert tight.recomputed
    again = Step(traced, tight)
    assert again.added_bytes < 0.85 * min(plain.added_bytes, kept.added_bytes)
    draws = [hlo_text.drawn(step.optimized) for step in (plain, kept)]
    assert draws[1] >= draws[0]
    assert (draws[0] > 0) == (build in (mlp, transformer))
    for kind in hlo_text.PRODUCTS:
        more = hlo_text.written(again.text, kind) - hlo_text.written(kept.text, kind)
        left = hlo_text.left(again.optimized, kind) - hlo_text.left(kept.optimized, kind)
        assert left >= more, kind  # more, where a guard keeps the compiler from joining products


def residual():
    """Residual blocks, and between them a convolution whose image is padded at one side more."""
    inputs = layers.Input((64, 64, 8))
    x = layers.Conv2D(16, 3, padding="same")(inputs)
    for strides in (1, 1, 2, 1):
        y = layers.Conv2D(16, 3, strides, padding="same", use_bias=False)(x)
        y = layers.ReLU()(layers.BatchNormalization()(y))
        y = layers.BatchNormalization()(layers.Conv2D(16, 3, padding="same", use_bias=False)(y))
        x = x if strides == 1 else layers.Conv2D(16, 1, strides)(x)
        x = layers.ReLU()(x + y)
    return inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)), 64


def decoder():
    """Transposed convolutions, whose kernels' gradients are no call of cuDNN's as JAX writes
    them."""
    inputs = x = layers.Input((16, 16, 16))
    for filters in (16, 8):
        x = layers.Conv2DTranspose(filters, 3, 2, padding="same", activation="relu")(x)
    return inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)), 64


@pytest.mark.card
@pytest.mark.parametrize(
    ("build", "policy"),
    [(residual, "float32"), (residual, "mixed_bfloat16"), (decoder, "float32")],
)
def test_no_copy_of_an_image_is_kept(build, policy):
    """On a card without units for bfloat16, not in 32 bits either."""
    model, batch = built(build, policy)
    traced = trace(model, batch, target=card("T4"))
    store_all, most = stored(traced)
    assert added_bytes(lowering.lower(traced, store_all)) < 1.05 * most


def attention():
    """Three layers of attention."""
    inputs = x = layers.Input((128, 64))
    for _ in range(3):
        x = x + layers.MultiHeadAttention(4, 16)(x, x)
    return inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)), 64


def stored(traced):
    """The schedule that recomputes nothing, and its simulated bytes above the resident ones."""
    problem = Problem(traced.graph, estimated_profile(traced))
    store_all = Schedule.store_all(traced.graph)
    return store_all, simulate(problem, store_all).peak_bytes - problem.profile.resident_bytes


def planned(traced, share):
    """Returns a schedule for a share of what storing all adds to what is resident, and the bytes
    that it is simulated to add."""
    problem = Problem(traced.graph, estimated_profile(traced))
    resident = problem.profile.resident_bytes
    most = simulate(problem, Schedule.store_all(traced.graph)).peak_bytes - resident
    tight = problem.with_budget(resident + int(share * most))
    order = solve(tight, solver="greedy", time_limit_s=10.0).schedule
    return order, simulate(problem, order).peak_bytes - resident


@pytest.mark.card
def test_copies_of_queries_keys_values_and_scores_are_not_kept():
    """cuBLAS reads transposed ones, on cards where XLA writes no products itself. Where there is
    room for them, they are made in one kernel with what they are copies of. (At 0.4 JAX 0.12 runs a
    product of scores later than JAX 0.11, and takes 15 % more.)"""
    model, batch = built(attention, "float32")
    traced = trace(model, batch, target=card("T4"))
    order, simulated_bytes = planned(traced, 0.35)
    waiting, beside = (Step(traced, order, way) for way in (Writing.UPDATED, Writing.LOOSE))
    assert waiting.added_bytes < 1.08 * simulated_bytes
    assert waiting.added_bytes < beside.added_bytes
    moved = [costs(step.optimized, traced.target.rates).bytes_moved for step in (waiting, beside)]
    assert moved[1] < 0.95 * moved[0]


@pytest.mark.card
def test_a_softmax_is_one_kernel_where_it_runs_again(monkeypatch):
    """Where a row's maximum or sum was kept for it, the one of the forward phase fell apart."""

    def moved():
        traced = trace(*built(attention, "float32"), target=card("H100"))
        order, simulated_bytes = planned(traced, 0.6)
        step = Step(traced, order, Writing.LOOSE)
        assert step.added_bytes < 1.08 * simulated_bytes
        return costs(step.optimized, traced.target.rates).bytes_moved

    whole = moved()
    monkeypatch.setattr(tracing, "in_softmaxes", lambda *of: frozenset())
    assert whole < 0.95 * moved()


def pooled():
    """Two blocks of convolutions and max pooling, and dense layers whose kernels are most of what a
    tight plan holds."""
    inputs = x = layers.Input((32, 32, 3))
    for filters in (32, 64):
        for _ in range(2):
            x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        x = layers.MaxPooling2D()(x)
    x = layers.Dense(2048, activation="relu")(layers.Flatten()(layers.MaxPooling2D(2)(x)))
    return inputs, layers.Dense(10)(layers.Dense(2048, activation="relu")(x)), 64


@pytest.mark.card
def test_gradients_of_dense_kernels_do_not_wait_for_the_end_of_the_step(monkeypatch):
    """Nor does a ReLU that runs again share a kernel with its gradient."""
    model, batch = built(pooled, "float32")
    traced = trace(model, batch, target=card("H100"))
    order, simulated_bytes = planned(traced, 0.6)
    kept = Step(traced, order, Writing.HELD).added_bytes
    assert kept < 1.08 * simulated_bytes
    monkeypatch.setattr(Run, "_overwrites", lambda self, op_id: False)
    assert Step(traced, order, Writing.HELD).added_bytes > 1.1 * kept


def dense():
    """Dense blocks whose kernels are as large as their images."""
    inputs = x = layers.Input((32, 256))
    for _ in range(3):
        y = layers.Dense(1024, activation="gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dense(256)(y)
    return inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)), 32


@pytest.mark.card
def test_updates_that_come_early_spare_gradients_without_a_barrier():
    """What is held beside takes time."""
    traced = trace(*built(dense, "float32"), target=card("H100"))
    order, simulated_bytes = planned(traced, 0.5)
    ways = Writing.LOOSE, Writing.UPDATED, Writing.HELD
    loose, updated, held = (Step(traced, order, way) for way in ways)
    assert updated.added_bytes < 1.02 * simulated_bytes < 0.98 * loose.added_bytes
    seconds = [costs(s.optimized, traced.target.rates).time_s for s in (loose, updated, held)]
    assert seconds == sorted(seconds)


def swish():
    """Convolutions with batch normalization and swish, as of EfficientNet."""
    inputs = x = layers.Input((32, 32, 16))
    for _ in range(4):
        x = layers.Conv2D(32, 3, padding="same", use_bias=False)(x)
        x = layers.Activation("silu")(layers.BatchNormalization()(x))
    return inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)), 64


def inverted_dense():
    """Depthwise convolutions, each before dense layers on channels, as in ConvNeXt."""
    inputs = x = layers.Input((16, 16, 64))
    for _ in range(3):
        y = layers.LayerNormalization()(layers.DepthwiseConv2D(7, padding="same")(x))
        x = x + layers.Dense(64)(layers.Dense(256, activation="gelu")(y))
    return inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)), 64


@pytest.mark.card
@pytest.mark.parametrize(
    ("build", "share", "writing", "most"),
    [(inverted_dense, None, Writing.STRICT, 1.1), (swish, 0.6, Writing.LOOSE, 0.8)],
)
def test_images_are_not_turned(build, share, writing, most):
    """Where convolutions read images channels first, products do not; and what is read to know
    that a value exists, and an image that waits, lie as convolutions read them."""
    traced = trace(*built(build, "float32"), target=card("T4"))
    order = Schedule.store_all(traced.graph) if share is None else planned(traced, share)[0]
    plain, kept = Step(traced, None), Step(traced, order, writing)
    moved = [costs(step.optimized, traced.target.rates).bytes_moved for step in (plain, kept)]
    assert moved[1] < 1.3 * moved[0]
    assert kept.added_bytes < most * plain.added_bytes


@pytest.mark.card
def test_sigmoids_of_swish_are_not_kept():
    model, batch = built(swish, "float32")
    traced = trace(model, batch, target=card("H100"))
    store_all, most = stored(traced)
    assert Step(traced, store_all, Writing.LOOSE).added_bytes < 1.05 * most


@pytest.mark.card
def test_what_is_held_takes_about_the_bytes_of_a_strict_step_and_is_quicker():
    model, batch = built(residual, "float32")
    traced = trace(model, batch, target=card("H100"))
    order, _ = planned(traced, 0.5)
    held, strict = (Step(traced, order, way) for way in (Writing.HELD, Writing.STRICT))
    assert held.added_bytes <= 1.05 * strict.added_bytes
    rates = traced.target.rates
    assert costs(held.optimized, rates).time_s < costs(strict.optimized, rates).time_s


@pytest.mark.card
@pytest.mark.parametrize("build", [recurrent, cnn])
def test_a_compilation_that_is_cut_short_tells_what_a_whole_one_does(build):
    """A process does it that has no device; the whole one needs JAX on a CPU."""
    model, batch = built(build, "float32")
    step = Step(trace(model, batch, target=card("T4")), None)
    assert step.added_bytes > MIB
    assert step.sizes == sizes(hlo.compiled_to_the_end(step.module, card("T4")))


def upsampled():
    """A transposed convolution with a ReLU, whose gradient is the largest value with its image."""
    inputs = layers.Input((32, 32, 16))
    x = layers.Conv2DTranspose(32, 3, 2, padding="same", activation="relu")(inputs)
    x = layers.Conv2D(4, 3, padding="same")(x)
    return inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)), 32


@pytest.mark.card
@pytest.mark.parametrize("name", ["H100", "T4"])
def test_a_gradient_that_padded_convolutions_read_is_not_in_memory(name):
    """Where it was simulated, the step took 24 % less."""
    model, batch = built(upsampled, "float32")
    traced = trace(model, batch, target=card(name))
    store_all, most = stored(traced)
    compiled = added_bytes(lowering.lower(traced, store_all, Writing.LOOSE))
    assert 0.95 * most < compiled < 1.1 * most


def skipping():
    """A net of two levels, whose joined images leave gaps in the heap of a tight plan."""

    def convolutions(x, filters):
        for _ in range(2):
            x = layers.BatchNormalization()(layers.Conv2D(filters, 3, padding="same")(x))
            x = layers.ReLU()(x)
        return x

    inputs = x = layers.Input((32, 32, 3))
    kept = []
    for filters in (16, 32):
        x = convolutions(x, filters)
        kept.append(x)
        x = layers.MaxPooling2D()(x)
    x = convolutions(x, 64)
    for filters in (32, 16):
        x = layers.Concatenate()([layers.UpSampling2D()(x), kept.pop()])
        x = convolutions(x, filters)
    return inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)), 32


@pytest.mark.card
def test_phases_are_kept_apart_in_less_time_than_values_are_held():
    traced = trace(*built(skipping, "float32"), target=card("H100"))
    order, _ = planned(traced, 0.5)
    ways = Writing.LOOSE, Writing.PHASED, Writing.HELD
    loose, phased, held = (Step(traced, order, way) for way in ways)
    assert phased.added_bytes < 0.95 * loose.added_bytes
    seconds = [costs(s.optimized, traced.target.rates).time_s for s in (phased, held)]
    assert seconds[0] < seconds[1]


@pytest.mark.card
def test_the_heap_of_a_step_is_what_its_buffers_are_packed_into(tmp_path):
    model, batch = built(skipping, "float32")
    traced = trace(model, batch, target=card("T4"))
    step = lowering.step_function(traced, planned(traced, 0.45)[0])
    lowered = absent_device.lowered(step, traced.state_specs, traced.batch_specs)
    hlo.compiled_to_the_end(private.bytecode(lowered), card("T4"), tmp_path)
    heap, buffers = heap_and_buffers(tmp_path)
    at_once = max(alive(buffers, 2 * len(buffers)))
    assert at_once < 0.95 * heap, "there are gaps"
    assert heap == pytest.approx(heap_bytes(buffers), rel=0.01)


@pytest.mark.card
def test_what_the_compiler_refuses_is_told():
    with pytest.raises(UnsupportedModelError, match="XLA:GPU does not compile the step"):
        absent_device.compiler().compiled(b"ML\xefR and nothing", card("T4"))


@pytest.mark.parametrize("page", ["", "page 0, "], ids=["JAX 0.10.2", "JAX 0.11.2"])
def test_bytes_are_read_of_what_a_version_writes(tmp_path, page):
    begin = "BufferAssignment:\nallocation 0: size 64, "
    (tmp_path / f"m.{hlo._ASSIGNED}").write_text(
        f"{begin}{page}parameter 0, shape |f32[16]| at ShapeIndex {{}}, maybe-live-out:\n"
        f"allocation 1: size 128, {page}parameter 1, shape |f32[32]| at ShapeIndex {{}}:\n"
        f"allocation 2: size 4, {page}maybe-live-out:\n"
        f"allocation 3: size 4, {page}thread-local:\n"
        f"allocation 4: size 256, {page}preallocated-temp:\n"
    )
    (tmp_path / f"m.{hlo._OPTIMIZED}").write_text("HloModule m\n")
    step = hlo.step_in(tmp_path)
    sizes = step.argument_size_in_bytes, step.output_size_in_bytes, step.alias_size_in_bytes
    assert (*sizes, step.temp_size_in_bytes) == (192, 68, 64, 256)
    assert step.added_bytes == 4 + 256


def test_a_version_that_writes_something_else_is_told(tmp_path):
    with pytest.raises(UnsupportedModelError, match=r"wrote 0 files .*buffer-assignment"):
        hlo.step_in(tmp_path)


def test_a_step_that_calls_python_is_refused_for_a_card():
    def step(state, batch):
        jax.debug.print("{batch}", batch=batch)
        return batch, state

    number = jax.ShapeDtypeStruct((), "float32")
    with pytest.raises(UnsupportedModelError, match=r"jax\.debug\.print"):
        absent_device.lowered(step, number, number)


def test_what_only_a_compiler_reads_is_gone_when_it_has_compiled(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with absent_device.compiler_options() as options:
        assert Path(options["xla_gpu_cuda_data_dir"], "bin", "ptxas").exists()
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "refused",
    ["Couldn't find output tile sizes that satisfy hlo", "a defect", "RESOURCE_EXHAUSTED: tiles"],
)
def test_a_product_that_has_no_tiles_is_left_to_another_library(refused, monkeypatch):
    """Of the net of a ``keras.ops.scan``, XLA compiled no schedule for an H100."""
    given = []

    def compile_module(module, device, options):
        given.append(options["xla_gpu_enable_triton_gemm"] if len(options) > 2 else True)
        if given[-1]:
            raise jax.errors.JaxRuntimeError(f"INTERNAL: {refused}")
        return module

    monkeypatch.setattr(absent_device, "device", lambda target: None)
    monkeypatch.setattr(private, "compile_module", compile_module)
    if "tile sizes" not in refused:
        with pytest.raises(UnsupportedModelError, match=refused):
            hlo.compiled_to_the_end(b"step", card("H100"))
        assert given == [True]
    else:
        assert hlo.compiled_to_the_end(b"step", card("H100")) == b"step"
        assert given == [True, False]
