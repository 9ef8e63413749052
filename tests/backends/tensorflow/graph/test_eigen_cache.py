"""The third cache as Eigen sees it."""

import pytest

from keras_remat.backends.tensorflow.graph import eigen_cache
from keras_remat.backends.tensorflow.graph.eigen_cache import third_cache_bytes
from keras_remat.units import KIB, MIB


@pytest.fixture(autouse=True)
def _nothing_is_known():
    third_cache_bytes.cache_clear()
    yield
    third_cache_bytes.cache_clear()


@pytest.mark.parametrize("nbytes", [512 * KIB, 8 * MIB, 33 * MIB, 384 * MIB, 511 * MIB])
def test_the_fewest_voxels_that_gather_patches_tell_the_cache(nbytes, monkeypatch):
    """A kernel gathers a 31st part of the cache, unless that is over 25 times its operands."""

    def gathers(voxels, device):
        patches = -(-(nbytes // 4) // 31)
        return patches // eigen_cache._elements(voxels) <= 25

    monkeypatch.setattr(eigen_cache.TensorFlowDevice, "has_statistics", True)
    monkeypatch.setattr(eigen_cache, "_gathers", gathers)
    assert third_cache_bytes() == pytest.approx(nbytes, rel=0.1 if nbytes < MIB else 0.01)


@pytest.mark.parametrize(
    ("statistics", "gathers", "told", "expected"),
    [(False, True, "32768K\n", 32 * MIB), (True, False, "8K\n", 8 * KIB), (False, True, None, 0)],
)
def test_where_it_cannot_be_seen_linux_tells_it(
    statistics, gathers, told, expected, tmp_path, monkeypatch
):
    file = tmp_path / "size"
    if told is not None:
        file.write_text(told)
    monkeypatch.setattr(eigen_cache, "_TOLD_BY_SYSTEM", file)
    monkeypatch.setattr(eigen_cache.TensorFlowDevice, "has_statistics", statistics)
    monkeypatch.setattr(eigen_cache, "_gathers", lambda voxels, device: gathers)
    assert third_cache_bytes() == expected
