"""What cuDNN would compute, where a card is planned for and no cuDNN is."""

import warnings

import jax_models as models
import keras
import pytest
from keras import layers

import keras_remat
from keras_remat.backends import keras_private
from keras_remat.backends.jax import JaxBackend, cudnn, private
from keras_remat.backends.jax.trace import trace
from keras_remat.cards.table import card
from keras_remat.errors import UnsupportedModelError


def attending(policy="float32", **options):
    inputs = x = layers.Input((8, 16))
    for _ in range(2):
        x = layers.MultiHeadAttention(2, 8, dtype=policy, **options)(x, x)
    return models.compiled(keras.Model(inputs, layers.Dense(10)(layers.Flatten()(x))))


def test_xla_s_own_is_traced_and_that_is_said():
    asking, plain = attending(flash_attention=True), attending()
    own, other = (
        trace(model, models.batch(model, 4), target=card("T4")) for model in (plain, asking)
    )
    assert own.graph.fingerprint == other.graph.fingerprint
    assert list(keras_private.attention_layers(asking).values()) == [True, True]
    assert cudnn.remark(plain, card("H100")) is None
    told = JaxBackend(card("T4")).check(asking)
    assert "and 1 more" in told
    assert "disable_flash_attention" in told
    half = attending(policy="mixed_bfloat16")
    assert cudnn.remark(half, card("H100")), "Keras would choose cuDNN's there"
    assert cudnn.remark(half, card("T4")) is None


def test_a_plan_says_it(monkeypatch):
    monkeypatch.setattr(JaxBackend, "_compile_bytes", lambda self, problem, schedule: None)
    for asks in (True, False):
        model = attending(flash_attention=asks)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            keras_remat.make_plan(model, 4, card="T4")
        assert any("cuDNN" in str(one.message) for one in said) is asks


def test_what_a_model_s_own_code_asks_for_is_refused():
    class Own(layers.Layer):
        def call(self, x):
            heads = keras.ops.expand_dims(x, 2)
            return keras.ops.dot_product_attention(heads, heads, heads, flash_attention=True)

        def compute_output_shape(self, shape):
            return (*shape[:2], 1, shape[2])

    inputs = layers.Input((8, 16))
    x = layers.Flatten()(Own()(inputs))
    model = models.compiled(keras.Model(inputs, layers.Dense(10)(x)))
    with pytest.raises(UnsupportedModelError, match=r"own code asks for cuDNN.*Leave out"):
        trace(model, models.batch(model, 4), target=card("H100"))


def test_an_lstm_is_traced_as_a_loop_and_that_is_said(monkeypatch):
    inputs = layers.Input((8, 16))
    recurrent = layers.LSTM(4)
    model = models.compiled(keras.Model(inputs, layers.Dense(10)(recurrent(inputs))))
    traced_with = []
    monkeypatch.setattr(
        layers.LSTM,
        "inner_loop",
        lambda self, *args, own=layers.LSTM.inner_loop, **options: (
            traced_with.append(self.use_cudnn) or own(self, *args, **options)
        ),
    )
    trace(model, models.batch(model, 4), target=card("H100"))
    assert set(traced_with) == {False}
    assert recurrent.use_cudnn == "auto", "put back"
    told = cudnn.remark(model, card("H100"))
    assert bool(told and "use_cudnn=False" in told) is private.has_cudnn_lstm()
    recurrent.use_cudnn = False
    assert cudnn.remark(model, card("H100")) is None
