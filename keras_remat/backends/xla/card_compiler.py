"""Asks XLA:GPU for the memory of a step on a card that is not there.

Another process compiles the steps (:mod:`keras_remat.backends.jax.hlo`). It starts with the first
step and ends with the compiler object. So the caller may run on any framework and device, and a
compilation can stop early. A card's bytes are known as soon as buffers are assigned. Writing the
kernels, which nobody runs, would take two thirds of the time (20 of 29 s of a core for MobileNetV2
on an H100).

Known limit: neither cuDNN's nor cuBLAS's scratch memory is in the bytes.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import tempfile
import weakref
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from keras_remat.backends.versions import check_card_compiler
from keras_remat.core import interpreter
from keras_remat.core.target import Target
from keras_remat.errors import UnsupportedModelError

#: Most characters of the process's output that an error quotes.
_ERRORS_SHOWN = 500


@dataclass(frozen=True, kw_only=True)
class CardStep:
    """Holds the memory and the module of a step that XLA:GPU compiled without its kernels.

    Names are those of ``jax.stages.Compiled`` and of its memory analysis.

    Args:
        argument_size_in_bytes: bytes of state and batch.
        output_size_in_bytes: bytes of logs and new state.
        alias_size_in_bytes: bytes of the outputs that lie in donated arguments.
        temp_size_in_bytes: bytes alive only during the call.
        text: the optimized module, its instructions in the order they run.
    """

    argument_size_in_bytes: int = 0
    output_size_in_bytes: int = 0
    alias_size_in_bytes: int = 0
    temp_size_in_bytes: int = 0
    text: str = field(default="", repr=False)

    @property
    def added_bytes(self) -> int:
        """Returns the bytes a call takes beside its arguments."""
        return self.output_size_in_bytes - self.alias_size_in_bytes + self.temp_size_in_bytes

    def memory_analysis(self) -> CardStep:
        """Returns the sizes of the buffer assignment."""
        return self

    def as_text(self) -> str:
        """Returns the optimized module."""
        return self.text


class CardCompiler:
    """Compiles steps for cards, one after the other.

    Raises:
        MissingPackageError, UnsupportedModelError: see
            :func:`~keras_remat.backends.versions.check_card_compiler`.
    """

    def __init__(self) -> None:
        check_card_compiler()
        self._one_at_a_time, self._starting = Lock(), Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.TemporaryDirectory(
            prefix="keras_remat_", ignore_cleanup_errors=True
        )
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with this object
        weakref.finalize(self, self._errors.close)

    def begin(self) -> None:
        """Starts the process where it does not run, so that it is ready for the first step."""
        self._started()

    def compiled(self, module: bytes, target: Target) -> CardStep:
        """Compiles a step and returns its memory and module; any thread may call it.

        Args:
            module: StableHLO bytecode, or a serialized ``HloModuleProto``.
            target: the card.

        Raises:
            UnsupportedModelError: XLA does not compile it.
        """
        with self._one_at_a_time:
            answer = self._answer(module, target)
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, CardStep)
        return answer

    def _answer(self, module: bytes, target: Target) -> Any:
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            pickle.dump((target, module), process.stdin)
            process.stdin.flush()
            return pickle.load(process.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):  # the last: of half an answer
            status = process.wait()
            self._errors.seek(0)
            told = self._errors.read().decode(errors="replace").strip()[-_ERRORS_SHOWN:]
            raise UnsupportedModelError(
                f"The process that compiles for cards ended with {status}, for want of "
                f"memory for instance. It said: {told}"
            ) from None
        except BaseException:  # Ctrl-C: the answer that is to come is not that of the next step
            _end(process)
            raise

    def _started(self) -> subprocess.Popen[bytes]:
        with self._starting:
            if self._process is None or self._process.poll() is not None:
                folder = self._folder.name
                os.makedirs(folder, exist_ok=True)
                self._process = interpreter.start(
                    "-m", "keras_remat.backends.jax.hlo", folder,
                    variables={**interpreter.for_cards(), "TMPDIR": folder},
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
                )  # fmt: skip
                weakref.finalize(self, _end, self._process)
            return self._process


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and its forks; running compilations are lost."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)  # it leads a session of its own
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
