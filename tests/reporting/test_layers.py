"""Layers are read from the names that TensorFlow and JAX give ops."""

import pytest

from keras_remat.core.graph import Graph, Op, Value
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.reporting.layers import LOSS, OPTIMIZER, OTHER, group_names, layer_names


def problem_of(names, phases=None, *, backend="tensorflow", model="net"):
    phases = phases or ["forward"] * len(names)
    ops = tuple(Op(i, n, "K", (), (i,), phases[i]) for i, n in enumerate(names))
    graph = Graph(ops, tuple(Value(i, n, 1, producer=i) for i, n in enumerate(names)), ())
    profile = Profile((1.0,) * len(names), (0,) * len(names), 0, backend=backend)
    return Problem(graph, profile, name=model)


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("net_1/dense_1/MatMul", "dense"),
        ("net_1/dense_2_1/Cast/ReadVariableOp", "dense_2"),
        ("net_1/max_pooling2d_1_2/MaxPool2d", "max_pooling2d_1"),
        ("gradient_tape/net_1/up_1_norm_b_1/batchnorm/add_1/Sum", "up_1_norm_b"),
        ("net_1/inner_3/ibn_1/moments/mean", "inner/ibn"),
        ("net_1/block_0_1/Gelu/Pow", "block_0"),
        ("net_1/block_0_1/norm_1/mul_2", "block_0/norm"),
        ("net_1/add_1/AddV2", "add"),  # keras.layers.Add
        ("net_1/drop_1/stateless_dropout/stateless_random_uniform/X", "drop"),
        ("net_1/Mul", "net"),
        ("encoder_1/conv_1/Conv2D", "encoder/conv"),  # a train_step of the user's
        ("compile_loss/mse/Mean", LOSS),
        ("div_no_nan/ReadVariableOp", OTHER),
        ("AddN_3", OTHER),
    ],
)
def test_tensorflow_names(name, layer):
    assert layer_names(problem_of([name, "net_1/x_1/y"]))[0] == layer


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("jvp(layer_normalization_1)/reduce_sum", "layer_normalization_1"),
        ("transpose(jvp(block_2))/norm/add_any", "block_2/norm"),
        ("jvp(dropout)/add", "dropout"),
        ("transpose(jvp(compile_loss))/mse/neg", LOSS),
        ("jvp(dense)/jit(relu)/max", "dense"),
        ("select_n", OTHER),
    ],
)
def test_jax_names(name, layer):
    assert layer_names(problem_of([name, "jvp(x)/y"], backend="jax"))[0] == layer


def test_the_optimizer_is_what_updates_and_has_no_gradient():
    names = ["net_1/d_1/MatMul", "gradient_tape/net_1/d_1/M", "adam_2/Cast", "adam_2/Sub"]
    problem = problem_of(names, ["forward", "backward", "forward", "update"])
    assert layer_names(problem) == ["d", "d", OPTIMIZER, OPTIMIZER]


def test_an_op_without_a_scope_belongs_to_what_it_reads():
    ops = (Op(0, "net_1/d_1/MatMul", "K", (), (0,)), Op(1, "AddN", "K", (0,), (1,)))
    graph = Graph(ops, tuple(Value(i, "v", 1, producer=i) for i in range(2)), (1,))
    problem = Problem(graph, Profile((1.0, 1.0), (0, 0), 0), name="net")
    assert layer_names(problem) == ["d", "d"]


def test_ops_of_a_file_are_their_own_layers():
    assert layer_names(problem_of(["conv1", "conv1_backward"])) == ["conv1", "conv1_backward"]


@pytest.mark.parametrize(
    ("layer", "block"),
    [
        ("conv2_block1_1_conv", "conv2_block1"),
        ("block_1_expand", "block_1"),
        ("block2a_expand_conv", "block2a"),
        ("down_0_conv_a", "down_0"),
        ("dense_1", "dense_1"),
        ("head", "head"),
    ],
)
def test_blocks_of_well_known_models(layer, block):
    assert group_names(problem_of([f"net_1/{layer}_1/X"]), "block") == [block]


def test_the_block_of_a_nested_layer_is_the_outermost():
    assert group_names(problem_of(["net_1/inner_1/dense_1/X"]), "block") == ["inner"]


def test_groupings():
    problem = problem_of(["net_1/dense_1/MatMul"])
    assert group_names(problem, "op") == ["net_1/dense_1/MatMul"]
    with pytest.raises(ValueError, match="'layer', 'op', 'block'; got 'phase'"):
        group_names(problem, "phase")
