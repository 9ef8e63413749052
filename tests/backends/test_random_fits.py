"""Random combinations of Keras's features, each trained plainly and with ``RematAutotune``.

With the batches kept, samples, order, losses, ``History``, weights and the number of slots have to
be the plain fit's. With other batch sizes, the samples and their order have to be. In all, the
model comes back as a plain fit leaves it.
"""

import copy
import pickle
import random
import warnings
from collections import namedtuple
from collections.abc import Mapping

import keras
import numpy as np
import pytest

import keras_remat
from keras_remat.reporting.fit_report import LOG_KEYS

#: Room for the numbers of all samples that one fit trains; numbers from here on are a guest's.
ROOM, GUEST = 2000, 900
ON_JAX = keras.backend.backend() == "jax"
IN_ALL = 100 if ON_JAX else 200


class Diary(keras.layers.Layer):
    """Writes down the number of every sample that is trained, in order."""

    def build(self, shape):
        self.numbers = self.add_weight(shape=(ROOM,), initializer="zeros", trainable=False)
        self.count = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)

    def call(self, numbers, training=False):
        if training:
            ones = keras.ops.ones_like(numbers[:, 0], dtype="int32")
            at = self.count + keras.ops.cumsum(ones) - 1
            self.numbers.assign(keras.ops.scatter_update(self.numbers, at[:, None], numbers[:, 0]))
            self.count.assign(self.count + keras.ops.sum(ones))
        return numbers / 1000.0

    @property
    def entries(self):
        count = int(keras.ops.convert_to_numpy(self.count))
        return keras.ops.convert_to_numpy(self.numbers)[:count].astype(int).tolist()


def by_name(things):
    return {str(at): one for at, one in enumerate(things)}


#: How a model holds its layers and variables.
CONTAINERS = {
    "list": list,
    "dict": by_name,
    "tuple": tuple,
    "named tuple": lambda things: namedtuple("Things", list("pqrs"[: len(things)]))(*things),
    "nested": lambda things: {"first": (things[0],), "rest": [by_name(things[1:])]},
}
#: What may be done to a callback before it is used.
COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda one: pickle.loads(pickle.dumps(one)),
}


class Held(keras.Model):
    """Holds its layers and variables in containers; built by its first call."""

    def __init__(self, container, dropout):
        super().__init__()
        self.diary, make = Diary(name="diary"), CONTAINERS[container]
        hidden = keras.layers.Dense(6, activation="tanh")
        self.blocks = make([hidden, keras.layers.Dropout(dropout), keras.layers.Dense(1)])
        self.scales = make([self.add_weight(initializer="ones", name=name) for name in "ab"])

    def call(self, numbers, training=False):
        x = self.diary(numbers, training=training)
        for block in _things_in(self.blocks):
            x = block(x)
        for scale in _things_in(self.scales):
            x = scale * x
        return x


class UpdatesAPart(Held):
    """Has a train step of its own, which leaves some trainable variables alone."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.mean_loss = keras.metrics.Mean(name="mean_loss")

    def train_step(self, *given):
        return self._on_jax(*given) if ON_JAX else self._on_tensorflow(*given)

    def _on_tensorflow(self, data):
        import tensorflow as tf

        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=weight)
        chosen = self.trainable_variables[1:]
        self.optimizer.apply(tape.gradient(loss, chosen), chosen)
        self.mean_loss.update_state(loss, sample_weight=tf.shape(x)[0])
        metrics = self.compute_metrics(x, y, y_pred, sample_weight=weight)
        return metrics | {"loss": self.mean_loss.result()}

    def _on_jax(self, state, data):
        logs, (trainable, *others) = super().train_step(state, data)
        return logs, ([state[0][0], *trainable[1:]], *others)


class CountsCalls:
    """Makes a train function of its own, which notes how often it was called."""

    calls, _own = 0, None

    def make_train_function(self, force=False):
        super().make_train_function(force)
        kerass = self.train_function
        if kerass is self._own:
            return

        def own(*given):
            self.calls += 1
            return kerass(*given)

        self.train_function = self._own = own


class HeldCountsCalls(CountsCalls, Held):
    pass


class ModelCountsCalls(CountsCalls, keras.Model):
    pass


def _things_in(container):
    if isinstance(container, Mapping):
        container = container.values()
    elif not isinstance(container, (list, tuple)):
        return [container]
    return [thing for inner in container for thing in _things_in(inner)]


class Hooks(keras.callbacks.Callback):
    """Does something once, at a batch of the first epoch."""

    def __init__(self, action, at):
        super().__init__()
        self.action, self.at, self.done = action, at, False

    def on_train_batch_end(self, batch, logs=None):
        if batch < self.at or self.done:
            return
        self.done = True
        if self.action == "interrupt":
            raise KeyboardInterrupt
        if self.action == "stop":
            self.model.stop_training = True
        if self.action == "guest":
            numbers = np.full((3, 1), GUEST, "float32")
            self.model.train_on_batch(numbers, for_every_output(self.model, np.ones((3, 1))))
        if self.action == "evaluate":
            numbers = np.zeros((3, 1), "float32")
            self.model.evaluate(numbers, for_every_output(self.model, numbers), verbose=0)


def for_every_output(model, targets):
    outputs = 1 if isinstance(model, Held) else len(model.outputs)
    return (targets,) * outputs if outputs > 1 else targets


def cut(parts, start, stop):
    return keras.tree.map_structure(lambda part: part[start:stop], parts)


class Batches(keras.utils.PyDataset):
    def __init__(self, parts, size):
        super().__init__()
        self.parts, self.size = parts, size

    def __len__(self):
        return -(-len(self.parts[0]) // self.size)

    def __getitem__(self, at):
        return cut(self.parts, at * self.size, (at + 1) * self.size)


class Case:
    """One combination, drawn from a seed.

    Attributes:
        mode: the ``batch_size`` of the callback.
        remat: whether the plain step is taken not to fit.
    """

    def __init__(self, seed):
        rng = random.Random(seed)
        self.samples, self.size = rng.choice([40, 47, 60]), rng.choice([4, 8])
        of_tensorflow = [] if ON_JAX else ["tf.data", "repeated"]
        self.source = rng.choice(["arrays", *of_tensorflow, "PyDataset", "generator", "unknown"])
        self.epochs, self.initial = rng.choice([2, 3, 4]), rng.choice([0, 0, 1])
        self.validation = rng.choice([None, None, "data", "split", "every other"])
        self.weights = rng.choice([None, None, "sample", "class"])
        self.per_call = rng.choice([1, 1, 2, 3])
        self.optimizer = rng.choice(["sgd", "adam", "ema", "clipped", "schedule"])
        if self.source == "unknown":  # Keras's own step counts the one that finds no more data
            self.optimizer = rng.choice(["sgd", "clipped"])
        self.action = rng.choice([None, None, "guest", "evaluate", "stop", "interrupt"])
        self.action_at = rng.randrange(1, 5)
        self.others = rng.sample(["early", "rate", "plateau", "csv", "nan"], rng.randrange(3))
        self.mode = rng.choice(["keep", "keep", "keep", "max", "fastest", 20, 3])
        self.remat = self.mode == "keep" and rng.random() < 0.4
        self.first = rng.random() < 0.5  # in the list of callbacks
        # Keras has no class weights for two outputs, and counts their losses once more at that end
        single = self.weights == "class" or self.source == "unknown"
        self.outputs = 1 if single else rng.choice([1, 1, 2])
        # a model with its layers in a container, whose own step may update a part, built or not
        kinds = [None, None, *CONTAINERS] if self.outputs == 1 else [None]
        self.container = rng.choice(kinds)
        # Keras averages all variables, whichever its optimizer was built for
        may_leave_some = self.container is not None and self.optimizer != "ema"
        self.updates_a_part = rng.random() < 0.3 and may_leave_some
        self.is_built = self.container is None or rng.random() < 0.5
        self.own_function = not self.updates_a_part and rng.random() < 0.1
        self.copied = rng.choice([None, None, *COPIES])
        self.is_used = self.copied is not None and rng.random() < 0.3  # before it is copied
        self.seed = seed

    def __repr__(self):
        return ", ".join(f"{name}={value}" for name, value in vars(self).items())

    def model(self):
        keras.utils.set_random_seed(self.seed)
        model = self._functional() if self.container is None else self._held()
        optimizer = {
            "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
            "adam": lambda: keras.optimizers.Adam(0.01),
            "ema": lambda: keras.optimizers.Adam(0.01, use_ema=True),
            "clipped": lambda: keras.optimizers.SGD(0.05, global_clipnorm=0.1),
            "schedule": lambda: keras.optimizers.SGD(
                keras.optimizers.schedules.ExponentialDecay(0.05, 10, 0.9)
            ),
        }[self.optimizer]()
        model.compile(
            optimizer,
            ["mse"] * self.outputs,
            metrics=[["mae"]] * self.outputs,
            steps_per_execution=self.per_call,
        )
        return model

    @property
    def _dropout(self):
        """The seed, too, is advanced once more by Keras's own step that finds no more data."""
        return 0.0 if self.source == "unknown" else 0.2

    def _functional(self):
        inputs = keras.layers.Input((1,))
        x = keras.layers.Dense(6, activation="tanh")(Diary(name="diary")(inputs))
        x = keras.layers.Dropout(self._dropout)(x)
        ends = [keras.layers.Dense(1, name=name)(x) for name in "ab"[: self.outputs]]
        kind = ModelCountsCalls if self.own_function else keras.Model
        return kind(inputs, ends if self.outputs > 1 else ends[0])

    def _held(self):
        kind = HeldCountsCalls if self.own_function else Held
        kind = UpdatesAPart if self.updates_a_part else kind
        model = kind(self.container, self._dropout)
        if self.is_built:
            model(np.zeros((1, 1), "float32"))
        return model

    def data(self):
        numbers = np.arange(self.samples, dtype="float32")[:, None]
        targets = np.cos(numbers).astype("float32")
        if self.weights == "class":
            targets = (targets > 0).astype("float32")
        parts = (numbers, (targets, targets**2) if self.outputs > 1 else targets)
        if self.weights == "sample":
            parts = (*parts, 1.0 + numbers[:, 0] % 3)
        steps = self.samples // self.size
        options = {
            "arrays": lambda: (
                dict(zip(("x", "y", "sample_weight"), parts, strict=False))
                | {"batch_size": self.size}
            ),
            "tf.data": lambda: {"x": self._dataset(parts)},
            "repeated": lambda: {"x": self._dataset(parts).repeat(), "steps_per_epoch": steps - 1},
            "PyDataset": lambda: {"x": Batches(parts, self.size)},
            "generator": lambda: {"x": self._forever(parts), "steps_per_epoch": steps},
            "unknown": lambda: {"x": self._of_unknown_length(parts)},
        }[self.source]()
        if self.weights == "class" and self.source in ("arrays", "PyDataset"):
            options["class_weight"] = {0: 1.0, 1: 2.5}
        if self.validation == "split" and self.source == "arrays":
            options["validation_split"] = 0.2
        elif self.validation is not None:
            options["validation_data"] = cut(parts[:2], 0, 7)
        if self.validation == "every other":
            options["validation_freq"] = 2
        return options

    def _dataset(self, parts):
        import tensorflow as tf

        return tf.data.Dataset.from_tensor_slices(parts).batch(self.size)

    def _of_unknown_length(self, parts):
        if not ON_JAX:
            return self._dataset(parts).filter(lambda *parts: True)
        batches = Batches(parts, self.size)  # Keras ends a generator with an epoch
        return (batches[at] for _ in range(self.epochs) for at in range(len(batches)))

    def _forever(self, parts):
        while True:
            for at in range(self.samples // self.size):
                yield cut(parts, at * self.size, (at + 1) * self.size)

    def callbacks(self, path):
        made = {
            "early": lambda: keras.callbacks.EarlyStopping("loss", patience=1, min_delta=0.1),
            "rate": lambda: keras.callbacks.LearningRateScheduler(lambda epoch: 0.05 / (1 + epoch)),
            "plateau": lambda: keras.callbacks.ReduceLROnPlateau("loss", patience=1),
            "csv": lambda: keras.callbacks.CSVLogger(path / "log.csv"),
            "nan": keras.callbacks.TerminateOnNaN,
        }
        changes_rate = self.optimizer != "schedule"
        chosen = [
            made[name]() for name in self.others if changes_rate or name not in ("rate", "plateau")
        ]
        return chosen + ([Hooks(self.action, self.action_at)] if self.action else [])

    def run(self, path, *own):
        model, others = self.model(), self.callbacks(path)
        callbacks = [*own, *others] if self.first else [*others, *own]
        history, interrupted = {}, False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                history = model.fit(
                    **self.data(),
                    epochs=self.epochs,
                    initial_epoch=self.initial,
                    shuffle=self.source == "arrays",
                    verbose=0,
                    callbacks=callbacks,
                ).history
            except KeyboardInterrupt:
                interrupted = True
            diary = model.get_layer("diary").entries
            if interrupted:  # what was left behind gives way
                numbers = np.zeros((2, 1))
                model.fit(numbers, for_every_output(model, numbers), verbose=0)
        return model, history, diary, interrupted


def check(seed, path, monkeypatch):
    case = Case(seed)
    plain, history, diary, interrupted = case.run(path)
    if case.remat:
        monkeypatch.setattr("keras_remat.training.tools.Tools.plain_fits", lambda *_: False)
    remat = keras_remat.RematAutotune(
        memory_limit="1GiB", batch_size=case.mode, solver="greedy", solver_time_limit_s=1.0,
        profile_steps=1, verbose=0, report_path=path / "report.json",
    )  # fmt: skip
    if case.is_used:
        numbers = np.ones((4, 1), "float32")
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        model.fit(numbers, numbers, verbose=0, callbacks=[remat])
    remat = COPIES.get(case.copied, lambda one: one)(remat)
    ours, our_history, our_diary, _ = case.run(path, remat)
    same_batches = case.mode == "keep" or case.own_function
    trained, expected = _of_fit(our_diary), _of_fit(diary)
    if not same_batches and "early" in case.others:  # other batches, other losses: other epochs
        both = min(len(trained), len(expected))
        trained, expected = trained[:both], expected[:both]
    elif not same_batches and case.action == "interrupt":  # what was held back was not trained
        expected = expected[: len(trained)]
    assert trained == expected, case
    assert our_diary.count(GUEST) == diary.count(GUEST), case
    assert [key for key in our_history if key not in LOG_KEYS] == list(history), case
    for key in LOG_KEYS if our_history else ():
        assert all(isinstance(number, float) for number in our_history[key]), case
    if same_batches:
        for key, values in history.items():
            assert our_history[key] == pytest.approx(values, rel=2e-3, abs=1e-5), (key, case)
        for a, b in zip(ours.get_weights(), plain.get_weights(), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-4, err_msg=repr(case))
        slots, plain_slots = (len(model.optimizer.variables) for model in (ours, plain))
        assert slots == plain_slots, case
    assert type(ours.train_function) is type(plain.train_function), case
    assert set(vars(ours)) == set(vars(plain)), case
    kinds = [event.kind for event in remat.report.events]
    assert ("unmodified" in kinds) == case.own_function, (case, remat.report.events)
    if case.own_function:
        assert ours.calls == plain.calls, case
    if case.optimizer != "schedule" and (same_batches or "plateau" not in case.others):
        rate, plain_rate = (float(m.optimizer.learning_rate) for m in (ours, plain))
        assert rate == plain_rate, case
    if not interrupted:
        assert (path / "report.json").exists()
        counted = sum(epoch.samples for epoch in remat.report.epochs)
        # a guest's batch is Keras's own business where nothing is to be done, and what resets
        # Keras's metrics in mid-epoch takes the count of batches whose sizes nobody knows before
        guests = {our_diary.count(GUEST), 0} if case.action == "guest" else {0}
        is_told = case.source == "arrays" or case.action not in ("guest", "evaluate")
        is_told &= not case.own_function  # nobody counts then
        assert not is_told or len(our_diary) - counted in guests, case


def _of_fit(diary):
    return [number for number in diary if number != GUEST]


def choices(seed):
    """What was drawn for a case, as pairs of a name and a value."""
    drawn = {name: value for name, value in vars(Case(seed)).items() if name != "seed"}
    others = drawn.pop("others")
    return {*drawn.items(), *(("other", name) for name in others)}


def covering(seeds):
    """The fewest that greedily have every choice that any of the seeds has, those with most
    first."""
    missing, chosen = {choice for seed in seeds for choice in choices(seed)}, []
    while missing:
        chosen.append(max(seeds, key=lambda seed: len(choices(seed) & missing)))
        missing -= choices(chosen[-1])
    return chosen


#: The cases that have most of all choices: the others are slow tests.
IN_DEFAULT_RUN = covering(range(IN_ALL))[: 3 if ON_JAX else 4]


@pytest.mark.parametrize("seed", IN_DEFAULT_RUN)
def test_random_combination_trains_as_plainly(seed, tmp_path, monkeypatch):
    check(seed, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [at for at in range(IN_ALL) if at not in IN_DEFAULT_RUN])
def test_more_random_combinations_train_as_plainly(seed, tmp_path, monkeypatch):
    check(seed, tmp_path, monkeypatch)
