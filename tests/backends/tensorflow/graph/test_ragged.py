import keras
import numpy as np
import pytest
import tensorflow as tf
from tight_limit import tight_limit

import keras_remat
from keras_remat.backends.tensorflow import backend
from keras_remat.backends.tensorflow.graph.trace import trace

LENGTH, WIDTH = 24, 128
WORDS = [f"w{i}" for i in range(31)]
TEXTS = np.array([" ".join(f"w{i * j % 31}" for j in range(i % 40)) for i in range(32)])
LABELS = np.arange(32) % 4


def reader(**options):
    """A model that reads texts as they are."""
    keras.utils.set_random_seed(0)
    words = keras.layers.TextVectorization(
        output_sequence_length=LENGTH, vocabulary=WORDS, **options
    )
    texts = keras.Input((), dtype="string")
    x = keras.layers.Embedding(200, WIDTH)(words(texts))
    for _ in range(3):
        x = keras.layers.Dense(WIDTH, activation="gelu")(keras.layers.LayerNormalization()(x))
    model = keras.Model(texts, keras.layers.Dense(4)(keras.layers.GlobalMaxPooling1D()(x)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, jit_compile=False)
    return model


def unknown(model, texts=TEXTS):
    """Floating values whose sizes are not known."""
    graph = trace(model, (tf.constant(texts), tf.constant(LABELS))).graph
    return [v for v in graph.values if v.shape is None and "float" in (v.dtype or "")]


@pytest.mark.parametrize("split", ["whitespace", "character"])
def test_padded_text_has_as_many_rows_as_there_are_samples(split):
    assert not unknown(reader(split=split))


def test_text_of_any_length_stays_unknown():
    words = keras.layers.TextVectorization(vocabulary=WORDS)
    texts = keras.Input((), dtype="string")
    embedded = keras.layers.Embedding(200, WIDTH)(words(texts))
    model = keras.Model(texts, keras.layers.GlobalMaxPooling1D()(embedded))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(), jit_compile=False)
    assert unknown(model)


def test_a_model_that_reads_text_trains_under_a_limit_as_without_one():
    data = TEXTS, LABELS
    plain, ours = reader(), reader()
    options = {"batch_size": 32, "epochs": 3, "shuffle": False, "verbose": 0}
    expected = plain.fit(*map(tf.constant, data), **options).history["loss"]
    limit = tight_limit(backend(), ours, tuple(map(tf.constant, data)), 32, 0.6)
    remat = keras_remat.RematAutotune(limit, "keep", solver="greedy", verbose=0)
    losses = ours.fit(*map(tf.constant, data), **options, callbacks=[remat]).history["loss"]
    assert losses == pytest.approx(expected, rel=1e-6)
    assert remat.plan.predicted.peak_bytes < remat.plan.store_all.peak_bytes
    assert remat.plan.predicted.peak_bytes <= limit
