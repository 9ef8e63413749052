"""Makes the pictures of the README and of these pages: a U-Net's step, plain and within 60 % of it.

    python docs/make_pictures.py

Trains the model of ``examples/quickstart.py`` for a few steps; needs the extra ``plot``. About two
minutes on two cores.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent / "examples"))

import keras  # noqa: E402
import matplotlib  # noqa: E402
import numpy as np  # noqa: E402
import quickstart  # noqa: E402

import keras_remat  # noqa: E402

PIXELS, BATCH_SIZE = 128, 8


def trained() -> keras_remat.AutotuneReport:
    """The report of a ``fit`` within 60 % of the plain peak."""
    keras_remat.enable_cpu_memory_stats()
    generator = np.random.default_rng(0)
    x = generator.random((4 * BATCH_SIZE, PIXELS, PIXELS, 3), dtype=np.float32)
    y = generator.integers(0, 2, (len(x), PIXELS, PIXELS, 1)).astype(np.float32)

    def fit(callback: keras_remat.RematAutotune) -> keras_remat.RematAutotune:
        keras.backend.clear_session()
        model = quickstart.build(PIXELS)
        model.fit(x, y, BATCH_SIZE, epochs=4, verbose=0, shuffle=False, callbacks=[callback])
        return callback

    plain = fit(keras_remat.RematAutotune(batch_size="keep")).report.baseline
    limit = plain.peak_bytes * 6 // 10
    return fit(keras_remat.RematAutotune(limit, "keep", solver_time_limit_s=20)).report


def main() -> int:
    """Writes the pictures; returns 0."""
    matplotlib.rcParams["svg.hashsalt"] = "keras-remat"  # the same picture gives the same file
    report = trained()
    folder = DOCS / "pictures"
    folder.mkdir(exist_ok=True)
    for kind in ("memory", "holders", "schedule"):
        path = folder / f"{kind}.svg"
        report.plot(kind).savefig(path, metadata={"Date": None})
        print(f"{path.relative_to(DOCS.parent)}  {path.stat().st_size / 1024:.0f} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
