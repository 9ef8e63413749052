"""What TensorFlow calls the operations that the model of XLA's fusion
(:mod:`keras_remat.backends.xla.fusion`) knows; tables, no logic.

TensorFlow's elementwise operations spread a smaller operand by themselves, and some (``ReluGrad``,
``Mean``) are several of XLA's. A type is listed by what XLA makes of it.
"""

from keras_remat.backends.tables import names
from keras_remat.backends.xla.fusion import Kinds

VIEWS = frozenset({"EnsureShape", "ExpandDims", "Identity", "Reshape", "Squeeze", "Transpose"})

MOVING = names("""
    BroadcastTo Fill MatrixBandPart OneHot Pad PadV2 Range Reverse ReverseV2 Slice StridedSlice
    StridedSliceGrad Tile
""")

CHEAP = MOVING | names("""
    Abs Add AddN AddV2 BiasAdd Bitcast BitwiseAnd BitwiseOr BitwiseXor Cast Ceil ClipByValue Div
    DivNoNan Equal Floor FloorDiv FloorMod Greater GreaterEqual Inv InvGrad Invert IsFinite
    IsInf IsNan LeakyRelu LeakyReluGrad LeftShift Less LessEqual LogicalAnd LogicalNot LogicalOr
    Maximum Minimum Mod Mul MulNoNan Neg NotEqual OnesLike RealDiv Reciprocal ReciprocalGrad
    Relu Relu6 Relu6Grad ReluGrad RightShift Rint Round RsqrtGrad Select SelectV2 SigmoidGrad
    Sign Softsign SoftsignGrad SqrtGrad Square SquaredDifference Sub TanhGrad TruncateDiv
    TruncateMod ZerosLike
""")

EXPENSIVE = names("""
    Acos Acosh Asin Asinh Atan Atan2 Atanh Cos Cosh Digamma Elu EluGrad Erf Erfc Erfinv Exp
    Expm1 Lgamma Log Log1p Pow Rsqrt Selu SeluGrad Sigmoid Sin Sinh Softplus SoftplusGrad Sqrt
    Tan Tanh Xdivy Xlog1py Xlogy
""")

REDUCTIONS = names("""
    All Any ArgMax ArgMin BiasAddGrad L2Loss Max Mean Min Prod Sum
""")

RANDOM = frozenset(
    f"Stateless{name}{version}"
    for name in names("""
        RandomNormal RandomUniform RandomUniformFullInt RandomUniformInt TruncatedNormal
    """)
    for version in ("", "V2")
)

KERNEL_GRADIENTS = names("""
    Conv2DBackpropFilter Conv3DBackpropFilterV2 DepthwiseConv2dNativeBackpropFilter
""")

KINDS = Kinds(
    views=VIEWS,
    cheap=CHEAP,
    expensive=EXPENSIVE,
    reductions=REDUCTIONS,
    random=RANDOM,
    moving=MOVING,
    reshapes=VIEWS - {"Transpose"},
    transposing=KERNEL_GRADIENTS,
)

ALIASES = names("""
    CheckNumerics CheckNumericsV2 Identity IdentityN PlaceholderWithDefault PreventGradient
    Snapshot StopGradient
""")
"""Output i is input i; XLA knows no other use of them."""

NOTHING = frozenset({"Assert", "NoOp"})
"""Compiled to nothing."""
