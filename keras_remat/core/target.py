"""Describes where a step will run: on the live device, or on a card that need not be there.

Everything that depends on the device asks its :class:`Target`: how a schedule is written, for which
device it is compiled, which bytes are added to it, and what its ops cost. A backend makes the
target of the live device (:func:`live`); :mod:`keras_remat.cards.table` holds those of cards.

Times follow a roofline: the slower of arithmetic and traffic, plus a launch. Only the ratios of
times decide about a plan.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Holds the costs of a device's arithmetic and traffic.

    Args:
        seconds_per_flop: seconds per flop of a 32-bit matrix product; multiplications and additions
            are counted apart.
        seconds_per_byte: seconds per byte read or written.
        seconds_per_kernel: seconds per launch of a kernel.
        half_flop: cost of a flop in a 16-bit product, in flops of a 32-bit one.
        expensive_flops: cost of an exponential or the like, in flops of a product.
        random_flops: cost of a random number, in flops of a product.
        grouped_factor: cost of a flop of a grouped convolution, in flops of a dense one.
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
"""Rates of a GPU that is in no table: guesses of the order of magnitude, not measured."""


@dataclass(frozen=True, kw_only=True)
class Chip:
    """Holds the numbers that a compiler needs of a card that is not there.

    Args:
        name: name that the driver reports.
        cores: number of streaming multiprocessors.
        fpus_per_core: number of 32-bit units of each multiprocessor.
        clock_ghz: boost clock in GHz.
        bytes_per_s: bandwidth of the memory.
        l2_bytes: bytes of the second-level cache.
        shared_bytes_per_core: bytes of shared memory of a multiprocessor.
        shared_bytes_per_block: bytes of shared memory that one block can ask for.
        threads_per_core: number of threads that are resident on a multiprocessor at once.
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
        device: name for people, such as ``"gpu:0 NVIDIA H100 80GB HBM3"``.
        rates: costs of its arithmetic and traffic.
        card: name of the card, in the table of cards or one's own; ``None`` for the live device.
        capability: CUDA's compute capability; ``None`` where there is none, or it is not known.
        total_bytes: bytes of its memory; ``None`` where the live device is to be asked.
        usable_bytes: bytes of its memory that a framework uses by default.
        chip: numbers that a compiler needs; ``None`` for the live device.
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
        """Returns the bytes of all its memory; a framework uses fewer by default.

        Raises:
            ValueError: ``total_bytes`` is not known.
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
        """Returns whether it is known to be a GPU from before NVIDIA's Ampere.

        Such a GPU has no units for bfloat16, and XLA leaves its matrix products to cuBLAS.
        """
        return self.on_gpu and self.capability is not None and self.capability < (8, 0)


def live(platform: str, device: str, capability: tuple[int, int] | None = None) -> Target:
    """Returns the target of a device that is there.

    Args:
        platform: ``"cpu"`` or ``"gpu"``.
        device: name for people.
        capability: CUDA's compute capability, where it is known.
    """
    rates = CPU_RATES if platform == "cpu" else GPU_RATES
    return Target(platform=platform, device=device, rates=rates, capability=capability)


def gpu_rates(flops_per_s: float, half_flops_per_s: float, bytes_per_s: float) -> Rates:
    """Returns a GPU's rates from its data sheet; the other rates are those of any GPU.

    Args:
        flops_per_s: flops per second of 32-bit matrix products, as frameworks compute them by
            default: in TF32 where the card has it.
        half_flops_per_s: flops per second of 16-bit products, summed in 32 bits.
        bytes_per_s: bandwidth of the memory.
    """
    return replace(
        GPU_RATES,
        seconds_per_flop=1 / flops_per_s,
        seconds_per_byte=1 / bytes_per_s,
        half_flop=flops_per_s / half_flops_per_s,
    )
