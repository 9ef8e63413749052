"""Reports what PyTorch can measure on this machine, for ``keras-remat doctor``."""

from __future__ import annotations

from typing import Any

import torch

from keras_remat.backends.torch.device import CpuDevice, live_device


def diagnosis() -> dict[str, Any]:
    """Returns the facts by name: about the device, its memory, its kernels and XLA."""
    device = live_device()
    on_cpu = isinstance(device, CpuDevice)
    name = "" if on_cpu else f" {torch.cuda.get_device_name()}"
    return {
        "device": f"{device.name}{name}",
        "allocator": "default" if on_cpu else str(torch.cuda.get_allocator_backend()),
        "statistics": device.has_statistics,
        "peaks": "peaks are those of the profiler's memory events"
        if on_cpu
        else "peaks are measured",
        "limit_bytes": device.total_bytes(),
        "limit_source": "what machine, container and address space have left"
        if on_cpu
        else "what is free on the card, and what the process was given of it",
        "in_use_bytes": device.in_use_bytes(),
        "kernels_timed": True,
        "kernels": "timed by the clock" if on_cpu else "timed by CUDA events",
        "xla": False,
        "xla_detail": "PyTorch's steps run op by op",
        "advice": [_why_on_cpu()] if on_cpu else [],
    }


def _why_on_cpu() -> str:
    if torch.version.cuda is None:
        return "This PyTorch is built for CPUs. A GPU needs a build for CUDA: https://pytorch.org."
    if not torch.cuda.is_available():
        return (
            f"PyTorch is built for CUDA {torch.version.cuda} and finds no GPU. See what nvidia-smi "
            "says, and CUDA_VISIBLE_DEVICES."
        )
    return "PyTorch finds a GPU, and Keras was told to train on the CPU."
