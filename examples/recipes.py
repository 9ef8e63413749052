"""Three models that people run out of memory with, trained in half of what plain ``fit`` takes:
low-rank adapters of a decoder, the denoiser of a latent diffusion model, and a U-Net of volumes.

    pip install -e '.[tensorflow-cpu]' && python examples/recipes.py lora
    python examples/recipes.py diffusion --share 0.4
    python examples/recipes.py volumes --voxels 96

The first ``fit`` measures what the plain step takes. The second one gets ``--share`` of what that
adds to the weights and slots. What comes out: peaks and times of both, whether the losses are the
same, and which layers are recomputed. Half precision, another batch and attention without a matrix
of scores are choices of the model; the callback plans whatever is there.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
from keras import layers, ops

import keras_remat

MIB = 2**20
STEPS, EPOCHS = 4, 4
#: A model with its data, and its samples in a step.
Recipe = tuple[keras.Model, tuple[Any, ...], int]


# -------------------------------------------------------------------- low-rank adapters


class RotaryAttention(layers.Layer):
    """Causal attention with rotary positions (Su et al. 2021), whose queries share keys and values
    (Ainslie et al. 2023)."""

    def __init__(self, heads: int, shared: int, size: int, **options: Any):
        super().__init__(**options)
        self.heads, self.shared, self.size = heads, shared, size
        self.query, self.key, self.value = (
            layers.Dense(count * size, use_bias=False, name=name)
            for name, count in (("query", heads), ("key", shared), ("value", shared))
        )
        self.out = layers.Dense(heads * size, use_bias=False, name="out")

    def build(self, shape: Any) -> None:
        for part in (self.query, self.key, self.value):
            part.build(shape)
        self.out.build((*shape[:-1], self.heads * self.size))

    def call(self, x: Any) -> Any:
        length = x.shape[1]
        query, key, value = (
            ops.reshape(part(x), (-1, length, count, self.size))
            for part, count in (
                (self.query, self.heads), (self.key, self.shared), (self.value, self.shared)
            )
        )  # fmt: skip
        mixed = ops.dot_product_attention(
            self._turned(query), self._turned(key), value, is_causal=True
        )
        return self.out(ops.reshape(mixed, (-1, length, self.heads * self.size)))

    def _turned(self, x: Any) -> Any:
        half = self.size // 2
        angles = np.outer(np.arange(x.shape[1]), 10_000.0 ** -(np.arange(half) / half))
        angles = angles[None, :, None].astype("float32")
        left, right = x[..., :half], x[..., half:]
        cos, sin = np.cos(angles), np.sin(angles)
        return ops.concatenate([left * cos - right * sin, left * sin + right * cos], axis=-1)


def lora(options: argparse.Namespace) -> Recipe:
    """Returns a decoder like Gemma's (root mean square norms, gated feed-forward layers), whose
    adapters of rank 4 train alone (Hu et al. 2021)."""
    width, heads, blocks, vocabulary, length = 256, 8, 6, 4096, 256
    inputs = keras.Input((length,), dtype="int32")
    x = layers.Embedding(vocabulary, width, name="tokens")(inputs)
    for at in range(blocks):
        h = layers.RMSNormalization(name=f"{at}_norm_a")(x)
        x = x + RotaryAttention(heads, 2, width // heads, name=f"{at}_attention")(h)
        h = layers.RMSNormalization(name=f"{at}_norm_b")(x)
        gate = layers.Dense(4 * width, "gelu", use_bias=False, name=f"{at}_gate")(h)
        wide = layers.Dense(4 * width, use_bias=False, name=f"{at}_wide")(h)
        x = x + layers.Dense(width, use_bias=False, name=f"{at}_narrow")(gate * wide)
    x = layers.RMSNormalization(name="norm")(x)
    model = keras.Model(inputs, layers.Dense(vocabulary, use_bias=False, name="logits")(x))
    for layer in model.layers:
        layer.trainable = isinstance(layer, RotaryAttention)
        if layer.trainable:
            layer.key.trainable = layer.out.trainable = False
            layer.query.enable_lora(4)
            layer.value.enable_lora(4)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(1e-4), loss, jit_compile=False)
    tokens = np.random.default_rng(0).integers(0, vocabulary, (STEPS * 4, length + 1))
    return model, (tokens[:, :-1].astype("int32"), tokens[:, 1:].astype("int32")), 4


# -------------------------------------------------------------------- diffusion


class Denoiser(keras.Model):
    """Learns the noise that was added to a latent image (Ho et al. 2020, Rombach et al. 2022)."""

    def __init__(self, network: keras.Model, steps: int = 1000):
        super().__init__()
        self.network, self.steps = network, steps
        self.seeds = keras.random.SeedGenerator(0)

    def call(self, latents: Any, training: bool = False) -> Any:
        """Returns the noise and what was told of it, side by side: the loss compares them."""
        batch = ops.shape(latents)[0]
        noise = keras.random.normal(ops.shape(latents), seed=self.seeds)
        time = keras.random.uniform((batch, 1), seed=self.seeds)
        angle = ops.reshape(time, (-1, 1, 1, 1)) * (np.pi / 2)
        noisy = ops.cos(angle) * latents + ops.sin(angle) * noise
        told = self.network([noisy, time], training=training)
        return ops.concatenate([told, noise], axis=-1)


def noise_error(_: Any, told: Any) -> Any:
    """Returns the squared error of the noise that :class:`Denoiser` tells."""
    said, noise = ops.split(told, 2, axis=-1)
    return ops.mean(ops.square(said - noise), axis=(1, 2, 3))


def _residual(x: Any, time: Any, filters: int, name: str) -> Any:
    h = layers.Activation("silu")(layers.GroupNormalization(8, name=f"{name}_norm_a")(x))
    h = layers.Conv2D(filters, 3, padding="same", name=f"{name}_conv_a")(h)
    h = h + layers.Dense(filters, name=f"{name}_time")(time)[:, None, None]
    h = layers.Activation("silu")(layers.GroupNormalization(8, name=f"{name}_norm_b")(h))
    h = layers.Conv2D(filters, 3, padding="same", name=f"{name}_conv_b")(h)
    if x.shape[-1] != filters:
        x = layers.Conv2D(filters, 1, name=f"{name}_skip")(x)
    return x + h


def _attended(x: Any, name: str) -> Any:
    side, filters = x.shape[1], x.shape[-1]
    h = layers.GroupNormalization(8, name=f"{name}_norm")(x)
    h = layers.Reshape((side * side, filters))(h)
    h = layers.MultiHeadAttention(4, filters // 4, name=f"{name}_attention")(h, h)
    return x + layers.Reshape((side, side, filters))(h)


def diffusion(options: argparse.Namespace) -> Recipe:
    """Returns the denoiser of latent images, with attention at the two smaller sizes."""
    latent = keras.Input((32, 32, 4))
    moment = keras.Input((1,))
    time = layers.Dense(128, "silu", name="time")(moment)
    x = layers.Conv2D(32, 3, padding="same", name="into")(latent)
    skips = []
    for level, filters in enumerate((32, 64, 128)):
        x = _residual(x, time, filters, f"down_{level}")
        if level:
            x = _attended(x, f"down_{level}")
        skips.append(x)
        x = layers.AveragePooling2D(2, name=f"half_{level}")(x)
    x = _residual(x, time, 128, "middle")
    for level, filters in reversed(tuple(enumerate((32, 64, 128)))):
        x = layers.Concatenate()([layers.UpSampling2D(name=f"twice_{level}")(x), skips[level]])
        x = _residual(x, time, filters, f"up_{level}")
    network = keras.Model([latent, moment], layers.Conv2D(4, 3, padding="same", name="noise")(x))
    model = Denoiser(network)
    model.compile(keras.optimizers.AdamW(1e-4), noise_error, jit_compile=False)
    latents = np.random.default_rng(0).normal(size=(STEPS * 8, 32, 32, 4)).astype("float32")
    return model, (latents, np.zeros(len(latents), "float32")), 8


# -------------------------------------------------------------------- volumes


def volumes(options: argparse.Namespace) -> Recipe:
    """Returns a U-Net of volumes (Cicek et al. 2016), one of which is a batch."""
    side, filters, depth = options.voxels, 8, 3
    inputs = x = keras.Input((side, side, side, 1))

    def block(x: Any, filters: int, name: str) -> Any:
        for at in "ab":
            x = layers.Conv3D(filters, 3, padding="same", name=f"{name}_conv_{at}")(x)
            x = layers.ReLU()(layers.GroupNormalization(4, name=f"{name}_norm_{at}")(x))
        return x

    skips = []
    for level in range(depth):
        skips.append(block(x, filters * 2**level, f"down_{level}"))
        x = layers.MaxPooling3D()(skips[-1])
    x = block(x, filters * 2**depth, "bottom")
    for level in reversed(range(depth)):
        x = layers.Concatenate()([layers.UpSampling3D()(x), skips[level]])
        x = block(x, filters * 2**level, f"up_{level}")
    model = keras.Model(inputs, layers.Conv3D(1, 1, activation="sigmoid", name="mask")(x))
    model.compile("adam", "binary_crossentropy", jit_compile=False)
    rng = np.random.default_rng(0)
    shape = (STEPS, side, side, side, 1)
    return model, (rng.random(shape, "float32"), rng.integers(0, 2, shape).astype("float32")), 1


RECIPES: dict[str, Callable[[argparse.Namespace], Recipe]] = {
    "lora": lora,
    "diffusion": diffusion,
    "volumes": volumes,
}


# -------------------------------------------------------------------- both fits


def trained(
    options: argparse.Namespace, limit: int | None = None
) -> tuple[list[float], keras_remat.RematAutotune]:
    """Returns the losses of a fit from the same seed, and its callback."""
    keras.utils.set_random_seed(0)
    model, data, batch_size = RECIPES[options.recipe](options)
    remat = keras_remat.RematAutotune(limit, "keep", solver_time_limit_s=options.seconds, verbose=0)
    history = model.fit(
        *data, batch_size=batch_size, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=[remat]
    )
    return history.history["loss"], remat


def main(argv: list[str] | None = None) -> int:
    """Returns 0 when the measured peak kept the limit, 1 when it did not or no plan was found."""
    keras_remat.enable_cpu_memory_stats()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", choices=RECIPES)
    parser.add_argument("--share", type=float, default=0.5, help="of plain's bytes (default 0.5)")
    parser.add_argument("--voxels", type=int, default=64, help="along an edge (default 64)")
    parser.add_argument("--seconds", type=float, default=10.0, help="for the solver (default 10)")
    options = parser.parse_args(argv)
    losses, watching = trained(options)
    plain, resident = watching.report.baseline, watching.problem.profile.resident_bytes
    del watching  # it holds the first model, whose bytes count
    gc.collect()
    limit = int((resident + options.share * (plain.peak_bytes - resident)) / 0.95)
    print(f"Plain step: {plain.peak_bytes / MIB:.1f} MiB. Now within {limit / MIB:.1f} MiB.")
    try:
        again, remat = trained(options, limit)
    except (keras_remat.InfeasibleBudgetError, keras_remat.ScheduleNotFoundError) as error:
        print(f"Refused: {error}")
        return 1
    plan = remat.plan
    print(f"\n{plan.summary('layer')}")
    print(f"\n{'':16}{'peak':>12}{'time per step':>16}")
    for name, usage in (("plain", plain), ("rematerialized", plan.measured)):
        print(f"{name:16}{usage.peak_bytes / MIB:8.1f} MiB{usage.time_s:14.3f} s")
    off = max(abs(a - b) / abs(b) for a, b in zip(again, losses, strict=True))
    print(f"losses          {'the same' if off == 0 else f'differ by {off:.0e}'}")
    kept = plan.measured.peak_bytes <= limit
    print(f"limit           {limit / MIB:8.1f} MiB: {'kept' if kept else 'NOT KEPT'}")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
