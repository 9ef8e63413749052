"""Whether a CPU's memory can be measured, decided before TensorFlow makes its first tensor."""

from __future__ import annotations

from importlib import import_module


def enable_cpu_memory_stats() -> bool:
    """Asks TensorFlow for a CPU allocator that keeps statistics, where its own keeps none.

    Without statistics nothing can be measured on a CPU: no peak, no saving, no batch size. oneDNN's
    allocator keeps them, but TensorFlow leaves oneDNN off on many CPUs (AMD Zen 1 to 3, most desktop
    chips, Arm, macOS). There this asks for the allocator that TensorFlow uses on GPUs, "BFC", by the
    environment variable ``TF_CPU_ALLOCATOR_USE_BFC``. It does nothing on a GPU, where oneDNN is on,
    and where the variable is set already.

    Call it before TensorFlow makes its first tensor, or asks for its logical devices. After
    ``import tensorflow`` or ``import keras`` is early enough. ::

        import keras_remat

        keras_remat.enable_cpu_memory_stats()

    Returns:
        Whether TensorFlow's allocator keeps statistics, or will. ``False`` says that it is too late,
        that the variable was set to 0, or that Keras does not run on TensorFlow.
    """
    import keras

    if keras.backend.backend() != "tensorflow":
        return False
    measure = import_module("keras_remat.backends.tensorflow.memory.measure")
    return bool(measure.enable_cpu_statistics())
