"""Data in every form train as without the callback, on the framework that Keras runs on."""

import keras
import numpy as np
import pytest
import scipy.sparse
from fit_pairs import (
    BATCH,
    ON_TORCH,
    SAMPLES,
    assert_given_back,
    assert_same_state,
    callback,
    small,
)

import keras_remat

# ------------------------------------------------------------------ every way to give data


class Batches(keras.utils.PyDataset):
    def __init__(self, x, y):
        super().__init__()
        self.x, self.y = x, y

    def __len__(self):
        return SAMPLES // BATCH

    def __getitem__(self, at):
        return self.x[BATCH * at : BATCH * (at + 1)], self.y[BATCH * at : BATCH * (at + 1)]


def forever(x, y):
    batches = Batches(x, y)
    while True:
        yield from (batches[at] for at in range(len(batches)))


def tensorflow_data(x, y):
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)


def arrays(x, y, **more):
    return {"x": x, "y": y, "batch_size": BATCH, **more}


DATA = {
    "odd last batch": lambda x, y: arrays(x[:75], y[:75]),
    "PyDataset": lambda x, y: {"x": Batches(x, y)},
    "generator": lambda x, y: {"x": forever(x, y), "steps_per_epoch": 3},
    "sample weights": lambda x, y: arrays(x, y, sample_weight=np.linspace(0, 1, len(y))),
    "class weights and validation": lambda x, y: arrays(
        x, y, class_weight={i: 1.0 + i for i in range(10)}, validation_data=(x, y)
    ),
}
if keras.backend.backend() == "tensorflow":
    DATA |= {
        "tf.data": lambda x, y: {"x": tensorflow_data(x, y)},
        "repeated tf.data": lambda x, y: {
            "x": tensorflow_data(x, y).repeat(),
            "steps_per_epoch": 2,
        },
    }
FORMS = [(form, 1) for form in DATA]
if not ON_TORCH:  # where Keras's trainer takes no other
    FORMS[FORMS.index(("generator", 1))] = "generator", 2
    FORMS.append(("odd last batch", 2))


@pytest.mark.parametrize(("form", "steps_per_execution"), FORMS)
def test_data_in_every_form_trains_as_without_the_callback(
    form, steps_per_execution, over_any_limit
):
    def train(*callbacks):
        model, data = small()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        # not Adam, which makes a whole update of the rounding in a gradient of zero
        rule = keras.optimizers.SGD(0.01, momentum=0.9)
        metrics = ["accuracy"] if form == "odd last batch" else []
        model.compile(rule, loss, metrics=metrics, steps_per_execution=steps_per_execution)
        history = model.fit(
            **DATA[form](*data), epochs=2, verbose=0, shuffle=False, callbacks=list(callbacks)
        ).history
        assert_given_back(model)
        return model, history

    plain, expected = train()
    remat = callback()
    model, history = train(remat)
    assert remat.plan is not None
    for key, values in expected.items():
        assert history[key] == pytest.approx(values, rel=1e-4), key
    assert_same_state(model, plain, rtol=1e-3, atol=2e-5)


# ------------------------------------------------------------------ sparse data

SPARSE = scipy.sparse.random(52, 16, density=0.2, format="csr", random_state=0, dtype="float32")
DENSE = np.linspace(-1, 1, 6 * 52, dtype="float32").reshape(52, 6)
SPARSE_DATA = {
    "among others": {"x": {"sparse": SPARSE, "dense": DENSE}},
    "with weights": {"x": SPARSE, "sample_weight": np.linspace(0, 1, 52, dtype="float32")},
}


@pytest.mark.skipif(ON_TORCH, reason="Keras on PyTorch takes no sparse data")
@pytest.mark.filterwarnings("ignore:__array__ implementation")  # JAX's, as Keras makes it
@pytest.mark.parametrize(
    ("form", "batch_size"),
    [pytest.param("among others", "keep", marks=pytest.mark.slow), ("with weights", "max")],
)
def test_sparse_data_train_as_they_are_and_are_named(form, batch_size, over_any_limit):
    """How many numbers a batch has differs from batch to batch."""

    def train(*callbacks):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((16,), sparse=True, name="sparse")
        x = hidden = keras.layers.Dense(8, "tanh")(inputs)
        if form == "among others":
            others = keras.Input((6,), name="dense")
            x = keras.layers.Concatenate()([hidden, others])
            inputs = {"sparse": inputs, "dense": others}
        model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Dropout(0.2)(x)))
        model.compile("sgd", "mse")
        options = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0}
        fitted = model.fit(y=DENSE[:, :1], callbacks=callbacks, **SPARSE_DATA[form], **options)
        assert_given_back(model)
        return model, fitted.history

    plain, expected = train()
    remat = keras_remat.RematAutotune("8GiB", batch_size, solver="greedy", verbose=0)
    with pytest.warns(UserWarning, match=r"unmodified.*(BCOO|SparseTensor).*dense"):
        model, history = train(remat)
    assert [event.kind for event in remat.report.events] == ["unmodified"]
    assert {key: history[key] for key in expected} == expected
    assert_same_state(model, plain, rtol=0, atol=0)


# ------------------------------------------------------------------ batches without samples


class InBatchesOf(keras.utils.PyDataset):
    """Numbered samples in batches of given sizes."""

    def __init__(self, data, sizes):
        super().__init__()
        self.data, self.sizes = data, sizes

    def __len__(self):
        return len(self.sizes)

    def __getitem__(self, at):
        first = sum(self.sizes[:at])
        return tuple(array[first : first + self.sizes[at]] for array in self.data)


def summed_squares(y_true, y_pred):
    """A loss that is a number without samples, too."""
    return keras.ops.sum(keras.ops.square(y_true - y_pred))


@pytest.mark.parametrize(
    ("batch_size", "sizes", "is_tight"),
    [
        ("keep", (0, 32, 32, 0), False),
        ("keep", (32, 0, 0, 32), False),
        ("max", (32, 0, 32, 32), False),
        (64, (0, 32, 32, 0), False),
        ("keep", (0, 32, 32, 0), True),
        ("keep", (32, 0, 0, 32), True),
    ],
    ids=str,
)
def test_a_batch_without_samples_is_trained_as_keras_trains_it(
    batch_size, sizes, is_tight, request
):
    if is_tight:
        request.getfixturevalue("over_any_limit")

    def trained(*callbacks):
        keras.utils.set_random_seed(0)
        x = np.linspace(-1, 1, 6 * SAMPLES, dtype="float32").reshape(SAMPLES, 6)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.001, momentum=0.9), summed_squares)
        data = InBatchesOf((x, x[:, :1]), sizes)
        history = model.fit(data, epochs=2, verbose=0, shuffle=False, callbacks=list(callbacks))
        return history.history["loss"], model

    remat = keras_remat.RematAutotune("8GiB", batch_size, solver="greedy", verbose=0)
    loss, model = trained(remat)
    assert not [event for event in remat.report.events if event.kind == "unmodified"]
    assert sum(epoch.samples for epoch in remat.report.epochs) == 2 * sum(sizes)
    if batch_size == "keep":
        expected, plain = trained()
        assert (remat.plan is not None) == is_tight
        # XLA may add up in another order
        tolerance = 1e-5 if is_tight and keras.backend.backend() == "jax" else 0.0
        np.testing.assert_allclose(loss, expected, rtol=tolerance)
        assert_same_state(model, plain, rtol=tolerance, atol=tolerance)
