"""Some fifty small Keras models on PyTorch, one of a kind each: optimizers, metrics, layers that
draw, loops, branches, and what the PyTorch study's ``robust`` cases were about."""

import functools

import keras
import numpy as np
import torch
import torch_models as models
from keras import layers, ops
from torch.utils.checkpoint import checkpoint
from torch_models import LABELS, TOKENS, X

MASKED = np.where(np.arange(9) < 6, TOKENS, 0).astype("int32")
WEIGHTS = np.linspace(0.1, 1, 8).astype("float32")


def _compiled(build, batch, **options):
    """A model that is made from scratch, and what it trains on."""

    def make():
        keras.utils.set_random_seed(0)
        model = build()
        options.setdefault("loss", "sparse_categorical_crossentropy")
        model.compile("adam", **options)
        return model, batch

    return make


def _middle(layer):
    """A dense classifier with a layer in its middle."""

    def build():
        inner = [layers.Dense(16, "relu"), layer(), layers.Dense(3, "softmax")]
        return keras.Sequential([keras.Input((12,)), *inner])

    return _compiled(build, (X, LABELS))


def _sequence(*inner, masked=True):
    """A classifier of tokens, of the layers that are given as functions."""

    def build():
        x = [keras.Input((9,), dtype="int32"), layers.Embedding(20, 8, mask_zero=masked)]
        return keras.Sequential([*x, *(layer() for layer in inner), layers.Dense(3, "softmax")])

    return _compiled(build, (MASKED, LABELS[:4]))


class Function(layers.Layer):
    """Calls a function of a tensor."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        return self.function(x)


def of(function):
    """A dense classifier with a function of a tensor in its middle."""
    return _middle(functools.partial(Function, function))


def _looped(x):
    return ops.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, 1.5 * y), (0, x))[1]


def _own_gradient(x):
    @ops.custom_gradient
    def tripled(x):
        def gradient(*arguments, upstream=None):
            return 2 * upstream

        return 3 * x, gradient

    return tripled(x)


def _updated(x):
    moved = torch.clone(x)  # as ops.slice_update is, which asks for values in Keras 3.12
    moved[:2, :2] = 3 * x[:2, :2]
    return moved + ops.scatter_update(x, [[0, 1]], ops.ones((1,)))


def _counted(x):
    return x + ops.cast(ops.shape(ops.nonzero(x > 0.5)[0])[0], "float32")


def _drops_in_a_checkpoint(x, *, is_reentrant):
    """What is computed again must drop what was dropped at first."""

    def dropped(x):
        return torch.tanh(torch.nn.functional.dropout(x, 0.4))

    return checkpoint(dropped, x, use_reentrant=is_reentrant)


def _forked(x):
    with torch.random.fork_rng(devices=[]):
        before = x + torch.rand_like(x)
    return before * torch.rand_like(x)  # of the same numbers


@torch.library.custom_op("keras_remat_tests::noise", mutates_args=())
def _noise(x: torch.Tensor) -> torch.Tensor:
    """Draws, and has no tag that says so."""
    return torch.rand_like(x)


_noise.register_fake(torch.empty_like)


def _solved(x):
    if x.device.type == "meta":
        return x
    with torch.profiler.record_function("solved"):
        return torch.linalg.solve(x.T @ x + torch.eye(16), x.T).T


TABLE = torch.linspace(-1, 1, 32).reshape(2, 16)
FIRST, SECOND = TABLE


def _seen_otherwise(x):
    """Two views of one tensor that it closes over, a conjugate, and axes changed in place."""
    if x.device.type == "meta":
        return x
    moved = 2 * x.detach()
    moved.t_()
    moved.unsqueeze_(0)
    moved.transpose_(0, 2)
    conjugate = torch.complex(x, 2 * x).conj()
    return x * FIRST + conjugate.imag * SECOND + moved.squeeze_(2)


def _rectified(x):
    return torch.nn.functional.rrelu(x - 0.5, training=True)


def weighted():
    """A batch with weights of its samples."""
    keras.utils.set_random_seed(0)
    model, data = models.dense()()
    model.compile("adam", model.loss, weighted_metrics=["accuracy"])
    return model, (*data, WEIGHTS)


def flash():
    """Attention whose kernel PyTorch chooses."""

    def build():
        inputs = keras.Input((9,), dtype="int32")
        x = layers.Embedding(20, 16)(inputs)
        x = layers.MultiHeadAttention(2, 8)(x, x)
        return keras.Model(inputs, layers.Dense(3, "softmax")(layers.GlobalMaxPooling1D()(x)))

    return _compiled(build, (TOKENS, LABELS[:4]))()


def rematerialized():
    """Layers in the scope of Keras's own rematerialization."""

    def build():
        with keras.RematScope(mode="full"):
            inner = [layers.Dense(16, "relu"), layers.Dropout(0.3), layers.Dense(16, "gelu")]
            inner.append(layers.Dense(3, "softmax"))
            return keras.Sequential([keras.Input((12,)), *inner])

    return _compiled(build, (X, LABELS))()


class Gan(keras.Model):
    """Two networks with an optimizer each."""

    def __init__(self):
        super().__init__()
        hidden = functools.partial(layers.Dense, 16, "relu")
        self.maker = keras.Sequential([keras.Input((4,)), hidden(), layers.Dense(12)])
        self.judge = keras.Sequential(
            [keras.Input((12,)), hidden(), layers.Dropout(0.1, seed=1), layers.Dense(1)]
        )
        self.seeds = keras.random.SeedGenerator(3)
        self.told = keras.metrics.Mean(name="judged"), keras.metrics.Mean(name="fooled")
        self.built = True

    @property
    def metrics(self):
        return list(self.told)

    def call(self, x):
        return self.judge(x)

    def compile(self):
        super().compile()
        self.rules = keras.optimizers.SGD(0.01), keras.optimizers.Adam()
        for rule, network in zip(self.rules, (self.judge, self.maker), strict=True):
            rule.build(network.trainable_variables)

    def _follow(self, rule, network, loss):
        self.zero_grad()
        loss.backward()
        weights = network.trainable_weights
        with torch.no_grad():
            rule.apply([weight.value.grad for weight in weights], weights)

    def train_step(self, data):
        real = data[0]
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        ones, zeros = ops.ones((8, 1)), ops.zeros((8, 1))
        made = self.maker(keras.random.normal((8, 4), seed=self.seeds))
        judged = loss(ops.concatenate([ones, zeros]), self.judge(ops.concatenate([made, real])))
        self._follow(self.rules[0], self.judge, judged)
        made = self.maker(keras.random.normal((8, 4), seed=self.seeds))
        fooled = loss(zeros, self.judge(made))
        self._follow(self.rules[1], self.maker, fooled)
        for metric, value in zip(self.told, (judged, fooled), strict=True):
            metric.update_state(value)
        return {metric.name: metric.result() for metric in self.told}


def gan():
    keras.utils.set_random_seed(0)
    model = Gan()
    model.compile()
    return model, (X,)


def hooked():
    """A classifier whose gradients are changed by hooks on its weights."""
    model, batch = models.dense()()
    for variable in model.trainable_variables:
        variable.value.register_hook(lambda gradient: 0.5 * gradient)
        variable.value.register_post_accumulate_grad_hook(_clamped)
    return model, batch


def _clamped(weight):
    weight.grad.clamp_(-1e-2, 1e-2)


def _rule(name, **options):
    return models.dense(lambda: getattr(keras.optimizers, name)(1e-2, **options))


def _pictures(*inner):
    """A classifier of images whose last layers are always the same."""
    return models.images(*inner, layers.GlobalAveragePooling2D)


RULES = (
    "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "Adafactor", "Ftrl", "Lion",
    "Lamb", "Muon",
)  # fmt: skip
#: What trains to the bit as plain Keras does.
EQUAL = {
    **{name: _rule(name) for name in RULES},
    "amsgrad": _rule("Adam", amsgrad=True),
    "global clipnorm": _rule("Adam", global_clipnorm=0.5),
    "clipvalue": _rule("Adam", clipvalue=0.5),
    "weighted": weighted,
    "gan": gan,
    "hooked": hooked,
    "loop": of(_looped),
    "largest": of(lambda x: ops.top_k(x, 5)[0]),
    "own gradient": of(_own_gradient),
    "updated slices": of(_updated),
    "checkpointed": of(functools.partial(_drops_in_a_checkpoint, is_reentrant=False)),
    "checkpointed inside": of(functools.partial(_drops_in_a_checkpoint, is_reentrant=True)),
    "forked": of(_forked),
    "noise of one's own": of(lambda x: torch.tanh(x * _noise(x.detach()))),
    "solved": of(_solved),
    "rectified at random": of(_rectified),
    "seen otherwise": of(_seen_otherwise),
    "mapped": of(lambda x: x + ops.vectorized_map(lambda row: 2 * row, x)),
    "chosen kernel": flash,
    "rematerialized": rematerialized,
    "masked LSTM": _sequence(lambda: layers.LSTM(8)),
    "masked GRU": _sequence(lambda: layers.GRU(8)),
    "bidirectional": _sequence(lambda: layers.Bidirectional(layers.LSTM(8))),
    "LSTM": _sequence(lambda: layers.LSTM(8), masked=False),
    "unrolled": _sequence(lambda: layers.LSTM(8, unroll=True)),
    "dropout in a loop": _sequence(
        lambda: layers.SimpleRNN(8, dropout=0.2, recurrent_dropout=0.2, seed=1)
    ),
    "convolved tokens": _sequence(
        lambda: layers.Conv1D(8, 3), layers.GlobalMaxPooling1D, masked=False
    ),
    "separable": _pictures(lambda: layers.DepthwiseConv2D(3), lambda: layers.SeparableConv2D(8, 3)),
    "group norms": _pictures(
        lambda: layers.Conv2D(8, 3),
        lambda: layers.GroupNormalization(4),
        layers.LayerNormalization,
        layers.UnitNormalization,
    ),
    "sloped": _pictures(lambda: layers.Conv2D(8, 3), layers.BatchNormalization, layers.PReLU),
    "pools": _pictures(
        lambda: layers.MaxPooling2D(2, padding="same"),
        lambda: layers.Conv2D(8, 3, padding="same"),
        lambda: layers.AveragePooling2D(2, padding="same"),
        lambda: layers.UpSampling2D(2, interpolation="bilinear"),
    ),
    "turned": _pictures(
        lambda: layers.RandomFlip(seed=1),
        lambda: layers.RandomRotation(0.1, seed=1),
        lambda: layers.Rescaling(2.0),
        lambda: layers.Conv2D(8, 3),
    ),
    "contrasted": _pictures(
        lambda: layers.RandomContrast(0.2, seed=1),
        lambda: layers.RandomTranslation(0.1, 0.1, seed=1),
        lambda: layers.Conv2D(8, 3),
    ),
    "noisy": _pictures(
        lambda: layers.Conv2D(8, 3),
        lambda: layers.GaussianDropout(0.2, seed=1),
        lambda: layers.AlphaDropout(0.1, seed=1),
        lambda: layers.SpatialDropout2D(0.2, seed=1),
    ),
    "resized": _pictures(
        lambda: layers.Resizing(12, 12),
        lambda: layers.Normalization(mean=0.5, variance=0.2),
        lambda: layers.Conv2D(8, 3, activation="silu"),
    ),
}
#: What cannot be recorded, and why.
REFUSED = {
    "mean IoU": (
        models.dense(metrics=(lambda: keras.metrics.MeanIoU(3, sparse_y_pred=False),)),
        "asks in Python for the value",
    ),
    "counted": (of(_counted), "nonzero"),
    "spectral": (
        _pictures(lambda: layers.SpectralNormalization(layers.Conv2D(8, 3))),
        "differentiated through a",
    ),
}
