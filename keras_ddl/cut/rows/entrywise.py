"""Operations that compute each entry by itself."""

from __future__ import annotations

from keras_ddl.cut.extents import Extents
from keras_ddl.cut.factors import Factors, Linear, broadcast_labels, labels_of, row
from keras_ddl.cut.program import Node
from keras_ddl.cut.propagation import over_finite, times_finite, widens

_UNARY = (
    "Neg Exp Log Log1p Expm1 Sqrt Rsqrt Square Tanh Sigmoid Relu Relu6 Elu Selu Softplus Softsign Abs Sign Floor Ceil "
    "Round Rint Reciprocal Inv Erf Erfc Erfinv Lgamma Digamma Sin Cos Tan Asin Acos Atan Sinh Cosh Asinh Acosh Atanh "
    "Cast LogicalNot IsFinite IsNan IsInf ZerosLike OnesLike LeakyRelu Ndtri BesselI0e BesselI1e Invert Conj"
)
_BINARY = (
    "Add AddV2 Sub Mul RealDiv Div DivNoNan Maximum Minimum Pow SquaredDifference Greater GreaterEqual Less LessEqual "
    "Equal NotEqual LogicalAnd LogicalOr FloorDiv FloorMod Mod TruncateDiv TruncateMod Xdivy Xlogy Xlog1py MulNoNan "
    "Atan2 ReluGrad Relu6Grad TanhGrad SigmoidGrad SqrtGrad RsqrtGrad EluGrad SeluGrad SoftplusGrad SoftsignGrad "
    "LeakyReluGrad InvGrad ReciprocalGrad SelectV2 BitwiseAnd BitwiseOr BitwiseXor LeftShift RightShift NextAfter "
    "Igamma Igammac Zeta Polygamma"
)
UNARY = tuple(_UNARY.split())  # of one operand, whose shape the result has
BINARY = tuple(_BINARY.split())  # of several, which are broadcast
ENTRYWISE = frozenset((*UNARY, *BINARY, "AddN"))
_LINEAR = {
    "Neg": Linear(at=(0,)),
    "Cast": Linear(at=(0,), when=widens),
    "Mul": Linear(at=(0, 1), when=times_finite),
    **dict.fromkeys(("RealDiv", "Div", "DivNoNan"), Linear(at=(0,), when=over_finite)),
    **dict.fromkeys(("Add", "AddV2", "Sub", "AddN"), Linear(together=True, adds=True)),
}
# Of strings: of the first operand, the others are numbers and patterns; and of several.
_OF_FIRST = (
    "StringLower StringUpper StringStrip StringLength AsString StringToNumber StringToHashBucket "
    "StringToHashBucketFast StringToHashBucketStrong StaticRegexReplace StaticRegexFullMatch RegexReplace "
    "RegexFullMatch DecodeBase64 EncodeBase64 UnicodeTranscode UnicodeScript Bucketize"
)
_OF_SEVERAL = "StringJoin Substr"


def _of_first(known: Extents, node: Node) -> Factors | None:
    labels = labels_of(known.dims(node.inputs[0]))
    return None if labels is None else Factors([labels, *[None] * (len(node.inputs) - 1)], [labels])


def _broadcast(known: Extents, node: Node) -> Factors | None:
    found = broadcast_labels([known.dims(each) for each in node.inputs])
    return None if found is None else Factors(found[0], [found[1]])


for _type in UNARY:
    row(_type, linear=_LINEAR.get(_type, Linear()))(_of_first)
for _type in (*BINARY, "AddN"):
    row(_type, linear=_LINEAR.get(_type, Linear()))(_broadcast)
row(*_OF_FIRST.split())(_of_first)
row(*_OF_SEVERAL.split())(_broadcast)


@row("Bitcast")
def _bitcast(known: Extents, node: Node) -> Factors | None:
    return _of_first(known, node) if node.inputs[0].dtype.size == node.outputs[0].dtype.size else None


@row("Select")
def _select(known: Extents, node: Node) -> Factors | None:
    """tf.where of TensorFlow 1, in losses of logits: a condition of the others' shape, for each of axis 0, or one."""
    dims = known.dims(node.inputs[0])
    labels = labels_of(known.dims(node.inputs[1]))
    if dims is None or labels is None:
        return None
    return Factors([labels if len(dims) == len(labels) else labels[: len(dims)], labels, labels], [labels])
