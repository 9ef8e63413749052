"""Ask XLA:GPU what a TensorFlow step takes on a card that is not there.

TensorFlow itself compiles for devices that are there only. So the step is lowered to HLO here, and
compiled by JAX's compiler in a process of its own (:mod:`keras_remat.backends.jax.hlo`), which is
started with the first step and ends with the compiler object.

Known limits: TensorFlow lowers for its CPU, and few of its operations do that otherwise for a GPU;
neither cuDNN's nor cuBLAS's scratch memory is in the bytes.
"""

from __future__ import annotations

import pickle
import subprocess
import tempfile
import weakref
from threading import Lock
from typing import Any

from keras_remat.backends.tensorflow.memory.measure import TensorFlowDevice
from keras_remat.backends.versions import check_card_compiler
from keras_remat.core import interpreter
from keras_remat.core.target import Target
from keras_remat.errors import UnsupportedModelError

_ERRORS_SHOWN = 500


class CardCompiler:
    """Compiles steps for cards, one after the other.

    Raises:
        MissingPackageError, UnsupportedModelError: see
            :func:`~keras_remat.backends.versions.check_card_compiler`.
    """

    def __init__(self) -> None:
        check_card_compiler()
        self._one_at_a_time = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with this object
        weakref.finalize(self, self._errors.close)

    def added_bytes(self, module: bytes, target: Target) -> int:
        """Returns what a call of a step takes beside its arguments; any thread may ask.

        Args:
            module: of :func:`keras_remat.backends.tensorflow.private.serialized_hlo`.
            target: the card.

        Raises:
            UnsupportedModelError: XLA does not compile it.
        """
        with self._one_at_a_time:
            answer = self._answer(module, target)
        if isinstance(answer, Exception):
            raise answer
        return int(answer.added_bytes)

    def _answer(self, module: bytes, target: Target) -> Any:
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            pickle.dump((target, module), process.stdin)
            process.stdin.flush()
            return pickle.load(process.stdout)
        except (EOFError, BrokenPipeError):
            status = process.wait()
            self._errors.seek(0)
            told = self._errors.read().decode(errors="replace").strip()[-_ERRORS_SHOWN:]
            raise UnsupportedModelError(
                f"The process that compiles for cards ended with {status}, for want of "
                f"memory for instance. It said: {told}"
            ) from None

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._process = interpreter.start(
                "-m", "keras_remat.backends.jax.hlo", variables=interpreter.for_cards(),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            )  # fmt: skip
            weakref.finalize(self, _end, self._process)
        return self._process


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the process; what it compiles is lost."""
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


class AbsentDevice(TensorFlowDevice):
    """Stands for a card that is not there: no step runs, and nothing of it is measured.

    Args:
        target: the card.
    """

    has_statistics = False
    grows = True

    def __init__(self, target: Target) -> None:
        super().__init__()
        self._target, self.name = target, target.device

    def remark(self) -> str | None:
        """Returns nothing: no allocator is known."""
        return None

    def in_use_bytes(self) -> int:
        """Returns 0: nothing is in use."""
        return 0

    def peak_bytes(self) -> int:
        """Returns 0: nothing runs."""
        return 0

    def total_bytes(self) -> int:
        """Returns all the memory of the card."""
        return self._target.memory_bytes

    def limit_source(self) -> str:
        """Returns in words where :meth:`total_bytes` comes from."""
        return "the table of cards"
