"""Lists the oldest and newest tested versions for each backend, and refuses older ones.

A name missing in an older version may be noticed late: on JAX some names are first used in
mid-``fit``. So versions are compared before a backend is imported. ``.ci/versions.py`` installs the
versions of :data:`OLDEST`, or the newest released ones, and runs the backends' tests on them.
"""

from __future__ import annotations

import re
from importlib import import_module, metadata

from keras_remat.errors import MissingPackageError, UnsupportedModelError

#: Framework → module → its oldest version that works.
OLDEST = {
    "tensorflow": {"tensorflow": "2.18", "keras": "3.9"},
    "jax": {"jax": "0.10.0", "keras": "3.12"},
    "torch": {"torch": "2.11", "keras": "3.12"},
}
#: Framework → module → newest release that was tested. Newer ones are not refused.
NEWEST = {
    "tensorflow": {"tensorflow": "2.21", "keras": "3.15"},
    "jax": {"jax": "0.12.0", "keras": "3.15"},
    "torch": {"torch": "2.14", "keras": "3.15"},
}
#: As :data:`OLDEST`, for training on several devices: Keras's metrics under a strategy.
OLDEST_FOR_REPLICAS = {"keras": "3.10"}
#: Packages that compile for an absent card; the first two have JAX's version number.
PLUGIN, COMPILER, ASSEMBLER = "jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12"
_PURPOSE = "Compiling for a card that is not there"
_NAMES = {"tensorflow": "TensorFlow", "jax": "JAX", "torch": "PyTorch", "keras": "Keras"}


def check_versions(framework: str) -> None:
    """Raises :class:`UnsupportedModelError` where a version is too old for a framework's backend.

    Args:
        framework: a key of :data:`OLDEST`; Keras runs on it.
    """
    reason = too_old(framework)
    if reason:
        raise UnsupportedModelError(reason)


def too_old(framework: str) -> str:
    """Returns which versions are too old for a framework's backend and what to install, or ``""``.

    Args:
        framework: a key of :data:`OLDEST`; Keras runs on it.
    """
    return sentence_for(f"Keras on {_NAMES[framework]}", OLDEST[framework])


def sentence_for(what: str, oldest: dict[str, str]) -> str:
    """Returns a sentence on installed versions that are too old, or ``""``.

    Args:
        what: subject of the sentence, which needs the versions.
        oldest: module → its oldest version.
    """
    installed = {name: str(import_module(name).__version__) for name in oldest}
    old = [name for name in oldest if _release(installed[name]) < _release(oldest[name])]
    if not old:
        return ""
    needs = " and ".join(f"{_NAMES[name]} {oldest[name]}" for name in old)
    has = " and ".join(installed[name] for name in old)
    command = " ".join(f"'{name}>={oldest[name]}'" for name in old)
    return f"{what} needs {needs} or newer; installed: {has}. Run: pip install -U {command}"


def check_card_compiler() -> None:
    """Raises where the packages that compile for an absent card are missing, or do not have JAX's
    version number. Nothing is imported.

    Raises:
        MissingPackageError: a package is not installed.
        UnsupportedModelError: JAX and its plugin have different versions.
    """
    installed = {}
    for package in ("jax", PLUGIN, COMPILER, ASSEMBLER):
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            raise MissingPackageError(package, _PURPOSE, "cards") from None
    for package in (PLUGIN, COMPILER):
        if installed[package] != installed["jax"]:
            raise UnsupportedModelError(
                f"{_PURPOSE} needs {package} of JAX's own version: it is {installed[package]}, and "
                f"JAX is {installed['jax']}. Run: pip install {package}=={installed['jax']}"
            )


def _release(version: str) -> tuple[int, ...]:
    """Returns the numbers of a release: (2, 18, 0) of ``2.18.0rc1``, (2, 18) of ``2.18``."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])
