"""Makes a CPU's memory measurable, before TensorFlow makes its first tensor."""

from __future__ import annotations

from importlib import import_module


def enable_cpu_memory_stats() -> bool:
    """Asks TensorFlow for a CPU allocator that keeps statistics, where its own keeps none.

    Without statistics nothing can be measured on a CPU: no peak, no saving, no batch size. oneDNN's
    allocator keeps them, but TensorFlow leaves oneDNN off on many CPUs (AMD Zen 1 to 3, most
    desktop chips, Arm, macOS). There this function asks for the allocator that TensorFlow uses on
    GPUs, "BFC", by the environment variable ``TF_CPU_ALLOCATOR_USE_BFC``. It does nothing on a GPU,
    where oneDNN is on, and where the variable is set already.

    The other way to statistics is oneDNN itself, ``TF_ENABLE_ONEDNN_OPTS=1`` in the environment. It
    must be set before TensorFlow is imported, and it changes the kernels, so that every number of
    the training changes a little. BFC changes only where tensors lie, so this function asks for BFC
    and leaves oneDNN to you. oneDNN may be worth it: ``benchmarks/cpu_allocators.py --isa AVX2`` (a
    U-Net, a batch of 8, 128 pixels, 2 cores, TensorFlow 2.21, 2026-11-22) measured CPU seconds per
    plain step of 1.21 without statistics, 1.10 with BFC and 0.65 with oneDNN. A plan's peak was
    predicted as 146.7 MiB and measured as 133.8 with BFC; with oneDNN 121.1 and 121.2.

    Call it before TensorFlow makes its first tensor or lists its logical devices. Right after
    ``import tensorflow`` or ``import keras`` is early enough. ::

        import keras_remat

        keras_remat.enable_cpu_memory_stats()

    Returns:
        Whether TensorFlow's allocator keeps statistics, or will. ``False`` means that it is too
        late, that the variable was set to 0, or that Keras does not run on TensorFlow.
    """
    import keras

    if keras.backend.backend() != "tensorflow":
        return False
    measure = import_module("keras_remat.backends.tensorflow.memory.measure")
    return bool(measure.enable_cpu_statistics())
