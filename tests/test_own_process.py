"""A process of its own finds the package first, and what this one finds after it."""

import os

from own_process import TESTS, environment, output_of


def test_packages_in_a_folder_of_the_search_path_are_found(monkeypatch, tmp_path):
    """As ``pip install --target`` puts them; a package of our name there is not ours."""
    for name in ("in_a_target_folder", "keras_remat"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", f"{os.pathsep}{tmp_path}")
    code = "import in_a_target_folder, keras_remat, own_process; print(keras_remat.__file__)"
    found = output_of("-c", code, env=environment())
    assert found.strip() == str(TESTS.parent / "keras_remat" / "__init__.py")


def test_no_search_path_leaves_ours_alone(monkeypatch):
    """An empty entry would be the folder that a process is started in."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    ours = os.pathsep.join((str(TESTS.parent), str(TESTS)))
    assert environment()["PYTHONPATH"] == ours
