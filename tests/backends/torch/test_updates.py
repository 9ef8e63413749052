"""Calls over lists of all weights in chunks, and ops that take over the memory of what dies."""

import keras
import pytest
import torch

from keras_remat.backends.base import load_backend
from keras_remat.backends.torch import in_place, private
from keras_remat.backends.torch.recorder import Call, Layout, Ref
from keras_remat.backends.torch.updates import chunks

aten = torch.ops.aten


def layouts(*sizes):
    return [
        Layout((n,), (1,), 0, torch.float32, torch.device("cpu"), i) for i, n in enumerate(sizes)
    ]


def call(operator, *args, outputs=(), writes=()):
    return Call(operator, args, {}, outputs, writes, "update", (), 0)


def refs(*numbers):
    return [Ref(number) for number in numbers]


def test_chunks_are_as_large_as_the_largest_tensor():
    sizes = [4, 4, 8, 2, 2, 2, 2, 1]
    whole = call(aten._foreach_mul.List, refs(*range(8)), refs(*range(8)), outputs=tuple(range(8)))
    parts = chunks(whole, layouts(*sizes), sizes)
    assert [[ref.number for ref in part.args[0]] for part in parts] == [
        [0, 1], [2], [3, 4, 5, 6], [7],
    ]  # fmt: skip
    assert [part.outputs for part in parts] == [(0, 1), (2,), (3, 4, 5, 6), (7,)]
    assert all(part.args[0] == part.args[1] for part in parts)


@pytest.mark.parametrize(
    "whole",
    [
        call(aten._foreach_norm.Scalar, refs(0, 1, 2), outputs=(0, 1, 2)),
        call(aten._foreach_mul_.Scalar, refs(0), 2.0, writes=(0,)),
        call(aten.add.Tensor, Ref(0), Ref(1), outputs=(2,)),
    ],
)
def test_what_is_no_list_of_its_own_elements_stays_whole(whole):
    assert chunks(whole, layouts(8, 8, 8), [8, 8, 8]) == [whole]


def test_a_write_in_chunks_writes_its_own():
    whole = call(aten._foreach_mul_.Scalar, refs(0, 1), 2.0, writes=(0, 1))
    assert [part.writes for part in chunks(whole, layouts(8, 8), [8, 8])] == [(0,), (1,)]


def test_no_call_of_an_optimizer_holds_all_gradients():
    """Calls that write lists return nothing, and are taken apart, too."""
    model = keras.Sequential([keras.Input((64,)), *[keras.layers.Dense(64) for _ in range(8)]])
    model.compile("adam", "mse")
    on = load_backend()
    graph = on.trace(model, on.example_batch(model, 2)).graph
    largest = max(weight.value.nbytes for weight in model.trainable_weights)
    calls = [op for op in graph.ops if op.kind.startswith("_foreach")]
    assert "_foreach_add_.List" in {op.kind for op in calls}
    for op in calls:
        temporary = (graph.values[v] for v in op.inputs if graph.values[v].producer is not None)
        assert sum(value.nbytes for value in temporary) <= 2 * largest


@pytest.mark.parametrize(
    ("operator", "written"),
    [
        (aten.add.Tensor, aten.add_.Tensor),
        (aten.relu.default, aten.relu_.default),
        (aten.addmm.default, None),  # a product: its result is not made element by element
        (aten.cat.default, None),
        (aten.add_.Tensor, None),
    ],
)
def test_only_what_works_element_by_element_is_written_in_place(operator, written):
    assert in_place.written_in_place(operator) == written


def test_what_writes_has_an_operator_that_does_not():
    assert in_place.without_writes(aten.add_.Tensor) == aten.add.Tensor
    assert in_place.without_writes(aten.add.Tensor) is None
    assert private.schema_name(aten.add_.Tensor) == "add_"
