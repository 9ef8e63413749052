"""Lists what TensorFlow's operation types do with memory and state; tables, no logic.

Read off the kernels of TensorFlow 2.18 to 2.21 (``forward_input_or_allocate_output``,
``context->set_output(0, context->input(0))``). A type missing here is treated safely: as an op that
allocates its outputs and, when its OpDef says it is stateful, runs exactly once.
"""

from __future__ import annotations

from keras_remat.backends.tables import names

#: The output shares the buffer of input 0 (per output for ``IdentityN``).
VIEWS = names("""
    Identity IdentityN Reshape Squeeze ExpandDims StopGradient PreventGradient EnsureShape
    Snapshot Bitcast PlaceholderWithDefault
""")

#: Reads a variable through its resource handle and changes nothing.
VARIABLE_READS = names("""
    ReadVariableOp ResourceGather ResourceGatherNd VariableShape
""")

#: Changes rows of a variable in place. From its first run on, every read of that variable makes a
#: copy (``EnsureSparseVariableAccess`` in ``training_op_helpers.h``).
UPDATES_ROWS = names("""
    ResourceScatterAdd ResourceScatterSub ResourceScatterMul ResourceScatterDiv ResourceScatterMin
    ResourceScatterMax ResourceScatterUpdate ResourceScatterNdAdd ResourceScatterNdSub
    ResourceScatterNdMin ResourceScatterNdMax ResourceScatterNdUpdate ResourceStridedSliceAssign
    ResourceSparseApplyAdadelta ResourceSparseApplyAdagrad ResourceSparseApplyAdagradDA
    ResourceSparseApplyAdagradV2 ResourceSparseApplyCenteredRMSProp ResourceSparseApplyFtrl
    ResourceSparseApplyFtrlV2 ResourceSparseApplyKerasMomentum ResourceSparseApplyMomentum
    ResourceSparseApplyProximalAdagrad ResourceSparseApplyProximalGradientDescent
    ResourceSparseApplyRMSProp
""")

#: Stateful by OpDef, yet pure: the same inputs give the same outputs and nothing else happens.
PURE_STATEFUL = names("""
    TensorListReserve EmptyTensorList StatelessWhile StatelessIf StatelessCase
""")

#: Takes over the buffer of a dying input of the same size.
REUSES_INPUT = names("""
    Add AddV2 Sub Mul MulNoNan Div RealDiv DivNoNan Xdivy Xlogy Xlog1py Maximum Minimum Pow
    SquaredDifference Atan2 FloorDiv FloorMod Mod AddN
    Abs Neg Exp Expm1 Log Log1p Sqrt Rsqrt Square Reciprocal Inv Sigmoid Tanh Sin Cos Tan Sinh
    Cosh Erf Erfc Sign Floor Ceil Round Rint Lgamma Digamma
    Relu Relu6 LeakyRelu Elu Selu Softplus Softsign ReluGrad Relu6Grad LeakyReluGrad EluGrad
    SeluGrad SoftplusGrad SoftsignGrad SigmoidGrad TanhGrad SqrtGrad RsqrtGrad InvGrad
    ReciprocalGrad
    BiasAdd Softmax LogSoftmax ClipByValue LogicalNot LogicalAnd LogicalOr Select SelectV2
    _UnaryOpsComposition CheckNumerics CheckNumericsV2
""")

#: Takes over the buffer of its first input only.
REUSES_FIRST_INPUT = names("""
    SparseSoftmaxCrossEntropyWithLogits SoftmaxCrossEntropyWithLogits
""")

#: Products that oneDNN computes together with the ops after them (attribute ``fused_ops``), and
#: the fused ops that have one more input.
FUSED, FUSED_WITH_INPUT = (
    frozenset({"_FusedConv2D", "_FusedMatMul"}),
    frozenset({b"BiasAdd", b"Add"}),
)

#: Makes the buffer of a dying input the variable's; the variable's old buffer is freed.
TAKES_OVER = frozenset({"AssignVariableOp"})

#: (Forward op, gradient op) → position of the gradient's input that is the forward op's output 0.
#: For such a pair TensorFlow's oneDNN pass, on a CPU, passes the gradient a second output that the
#: graph does not show: for every element of output 0, its place in the window.
HIDDEN_OUTPUT = {("MaxPool", "MaxPoolGrad"): 1}

#: Requests scratch as large as its first output (``sparse_xent_op.cc``, ``xent_op.cc``).
SCRATCH = frozenset({"SparseSoftmaxCrossEntropyWithLogits", "SoftmaxCrossEntropyWithLogits"})

#: Requests its workspace before its output (``maxpooling_op.cc``; oneDNN's kernel, which half
#: precision does not have everywhere, requests none).
WORKSPACE_FIRST = frozenset({"MaxPoolGrad"}) | SCRATCH

#: Updates a weight and its slot without memory beside the gradient.
IN_PLACE_UPDATES = frozenset({"ResourceApplyKerasMomentum"})

#: cuDNN's recurrent layers: only the library knows the size of the value kept for the gradient.
SIZED_BY_LIBRARY = frozenset({"CudnnRNN", "CudnnRNNV2", "CudnnRNNV3"})

#: Types whose inputs Grappler sorts by name.
COMMUTATIVE = names("""
    Add AddV2 AddN Mul Maximum Minimum SquaredDifference LogicalAnd LogicalOr
""")

#: Types whose floating-point operations are counted for estimated profiles; all others cost about
#: one pass over their data.
CONVOLUTIONS = names("""
    Conv2D Conv2DBackpropInput Conv2DBackpropFilter DepthwiseConv2dNative
    DepthwiseConv2dNativeBackpropInput DepthwiseConv2dNativeBackpropFilter Conv3D
    Conv3DBackpropInputV2 Conv3DBackpropFilterV2 _FusedConv2D _FusedDepthwiseConv2dNative
    _FusedConv3D
""")
MATMULS = names("""
    MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3 _FusedMatMul _FusedBatchMatMulV2 Einsum
""")

#: Loops and branches whose bodies are functions → the same without an effect.
STATELESS = {"While": "StatelessWhile", "If": "StatelessIf", "Case": "StatelessCase"}
CONTROL_FLOW = frozenset({*STATELESS, *STATELESS.values()})
BRANCHES = frozenset(kind for kind in CONTROL_FLOW if "While" not in kind)

#: Types this backend does not support: control flow of TensorFlow 1, queues and host callbacks
#: whose effects cannot be ordered.
UNSUPPORTED = names("""
    Switch Merge Enter Exit NextIteration LoopCond RefSwitch RefMerge Assign VariableV2
""")
