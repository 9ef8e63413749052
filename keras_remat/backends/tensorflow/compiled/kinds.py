"""Lists TensorFlow's names for the operations in the model of XLA's fusion
(:mod:`keras_remat.backends.xla.fusion`); tables, no logic.

TensorFlow's elementwise operations broadcast a smaller operand by themselves, and some
(``ReluGrad``, ``Mean``) become several operations of XLA's. Each is listed under what XLA makes of
it.
"""

from dataclasses import replace

from keras_remat.backends.tables import names
from keras_remat.backends.tensorflow.graph.kinds import MATMULS
from keras_remat.backends.xla.fusion import Kinds, on_gpu
from keras_remat.core.target import Target

_VIEWS = names("EnsureShape ExpandDims Identity Reshape Squeeze Transpose")
_MOVING = names("""
    BroadcastTo Fill MatrixBandPart OneHot Pad PadV2 Range Reverse ReverseV2 Slice StridedSlice
    StridedSliceGrad Tile
""")

KINDS = Kinds(
    views=_VIEWS,
    cheap=_MOVING
    | names("""
        Abs Add AddN AddV2 BiasAdd Bitcast BitwiseAnd BitwiseOr BitwiseXor Cast Ceil ClipByValue Div
        DivNoNan Equal Floor FloorDiv FloorMod Greater GreaterEqual Inv InvGrad Invert IsFinite
        IsInf IsNan LeakyRelu LeakyReluGrad LeftShift Less LessEqual LogicalAnd LogicalNot LogicalOr
        Maximum Minimum Mod Mul MulNoNan Neg NotEqual OnesLike RealDiv Reciprocal ReciprocalGrad
        Relu Relu6 Relu6Grad ReluGrad RightShift Rint Round RsqrtGrad Select SelectV2 SigmoidGrad
        Sign Softsign SoftsignGrad SqrtGrad Square SquaredDifference Sub TanhGrad TruncateDiv
        TruncateMod ZerosLike
    """),
    expensive=names("""
        Acos Acosh Asin Asinh Atan Atan2 Atanh Cos Cosh Digamma Elu EluGrad Erf Erfc Erfinv Exp
        Expm1 Lgamma Log Log1p Pow Rsqrt Selu SeluGrad Sigmoid Sin Sinh Softplus SoftplusGrad Sqrt
        Tan Tanh Xdivy Xlog1py Xlogy
    """),
    reductions=names("""
        All Any ArgMax ArgMin BiasAddGrad L2Loss Max Mean Min Prod Sum
    """),
    random=frozenset(
        f"Stateless{name}{version}"
        for name in names("""
            RandomNormal RandomUniform RandomUniformFullInt RandomUniformInt TruncatedNormal
        """)
        for version in ("", "V2")
    ),
    moving=_MOVING,
    reshapes=_VIEWS - {"Transpose"},
    transposing=names("""
        Conv2DBackpropFilter Conv3DBackpropFilterV2 DepthwiseConv2dNativeBackpropFilter
    """),
)

FORWARD_CONVOLUTIONS = names("Conv2D Conv3D DepthwiseConv2dNative")
INPUT_GRADIENTS = names("""
    Conv2DBackpropInput Conv3DBackpropInputV2 DepthwiseConv2dNativeBackpropInput
""")
KERNEL_GRADIENTS = KINDS.transposing
POOLING_GRADIENTS = {"MaxPoolGrad": 0, "MaxPool3DGrad": 0}
"""Gradient of max pooling → position of the image among its inputs."""

GPU_KINDS = on_gpu(
    KINDS,
    sigmoids=names("Sigmoid"),
    joining=names("ConcatV2"),
    pooling=names("AvgPool AvgPool3D AvgPoolGrad AvgPool3DGrad MaxPool MaxPool3D"),
    pooling_gradients=POOLING_GRADIENTS,
    in_tuples=FORWARD_CONVOLUTIONS | INPUT_GRADIENTS | KERNEL_GRADIENTS,
    cut=names("Slice StridedSlice"),
)


def kinds_of(target: Target) -> Kinds:
    """Returns the kinds of operations, by what XLA does to them on a target."""
    if not target.on_gpu:
        return KINDS
    if target.before_ampere:  # cuBLAS returns a tuple, too
        return replace(GPU_KINDS, in_tuples=GPU_KINDS.in_tuples | MATMULS)
    return GPU_KINDS


ALIASES = names("""
    CheckNumerics CheckNumericsV2 Identity IdentityN PlaceholderWithDefault PreventGradient
    Snapshot StopGradient
""")
"""Operations whose output i is input i; to XLA they do nothing else."""

NOTHING = frozenset({"Assert", "NoOp"})
"""Operations that XLA compiles to nothing."""
