"""Describes a GPU that is not there to JAX's compiler.

JAX's CUDA plugin compiles without a driver, for a device whose units it is told
(:class:`keras_remat.core.target.Chip`). A step is lowered for CUDA and compiled for that device,
and ``memory_analysis()`` is the buffer assignment of XLA:GPU. Neither cuDNN nor a GPU is asked, so
the scratch memory of a library's kernels is not in the bytes.

Buffers are assigned before kernels are written. A step compiled here never runs, so its compilation
ends there, in a process of its own (:mod:`keras_remat.backends.jax.hlo`).

Reference: ``jax.experimental.topologies``; the fields are those of XLA's ``GpuDeviceInfoProto``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
from jax.experimental import topologies

from keras_remat.backends.versions import check_card_compiler
from keras_remat.backends.xla.card_compiler import CardCompiler
from keras_remat.core.target import Target
from keras_remat.errors import UnsupportedModelError

_CONFIGURATION = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {chip.shared_bytes_per_core}
  shared_memory_per_block_optin: {chip.shared_bytes_per_block}
  threads_per_core_limit: {chip.threads_per_core}
  core_count: {chip.cores}
  fpus_per_core: {chip.fpus_per_core}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {chip.bytes_per_s}
  l2_cache_size: {chip.l2_bytes}
  clock_rate_ghz: {chip.clock_ghz}
  device_memory_size: {memory}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 7 }}
runtime_version {{ major: 12 minor: 8 patch: 0 }}
device_description_str: "{chip.name}"
"""


_ASSEMBLER = """#!/bin/sh
if [ "$1" = --version ]; then
    echo "Cuda compilation tools, release 12.9, V12.9.86"
    exit 0
fi
while [ "$#" -gt 0 ]; do
    if [ "$1" = -o ]; then echo nothing > "$2"; fi
    shift
done
"""


@contextmanager
def compiler_options(written: Path | None = None) -> Iterator[dict[str, Any]]:
    """Yields the options with which a step is compiled for a card that is not there.

    No kernels are tried, and a stand-in takes the place of NVIDIA's assembler. If the stand-in
    cannot be run, XLA finds the real one. The stand-in's folder exists only while one step is
    compiled: the code that removes a folder when a process ends does not run in every process.

    Args:
        written: folder for the files that XLA writes on its way, as text.
    """
    with TemporaryDirectory(prefix="keras_remat_") as folder:
        assembler = Path(folder) / "bin" / "ptxas"
        assembler.parent.mkdir()
        assembler.write_text(_ASSEMBLER, encoding="ascii")
        assembler.chmod(0o700)
        options = {"xla_gpu_autotune_level": 0, "xla_gpu_cuda_data_dir": folder}
        if written is not None:
            options |= {"xla_dump_to": str(written), "xla_dump_hlo_as_text": True}
        yield options


@cache
def compiler() -> CardCompiler:
    """Returns the compiler for cards: one process for all steps.

    Raises:
        MissingPackageError, UnsupportedModelError: see
            :func:`~keras_remat.backends.versions.check_card_compiler`.
    """
    return CardCompiler()


def lowered(step: Callable[[Any, Any], Any], state: Any, batch: Any) -> Any:
    """Writes ``(state, batch) → (logs, state)`` down for a GPU, with the state donated.

    Args:
        step: the step.
        state, batch: their shapes and dtypes.

    Raises:
        UnsupportedModelError: JAX writes an operation down only for a device that is there.
    """
    traced = jax.jit(step, donate_argnums=0).trace(state, batch)
    try:
        return traced.lower(lowering_platforms=("cuda",))
    except ValueError as error:
        raise UnsupportedModelError(
            f"The step cannot be written down for a card that is not there: {error}. Calls of "
            "Python while a step runs, such as jax.debug.print, cannot."
        ) from error


def device(target: Target) -> Any:
    """Returns a card that is not there as JAX's compiler knows it.

    JAX takes its plugin as a compiler only where ``JAX_PLATFORMS`` is ``cpu``, as in the process
    that compiles. If its compiler does not take the card, its error passes through.

    Raises:
        MissingPackageError, UnsupportedModelError: see
            :func:`~keras_remat.backends.versions.check_card_compiler`.
    """
    check_card_compiler()
    major, minor = target.capability or (0, 0)
    text = _CONFIGURATION.format(
        chip=target.chip, memory=target.total_bytes, major=major, minor=minor
    )
    topology = topologies.get_topology_desc(platform="cuda", target_config=text, topology="1x1x1")
    (card,) = topology.devices
    return card
