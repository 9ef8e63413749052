"""Random fits: a model, its data and its callbacks, drawn from a seed out of Keras's features.

``tests/backends/test_random_fits.py`` trains each plainly and with ``RematAutotune``.
"""

import copy
import pickle
import random
import warnings
from typing import NamedTuple

import h5py
import keras
import numpy as np
from keras import layers
from random_fit_models import (
    CHANGED_WITHOUT_DATA,
    CONTAINERS,
    ON_JAX,
    ON_TORCH,
    OPTIMIZERS,
    PARTS,
    RANDOM,
    Diary,
    Held,
    HeldCountsCalls,
    ModelCountsCalls,
    UpdatesAPart,
)

#: Numbers of samples from here on are a guest's.
GUEST = 900
CHECKPOINT = "best.weights.h5"
#: What may be done to a callback before it is used.
COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda one: pickle.loads(pickle.dumps(one)),
}


class Hooks(keras.callbacks.Callback):
    """Does something once, at a batch of the first epoch."""

    def __init__(self, case):
        super().__init__()
        self.case, self.action, self.at = case, case.action, case.action_at
        self.done = False

    def on_train_batch_end(self, batch, logs=None):
        if batch < self.at or self.done:
            return
        self.done = True
        if self.action == "interrupt":
            raise KeyboardInterrupt
        if self.action == "stop":
            self.model.stop_training = True
        if self.action == "guest":
            _, targets = self.case.pair(np.ones((3, 1), "float32"))
            x, _ = self.case.pair(np.full((3, 1), GUEST, "float32"))
            self.model.train_on_batch(x, targets)
        if self.action == "evaluate":
            self.model.evaluate(*self.case.pair(np.zeros((3, 1), "float32")), verbose=0)


def cut(parts, start, stop):
    return keras.tree.map_structure(lambda part: part[start:stop], parts)


class Batches(keras.utils.PyDataset):
    def __init__(self, parts, size):
        super().__init__()
        self.parts, self.size = parts, size

    def __len__(self):
        return -(-len(keras.tree.flatten(self.parts)[0]) // self.size)

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
        of_tensorflow = [] if ON_JAX or ON_TORCH else ["tf.data", "repeated"]
        self.source = rng.choice(["arrays", *of_tensorflow, "PyDataset", "generator", "unknown"])
        self.epochs, self.initial = rng.choice([2, 3, 4]), rng.choice([0, 0, 1])
        self.validation = rng.choice([None, None, "data", "split", "every other"])
        self.weights = rng.choice([None, None, "sample", "class"])
        self.per_call = 1 if ON_TORCH else rng.choice([1, 1, 2, 3])  # Keras takes no other there
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
        self._draw_parts(rng)
        self._draw_surroundings(rng)

    def _draw_parts(self, rng):
        """Draws what a functional model has inside, and another optimizer."""
        parts, is_functional = sorted(PARTS), self.container is None
        if self.source == "unknown":
            parts = [part for part in parts if part not in CHANGED_WITHOUT_DATA]
        elif self.optimizer != "ema" and rng.random() < 0.4:
            self.optimizer = rng.choice(["accumulated", "adafactor", "decayed", "scaled"])
        self.parts = rng.sample(parts, rng.choice([1, 2, 2])) if is_functional else []
        self.has_names = is_functional and rng.random() < 0.2  # its input is a dictionary

    def _draw_surroundings(self, rng):
        """Draws more callbacks, another fit behind, and how Keras runs the step."""
        more = ["checkpoint", *(["backup"] if self.is_built else [])]
        more += ["swap"] if self.optimizer == "ema" else []
        more += [] if ON_JAX or ON_TORCH else ["tensorboard"]
        self.others += rng.sample(more, rng.choice([0, 0, 1]))
        self.validation_size = rng.choice([None, 3])
        self.again = rng.choice([None, None, "fit", "compile"])
        self.run_as = None if ON_JAX or ON_TORCH else rng.choice([None] * 8 + ["eager", "compiled"])
        if self.run_as == "compiled":
            self.parts = [part for part in self.parts if part not in RANDOM]

    @property
    def is_refused(self):
        """Whether Keras's own step is to train, and a reason to be said."""
        is_branch = ON_TORCH and "spectral" in self.parts  # one that is differentiated
        return self.own_function or self.run_as == "eager" or is_branch

    def __repr__(self):
        return ", ".join(f"{name}={value}" for name, value in vars(self).items())

    def model(self):
        keras.utils.set_random_seed(self.seed)
        model = self._functional() if self.container is None else self._held()
        self._compile(model)
        return model

    def _compile(self, model):
        model.compile(
            OPTIMIZERS[self.optimizer](),
            ["mse"] * self.outputs,
            metrics=[["mae"]] * self.outputs,
            steps_per_execution=self.per_call,
            run_eagerly=self.run_as == "eager",
            jit_compile=True if self.run_as == "compiled" else "auto",
        )

    def pair(self, numbers):
        """Returns samples and targets as the model takes them."""
        return self._named(numbers), (numbers,) * self.outputs if self.outputs > 1 else numbers

    def _named(self, numbers):
        return {"numbers": numbers} if self.has_names else numbers

    @property
    def _dropout(self):
        """The seed, too, is advanced once more by Keras's own step that finds no more data; a
        compiled step of TensorFlow draws other masks than one that runs in order."""
        return 0.0 if self.source == "unknown" or self.run_as == "compiled" else 0.2

    def _functional(self):
        numbers = layers.Input((1,), name="numbers")
        x = layers.Dense(6, activation="tanh")(Diary(name="diary")(numbers))
        x = layers.Dropout(self._dropout)(x)
        for part in self.parts:
            x = PARTS[part](x, numbers)
        ends = [layers.Dense(1, name=name)(x) for name in "ab"[: self.outputs]]
        kind = ModelCountsCalls if self.own_function else keras.Model
        return kind(self._named(numbers), ends if self.outputs > 1 else ends[0])

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
        parts = (self._named(numbers), (targets, targets**2) if self.outputs > 1 else targets)
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
        if self.validation is not None and self.validation_size is not None:
            options["validation_batch_size"] = self.validation_size
        return options

    def _dataset(self, parts):
        import tensorflow as tf

        return tf.data.Dataset.from_tensor_slices(parts).batch(self.size)

    def _of_unknown_length(self, parts):
        if not (ON_JAX or ON_TORCH):
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
            "backup": lambda: keras.callbacks.BackupAndRestore(path / "backup"),
            "checkpoint": lambda: keras.callbacks.ModelCheckpoint(
                path / CHECKPOINT, "loss", save_best_only=True, save_weights_only=True
            ),
            "swap": lambda: keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
            "tensorboard": lambda: keras.callbacks.TensorBoard(path / "logs"),
        }
        changes_rate = self.optimizer != "schedule"
        chosen = [
            made[name]() for name in self.others if changes_rate or name not in ("rate", "plateau")
        ]
        return chosen + ([Hooks(self)] if self.action else [])

    def run(self, path, *own):
        """Returns what a fit, or two, came to.

        Args:
            path: a folder for what callbacks write.
            own: callbacks of ours.
        """
        path.mkdir()
        model, others = self.model(), self.callbacks(path)
        callbacks = [*own, *others] if self.first else [*others, *own]
        history, interrupted, counts = {}, False, []
        for fit in range(1 if self.again is None else 2):
            if fit and self.again == "compile":
                self._compile(model)
            try:
                fitted = self._fit(model, callbacks)
            except KeyboardInterrupt:
                interrupted = True
            else:
                for key, values in fitted.items():
                    history.setdefault(key, []).extend(values)
            counts.append(len(_diary(model)))
            if interrupted:
                break
        diary = _diary(model)
        if interrupted:  # what was left behind gives way
            model.fit(*self.pair(np.zeros((2, 1))), verbose=0)
        return Outcome(model, history, diary, counts, interrupted, _saved(path / CHECKPOINT))

    def _fit(self, model, callbacks):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return model.fit(
                **self.data(),
                epochs=self.epochs,
                initial_epoch=self.initial,
                shuffle=self.source == "arrays",
                verbose=0,
                callbacks=callbacks,
            ).history


class Outcome(NamedTuple):
    """What the fits of a case came to.

    Attributes:
        history: Keras's, of all fits.
        diary: the numbers of the samples that were trained.
        counts: how many there were after each fit.
        saved: the arrays of a checkpoint, by name.
    """

    model: keras.Model
    history: dict
    diary: list
    counts: list
    interrupted: bool
    saved: dict


def _diary(model):
    return model.get_layer("diary").entries


def _saved(path):
    arrays = {}

    def add(name, one):
        if isinstance(one, h5py.Dataset):
            arrays[name] = one[()]

    if path.exists():
        with h5py.File(path) as file:
            file.visititems(add)
    return arrays


def choices(seed):
    """What was drawn for a case, as pairs of a name and a value."""
    drawn = {name: value for name, value in vars(Case(seed)).items() if name != "seed"}
    many = [(name, one) for name in ("others", "parts") for one in drawn.pop(name)]
    return {*drawn.items(), *many}
