"""Problem files: exact round trips, and a refusal with file, field and value for everything
malformed."""

import copy
import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_problems import mixed_problem

from keras_remat.core.graph import Graph, Op, Value
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule
from keras_remat.core.serialize import (
    load_problem,
    problem_from_dict,
    problem_to_dict,
    read_json,
    save_problem,
    write_json,
)
from keras_remat.core.simulate import simulate
from keras_remat.errors import InvalidProblemError

RICH = Problem(
    Graph(
        (
            Op(0, "conv", "Conv2D", (0,), (1, 2), "forward", True),
            Op(1, "grad \u2028 <b>\"'", "", (1, 1), (3,), "backward", True, (0,), (1,)),
            Op(2, "assign", "AssignVariableOp", (3,), (), "update", False, (0, 1)),
        ),
        (
            Value(0, "w", 8, (2,), "float32"),
            Value(1, "y", 4, (), "float16", 0),
            Value(2, "", 0, None, None, 0),
            Value(3, "g", 4, producer=1),
        ),
        (3,),
    ),
    Profile(
        (0.1, 1e-300, 0.30000000000000004),
        (0, 2**60, 1),
        12,
        "estimated",
        "GPU:0",
        "tensorflow",
    ),
    2**61,
    "rich 😀",
)


def test_unknown_fields_of_older_files_and_of_later_ones_are_ignored():
    more = {"pool": {"free_chunks": [[0, 1]]}, "comment": "hello"}
    assert problem_from_dict({**problem_to_dict(RICH), **more}) == RICH


def test_round_trip_of_everything_a_problem_can_hold(tmp_path):
    save_problem(RICH, tmp_path / "p.json")
    assert load_problem(tmp_path / "p.json") == RICH
    assert load_problem(str(tmp_path / "p.json")).graph.fingerprint == RICH.graph.fingerprint


def test_round_trip_of_random_problems():
    for seed in range(300):
        problem = mixed_problem(seed)
        assert problem_from_dict(json.loads(json.dumps(problem_to_dict(problem)))) == problem, seed


@settings(max_examples=25, deadline=None)
@given(
    st.floats(min_value=0, allow_nan=False, allow_infinity=False),
    st.integers(min_value=0, max_value=2**200),
    st.text(),
)
def test_round_trip_of_any_number_and_name(seconds, nbytes, name):
    graph = Graph((Op(0, name, name, (), (0,)),), (Value(0, name, nbytes, producer=0),), (0,))
    problem = Problem(graph, Profile((seconds,), (nbytes,), nbytes), nbytes + 1, name)
    twin = problem_from_dict(json.loads(json.dumps(problem_to_dict(problem))))
    assert twin == problem
    assert math.copysign(1, twin.profile.op_time_s[0]) == math.copysign(1, seconds)


def test_documented_minimum_is_enough():
    problem = problem_from_dict(
        {
            "format": "keras_remat.problem",
            "version": 1,
            "name": "m",
            "resident_bytes": 3,
            "budget_bytes": None,
            "values": [{"name": "w", "bytes": 5}, {"name": "y", "bytes": 2}],
            "ops": [
                {
                    "name": "f",
                    "phase": "forward",
                    "time_s": 1,
                    "workspace_bytes": 0,
                    "recomputable": True,
                    "inputs": [0],
                    "outputs": [1],
                }
            ],
            "outputs": [1],
        }
    )
    assert problem.graph.values[0].producer is None
    assert problem.graph.ops[0].after == problem.graph.ops[0].may_reuse == ()
    assert simulate(problem, Schedule((0,))).peak_bytes == 5


def edited(path, value):
    """RICH's document with the field at ``path`` replaced, or removed when ``value`` is ``...``."""
    document = copy.deepcopy(problem_to_dict(RICH))
    target = document
    for key in path[:-1]:
        target = target[key]
    if value is ...:
        del target[path[-1]]
    else:
        target[path[-1]] = value
    return document


MALFORMED = [
    (("format",), "other", "format", "'other'"),
    (("format",), ..., "format", "None"),
    (("version",), 2, "version", "2"),
    (("version",), True, "version", "True"),
    (("version",), ..., "version", "None"),
    (("name",), 3, "name", "3"),
    (("resident_bytes",), -1, "resident_bytes", "-1"),
    (("resident_bytes",), 1.5, "resident_bytes", "1.5"),
    (("resident_bytes",), None, "resident_bytes", "None"),
    (("budget_bytes",), 0, "budget_bytes", "0"),
    (("budget_bytes",), -8, "budget_bytes", "-8"),
    (("budget_bytes",), "8GiB", "budget_bytes", "'8GiB'"),
    (("budget_bytes",), True, "budget_bytes", "True"),
    (("source",), "guessed", "source", "'guessed'"),
    (("values",), ..., "values", "missing"),
    (("values",), {}, "values", "{}"),
    (("values", 1), 7, "values[1]", "7"),
    (("values", 1, "bytes"), ..., "values[1].bytes", "missing"),
    (("values", 1, "bytes"), -4, "values[1].bytes", "-4"),
    (("values", 1, "bytes"), 4.0, "values[1].bytes", "4.0"),
    (("values", 1, "bytes"), True, "values[1].bytes", "True"),
    (("values", 1, "bytes"), math.nan, "values[1].bytes", "nan"),
    (("values", 0, "shape"), "2", "values[0].shape", "'2'"),
    (("values", 0, "shape"), [None], "values[0].shape", "None"),
    (("values", 0, "shape"), [1.5], "values[0].shape", "1.5"),
    (("values", 0, "dtype"), 5, "values[0].dtype", "5"),
    (("ops",), None, "ops", "None"),
    (("ops", 0), [], "ops[0]", "[]"),
    (("ops", 0, "time_s"), ..., "ops[0].time_s", "missing"),
    (("ops", 0, "time_s"), math.nan, "ops[0].time_s", "nan"),
    (("ops", 0, "time_s"), math.inf, "ops[0].time_s", "inf"),
    (("ops", 0, "time_s"), -0.1, "ops[0].time_s", "-0.1"),
    (("ops", 0, "time_s"), "1", "ops[0].time_s", "'1'"),
    (("ops", 0, "time_s"), 10**400, "ops[0].time_s", "finite"),
    (("ops", 0, "workspace_bytes"), -1, "ops[0].workspace_bytes", "-1"),
    (("ops", 0, "recomputable"), 1, "ops[0].recomputable", "1"),
    (("ops", 0, "phase"), "sideways", "ops[0].phase", "'sideways'"),
    (("ops", 0, "inputs"), ..., "ops[0].inputs", "missing"),
    (("ops", 0, "inputs"), [9], "ops[0].inputs", "9"),
    (("ops", 0, "inputs"), [-1], "ops[0].inputs", "-1"),
    (("ops", 0, "inputs"), ["0"], "ops[0].inputs[0]", "'0'"),
    (("ops", 0, "inputs"), [0, True], "ops[0].inputs[1]", "True"),
    (("ops", 0, "inputs"), [3], "ops[0].inputs", "G1"),
    (("ops", 1, "inputs"), [3], "ops[1].inputs", "G1"),
    (("ops", 1, "outputs"), [1], "ops[1].outputs", "G3"),
    (("ops", 1, "outputs"), [2], "ops[1].outputs", "G2: value 2 has two producers, ops 0 and 1"),
    (("ops", 2, "outputs"), [1], "ops[2].outputs", "G2: value 1 has two producers, ops 0 and 2"),
    (("ops", 0, "outputs"), [1, 1], "ops[0].outputs", "G2"),
    (("ops", 2, "outputs"), [12], "ops[2].outputs", "12"),
    (("ops", 1, "after"), [1], "ops[1].after", "G1"),
    (("ops", 1, "after"), [99], "ops[1].after", "99"),
    (("ops", 1, "may_reuse"), [2], "ops[1].may_reuse", "(2,)"),
    (("outputs",), [4], "outputs[0]", "4"),
    (("outputs",), [1.0], "outputs[0]", "1.0"),
    (("outputs",), ..., "outputs", "missing"),
]


@pytest.mark.parametrize(("path", "value", "field", "part"), MALFORMED)
def test_malformed_files_are_refused_with_file_field_and_value(tmp_path, path, value, field, part):
    file = tmp_path / "bad.json"
    file.write_text(json.dumps(edited(path, value)))
    with pytest.raises(InvalidProblemError) as caught:
        load_problem(file)
    assert caught.value.source == str(file)
    assert caught.value.field == field
    for expected in (str(file), field, part):
        assert expected in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "not json",
        "[1, 2]",
        "null",
        "3",
        '"text"',
        "[" * 100_000,
        '{"format": ' + "9" * 5000 + "}",
    ],
    ids=[
        "empty",
        "cut off",
        "prose",
        "list",
        "null",
        "number",
        "string",
        "nested too deep",
        "absurd number",
    ],
)
def test_files_that_hold_no_json_object(tmp_path, text):
    file = tmp_path / "bad.json"
    file.write_text(text)
    with pytest.raises(InvalidProblemError) as caught:
        load_problem(file)
    assert caught.value.source == str(file)


def test_binary_files(tmp_path):
    (tmp_path / "bad.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidProblemError, match="not a JSON file"):
        load_problem(tmp_path / "bad.json")


def test_missing_files_and_folders(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_problem(tmp_path / "none.json")
    with pytest.raises(IsADirectoryError):
        load_problem(tmp_path)
    with pytest.raises(FileNotFoundError):
        save_problem(RICH, tmp_path / "no" / "folder.json")


def test_writing_replaces_whole_files_and_leaves_nothing_behind(tmp_path):
    file = tmp_path / "p.json"
    save_problem(RICH, file)
    before = file.read_bytes()
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json({"x": math.nan}, file)
    with pytest.raises(TypeError):
        write_json({"x": object()}, file)
    assert file.read_bytes() == before
    assert os.listdir(tmp_path) == ["p.json"]


def test_two_writers_of_one_file_do_not_share_a_temporary_one(tmp_path, monkeypatch):
    """One that wrote all of it puts it in place, while another one begins to write."""
    file, replace_file = tmp_path / "p.json", Path.replace

    def overtaken(temporary, target):
        monkeypatch.setattr(Path, "replace", replace_file)
        write_json({"by": "another"}, file)
        return temporary.replace(target)

    monkeypatch.setattr(Path, "replace", overtaken)
    write_json({"by": "one"}, file)
    assert json.loads(file.read_text()) == {"by": "one"}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_json({"x": 1}, pipe)
        assert json.loads(os.read(reader, 100)) == {"x": 1}
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert os.listdir(tmp_path) == ["pipe"]


def test_a_link_stays_a_link(tmp_path):
    link, target = tmp_path / "link", tmp_path / "target"
    target.write_text("{}")
    link.symlink_to(target)
    write_json({"x": 1}, link)
    assert link.is_symlink()
    assert json.loads(target.read_text()) == {"x": 1}


def test_read_json_checks_the_format_it_is_asked_for(tmp_path):
    write_json({"format": "keras_remat.plan", "version": 3}, tmp_path / "p.json")
    assert read_json(tmp_path / "p.json", "keras_remat.plan", 3)["version"] == 3
    with pytest.raises(
        InvalidProblemError, match=r"expected 'keras_remat\.problem', got 'keras_remat\.plan'"
    ):
        load_problem(tmp_path / "p.json")


FOLDER = os.environ.get("KERAS_REMAT_GRAPHS")
PEAK_AND_FLOOR_GB = {
    "vgg16_b256": (15.825, 13.153),
    "unet_b32": (20.959, 8.288),
    "mobilenet_b512": (34.701, 6.636),
    "resnet50_b256": (38.059, 3.699),
}


@pytest.mark.skipif(FOLDER is None, reason="KERAS_REMAT_GRAPHS names no folder of problem files")
@pytest.mark.parametrize("name", PEAK_AND_FLOOR_GB)
def test_published_graphs_have_their_published_peak_and_floor(name):
    problem = load_problem(Path(FOLDER or "") / f"{name}.json")
    peak = simulate(problem, Schedule.store_all(problem.graph)).peak_bytes
    assert (round(peak / 1e9, 3), round(problem.floor_bytes / 1e9, 3)) == PEAK_AND_FLOOR_GB[name]
    assert problem_from_dict(problem_to_dict(problem)) == problem
