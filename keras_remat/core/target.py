"""Where a step will run: the device that is there, or a card that need not be.

Everything that depends on the device asks its :class:`Target`: how a schedule is written down, what
it is compiled for, what is added to its bytes, and what its ops cost. A backend makes the target of
the live device (:func:`live`); :mod:`keras_remat.cards.table` holds those of cards.

Times are a roofline: the slower of arithmetic and traffic, and a launch. Only the ratios of times
decide about a plan.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Says what a device's arithmetic and traffic take.

    Args:
        seconds_per_flop: of a 32-bit matrix product, multiplications and additions counted apart.
        seconds_per_byte: read or written.
        seconds_per_kernel: a launch.
        half_flop: a flop of a 16-bit float's product, in flops of a 32-bit one.
        expensive_flops: an exponential or the like, in flops of a product.
        random_flops: a random number, in flops of a product.
        grouped_factor: a flop of a grouped convolution, in flops of a dense one.
    """

    seconds_per_flop: float
    seconds_per_byte: float
    seconds_per_kernel: float
    half_flop: float = 1.0
    expensive_flops: float
    random_flops: float
    grouped_factor: float


CPU_RATES = Rates(
    seconds_per_flop=2e-11,
    seconds_per_byte=1e-10,
    seconds_per_kernel=2e-6,
    expensive_flops=75,
    random_flops=1350,
    grouped_factor=250,
)
"""XLA:CPU of JAX 0.10.2 on two x86-64 cores, measured: a product of 4096 × 512 × 512, additions,
exponentials and random bits of 2 million elements, in flops of that product per element, and a
depthwise convolution against a dense one per flop."""

GPU_RATES = Rates(
    seconds_per_flop=2e-14,
    seconds_per_byte=5e-13,
    seconds_per_kernel=3e-6,
    expensive_flops=8,
    random_flops=100,
    grouped_factor=10,
)
"""A GPU that no table knows: guesses of the order of magnitude, not measured."""


@dataclass(frozen=True, kw_only=True)
class Chip:
    """Says what a compiler must know of a card that is not there.

    Args:
        name: as the driver tells it.
        cores: streaming multiprocessors.
        fpus_per_core: 32-bit units of each.
        clock_ghz: boost clock.
        bytes_per_s: bandwidth of the memory.
        l2_bytes: second-level cache.
        shared_bytes_per_core: shared memory of a multiprocessor.
        shared_bytes_per_block: what one block can ask for.
        threads_per_core: resident at once.
    """

    name: str
    cores: int
    fpus_per_core: int
    clock_ghz: float
    bytes_per_s: int
    l2_bytes: int
    shared_bytes_per_core: int
    shared_bytes_per_block: int
    threads_per_core: int


@dataclass(frozen=True, kw_only=True)
class Target:
    """Says where a step will run.

    Args:
        platform: ``"cpu"`` or ``"gpu"``.
        device: for people, such as ``"gpu:0 NVIDIA H100 80GB HBM3"``.
        rates: what its arithmetic and traffic take.
        card: its name, in the table of cards or one's own; ``None`` for the live device.
        capability: CUDA's compute capability; ``None`` where there is none, or nobody asked.
        total_bytes: its memory; ``None`` where the live device is to be asked.
        usable_bytes: what a framework uses of it by default.
        chip: what a compiler must know of it; ``None`` for the live device.
    """

    platform: str
    device: str
    rates: Rates
    card: str | None = None
    capability: tuple[int, int] | None = None
    total_bytes: int | None = None
    usable_bytes: int | None = None
    chip: Chip | None = None

    def __post_init__(self) -> None:
        if self.platform not in ("cpu", "gpu"):
            raise ValueError(f'platform must be "cpu" or "gpu", got {self.platform!r}')

    @property
    def name(self) -> str:
        """Returns the card's name, or what people call the live device."""
        return self.card or self.device

    @property
    def is_live(self) -> bool:
        """Returns whether it is the device of this process, where steps can run."""
        return self.chip is None

    @property
    def memory_bytes(self) -> int:
        """Returns all its memory, which is more than a framework uses of it by default.

        Raises:
            ValueError: nobody has said how much that is.
        """
        if self.total_bytes is None:
            raise ValueError(f"the target {self.device!r} has no total_bytes: give some")
        return self.total_bytes

    @property
    def on_gpu(self) -> bool:
        """Returns whether it is a GPU."""
        return self.platform == "gpu"

    @property
    def before_ampere(self) -> bool:
        """Returns whether it is known to be a GPU without units for bfloat16, for which XLA leaves
        matrix products to cuBLAS: one from before NVIDIA's Ampere."""
        return self.on_gpu and self.capability is not None and self.capability < (8, 0)


def live(platform: str, device: str, capability: tuple[int, int] | None = None) -> Target:
    """Returns the target of a device that is there.

    Args:
        platform: ``"cpu"`` or ``"gpu"``.
        device: for people.
        capability: CUDA's compute capability, where it is known.
    """
    rates = CPU_RATES if platform == "cpu" else GPU_RATES
    return Target(platform=platform, device=device, rates=rates, capability=capability)


def gpu_rates(flops_per_s: float, half_flops_per_s: float, bytes_per_s: float) -> Rates:
    """Returns a GPU's rates from its data sheet; what that does not tell is as of any GPU.

    Args:
        flops_per_s: 32-bit matrix products, as frameworks compute them by default: in TF32 where
            the card has it.
        half_flops_per_s: 16-bit ones, summed in 32 bits.
        bytes_per_s: bandwidth.
    """
    return replace(
        GPU_RATES,
        seconds_per_flop=1 / flops_per_s,
        seconds_per_byte=1 / bytes_per_s,
        half_flop=flops_per_s / half_flops_per_s,
    )
