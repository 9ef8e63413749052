#!/usr/bin/env python3
"""Runs what a user runs first, and the backends' tests, on the oldest or the newest versions.

    .ci/versions.py oldest                 # all frameworks, on this Python (3.11 or 3.12)
    .ci/versions.py oldest --short         # a few tests of each, as .ci/run does
    python3.13 .ci/versions.py newest --framework jax

Each framework gets a virtual environment of its own, with the package's requirements and nothing
of another framework. The oldest versions are those of ``keras_remat/backends/versions.py``.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from keras_remat.backends.versions import OLDEST  # noqa: E402

#: Framework → the extra that brings it, and what pip calls it.
EXTRAS = {"tensorflow": "tensorflow-cpu", "jax": "jax", "torch": "torch"}
TEST_TOOLS = ("hypothesis>=6.100", "pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.6")
#: Framework → the example that runs on it, its tests, and a few of them.
EXAMPLES = {
    "tensorflow": "examples/quickstart.py",
    "jax": "examples/jax_fit.py",
    "torch": "examples/torch_fit.py",
}
OF_ALL = (
    "test_accumulate.py", "test_batches.py", "test_conformance.py", "test_data.py",
    "test_fit.py", "test_versions.py",
)  # fmt: skip
SHORT = {
    "tensorflow": ("test_versions.py", "tensorflow/test_private.py", "tensorflow/test_swap.py"),
    "jax": ("test_versions.py", "jax/test_private.py", "jax/test_swap.py", "jax/test_trace.py"),
    "torch": ("test_versions.py", "torch/test_trace.py", "torch/test_fit.py"),
}
#: The first Python without wheels of the oldest versions.
TOO_NEW_FOR_OLDEST = (3, 13)


def main() -> int:
    """Returns 0 where all that was run ended well."""
    options = parsed_arguments()
    if options.versions == "oldest" and sys.version_info >= TOO_NEW_FOR_OLDEST:
        print(f"skipped: the oldest versions have no wheels for Python {sys.version.split()[0]}")
        return 0
    failed = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.environments or Path(temporary)
        for framework in options.framework or EXTRAS:
            python = installed(folder / f"{framework}-{options.versions}", framework, options)
            failed += [
                f"{framework}: {' '.join(words)}"
                for words in commands(framework, short=options.short)
                if not ends_well([python, *words], framework)
            ]
    print("\n".join(["failed:", *failed]) if failed else "all ended well")
    return 1 if failed else 0


def parsed_arguments() -> argparse.Namespace:
    """Returns the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("versions", choices=("oldest", "newest"))
    parser.add_argument("--framework", action="append", choices=EXTRAS, help="one of them")
    parser.add_argument("--short", action="store_true", help="a few tests of each")
    parser.add_argument(
        "--environments", type=Path, metavar="FOLDER", help="keeps them there (default: temporary)"
    )
    return parser.parse_args()


def installed(environment: Path, framework: str, options: argparse.Namespace) -> str:
    """Makes a virtual environment, installs the versions, and returns its interpreter."""
    python = str(environment / "bin" / "python")
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)  # or mends it
    wanted = [
        # what pip calls a framework may be another name than its module's
        {framework: EXTRAS[framework]}.get(name, name)
        + (f"=={oldest}" if options.versions == "oldest" else "")
        for name, oldest in OLDEST[framework].items()
    ]
    package = ["-e", f"{ROOT}[{EXTRAS[framework]},plot]"]
    pip = [python, "-m", "pip", "install", "-q", "-U", "--no-compile"]  # compiled where imported
    subprocess.run([*pip, *package, *wanted, *TEST_TOOLS], check=True)
    code = "from keras_remat.reporting import text; print(text.versions())"
    subprocess.run([python, "-c", code], check=True)
    return python


def commands(framework: str, *, short: bool) -> list[list[str]]:
    """Returns the arguments of each Python that is to end well."""
    tests = SHORT[framework] if short else (framework, *OF_ALL)
    pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]
    return [[EXAMPLES[framework]], [*pytest, *(f"tests/backends/{test}" for test in tests)]]


def ends_well(command: list[str], framework: str) -> bool:
    """Runs a command on a framework, and returns whether it ended well."""
    print("$", " ".join(command[1:]), flush=True)
    variables = {"KERAS_BACKEND": framework, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2"}
    started = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, env=os.environ | variables, check=False)
    print(f"exit status {done.returncode} after {time.perf_counter() - started:.0f} s", flush=True)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
