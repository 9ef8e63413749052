"""Which compiled step a ``fit`` on JAX ran: of those that are compiled, not every one does."""

import re

from keras_remat.backends.jax import device, lower


class CompiledSteps:
    """Notes the steps that are compiled from here on.

    Attributes:
        newest: the step that ran last; Keras's own, which Keras runs, where no other did.
    """

    def __init__(self):
        self.newest, self._compile_step = None, lower.compile_step
        lower.compile_step = device.compile_step = self._noted

    def _noted(self, *arguments, **options):
        compiled = self._compile_step(*arguments, **options)
        self.newest = self.newest or compiled  # Keras's own is compiled first
        return _Noted(compiled, self)

    @property
    def temp_bytes(self):
        """Temporary bytes of :attr:`newest`."""
        return self.newest.memory_analysis().temp_size_in_bytes

    @property
    def reduced_arrays(self):
        """Of each of its all-reduces, how many arrays it reduces: XLA puts together what exists at
        one time."""
        found = re.findall(r"= (.*?) all-reduce\(", self.newest.as_text())
        return [len(re.findall(r"\w+\[", arrays)) for arrays in found]


class _Noted:
    """A compiled step that tells when it runs."""

    def __init__(self, compiled, steps):
        self._compiled, self._steps = compiled, steps

    def __call__(self, *arguments):
        self._steps.newest = self._compiled
        return self._compiled(*arguments)

    def __getattr__(self, name):
        return getattr(self._compiled, name)
