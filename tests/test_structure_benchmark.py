"""What the style asks a reason for has one, and the script that counts it names what has none."""

import ast

import keras
import pytest


@pytest.fixture
def structure(benchmark_of):
    return benchmark_of("structure")


def test_a_long_file_or_function_says_why_and_so_does_a_short_file(structure):
    assert structure.without_reason() == []


@pytest.mark.parametrize(
    ("docstring", "expected"),
    [
        ("One file, though long: it is a table.", True),
        ("Though a little\nlong: it is a table.", True),
        ("It lives as long as the model.", False),
        ("", False),
    ],
)
def test_a_reason_is_told_from_its_words(structure, docstring, expected):
    assert structure.has_reason(ast.parse(f'"""{docstring}"""\nx = 1')) is expected


def test_what_gives_no_reason_is_named(structure, monkeypatch, tmp_path):
    (tmp_path / "long.py").write_text("x = 1\n" * (structure.LONG_FILE + 1))
    (tmp_path / "short.py").write_text("x = 1\ny = 2\n")
    (tmp_path / "__init__.py").write_text('"""A package."""\n')
    filling = "x = 1\n" * structure.SHORT_FILE
    body = "    x = 1\n" * structure.LONG_FUNCTION
    (tmp_path / "function.py").write_text(f"{filling}def wide():\n{body}")
    monkeypatch.setattr(structure, "PACKAGE", tmp_path)
    monkeypatch.setattr(structure, "ROOT", tmp_path)
    assert structure.without_reason() == [
        f"function.py: wide is over {structure.LONG_FUNCTION} lines",
        f"long.py: {structure.LONG_FILE + 1} lines",
        "short.py: 2 lines",
    ]


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="it trains on TensorFlow")
def test_a_settled_step_calls_few_functions_of_the_package(structure):
    """Each call costs a microsecond or two where the step before left nothing in the caches."""
    frames, calls = structure.calls_of_a_step()
    assert 5 < frames <= 20
    assert 20 < calls <= 60
