"""Specs of operations that compute each entry independently."""

from __future__ import annotations

from collections.abc import Callable

from keras_ddl.cut.analysis.dims import Dim, Uncertain, certain
from keras_ddl.cut.analysis.entrywise_types import BINARY, UNARY
from keras_ddl.cut.analysis.extents import Extents, NumbersRule, ResultExtents, ResultNumbers, extents, numbers
from keras_ddl.cut.analysis.program import Node
from keras_ddl.cut.operations.factors import NEW, Factors, Kind, Linear, broadcast_labels, labels_of, spec
from keras_ddl.cut.operations.propagation import never, over_finite, times_finite, widens

_LINEAR = {
    "Neg": Linear(at=(0,)),
    "Cast": Linear(at=(0,), when=widens),
    "Mul": Linear(at=(0, 1), when=times_finite),
    **dict.fromkeys(("RealDiv", "Div", "DivNoNan"), Linear(at=(0,), when=over_finite)),
    **dict.fromkeys(("RsqrtGrad", "SqrtGrad"), Linear(at=(1,), when=never)),
    **dict.fromkeys(("Add", "AddV2", "Sub", "AddN"), Linear(together=True, adds=True)),
}
# Operations on strings: on each entry of the first operand (the others are numbers and patterns), or of several.
_FIRST_STRING_OPS = (
    "StringLower StringUpper StringStrip StringLength AsString StringToNumber StringToHashBucket "
    "StringToHashBucketFast StringToHashBucketStrong StaticRegexReplace StaticRegexFullMatch RegexReplace "
    "RegexFullMatch DecodeBase64 EncodeBase64 UnicodeTranscode UnicodeScript Bucketize"
)
_SEVERAL_STRING_OPS = "StringJoin Substr"


def _entrywise_on_first(known: Extents, node: Node) -> Factors:
    labels = labels_of(known.dims(node.inputs[0]))
    return Factors([labels, *[None] * (len(node.inputs) - 1)], [labels])


def _broadcast(known: Extents, node: Node) -> Factors:
    operands, result = broadcast_labels([known.dims(each) for each in node.inputs])
    return Factors(operands, [result])


for _type in UNARY:
    spec(_type, linear=_LINEAR.get(_type, Linear()), kind=Kind.ENTRYWISE)(_entrywise_on_first)
for _type in (*BINARY, "AddN"):
    spec(_type, linear=_LINEAR.get(_type, Linear()), kind=Kind.ENTRYWISE)(_broadcast)
spec(*_FIRST_STRING_OPS.split())(_entrywise_on_first)
spec(*_SEVERAL_STRING_OPS.split(), "ApproximateEqual", "Betainc", "ClipByValue")(_broadcast)


@spec("Bitcast")
def _bitcast(known: Extents, node: Node) -> Factors:
    """A wider entry becomes several along a new last axis; narrower entries along the last axis become one."""
    labels = labels_of(known.dims(node.inputs[0]))
    wide, narrow = node.inputs[0].dtype.size, node.outputs[0].dtype.size
    if wide < narrow:
        return Factors([labels[:-1] + labels[-1:].upper()], [labels[:-1]])
    return Factors([labels], [labels if wide == narrow else labels + NEW], new=Dim(wide // narrow))


@spec("Select")
def _select(known: Extents, node: Node) -> Factors:
    """tf.where of TensorFlow 1, in losses of logits. The condition has the operands' shape, or only axis 0, or none."""
    labels = labels_of(known.dims(node.inputs[1]))
    return Factors([labels[: len(known.dims(node.inputs[0]))], labels, labels], [labels])


# ---- operations without a spec: only the extents of the result


@extents("CheckNumerics", "RandomShuffle")
def _first_extents(known: Extents, node: Node) -> ResultExtents:
    return [known.dims(node.inputs[0])]


# ---- integers in shapes


def _binary_numbers(apply: Callable[[Dim, Dim], Dim | None]) -> NumbersRule:
    """Returns a function for the integer results of a binary operation. `apply` returns None for uncertain results."""

    def rule(known: Extents, node: Node) -> ResultNumbers:
        a, b = map(known.numbers, node.inputs)
        length = max(len(a), len(b))
        if {len(a), len(b)} - {1, length}:
            raise Uncertain
        pairs = zip(*(each * length if len(each) == 1 else each for each in (a, b)))
        return [[certain(apply(one, other)) for one, other in pairs]]

    return rule


numbers("Mul")(_binary_numbers(lambda a, b: a * b))
numbers("Add", "AddV2")(_binary_numbers(lambda a, b: a + b))
numbers("Sub")(_binary_numbers(lambda a, b: a - b))
numbers("Maximum")(_binary_numbers(lambda a, b: a.larger_of(b)))
numbers("Minimum")(_binary_numbers(lambda a, b: a.smaller_of(b)))
numbers("FloorDiv")(_binary_numbers(lambda a, b: None if b == 0 else a.floor_divided_by(b)))
numbers("FloorMod")(
    _binary_numbers(lambda a, b: Dim(a.number % b.number) if a.number is not None and b.number else None)
)


@numbers("Cast")
def _cast(known: Extents, node: Node) -> ResultNumbers:
    return [known.numbers(node.inputs[0])]  # for floats nothing is known
