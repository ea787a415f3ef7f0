"""Operations whose results are their operands."""

from __future__ import annotations

from keras_ddl.cut.analysis.contents import Content
from keras_ddl.cut.analysis.dims import Uncertain, if_certain
from keras_ddl.cut.analysis.extents import Extents, ResultNumbers, contents, numbers
from keras_ddl.cut.analysis.program import Node
from keras_ddl.cut.operations.factors import Factors, Kind, labels_of, spec

FORWARDING = ("Identity", "IdentityN", "StopGradient", "PreventGradient", "Snapshot")


@spec(*FORWARDING, kind=Kind.FORWARD)
def _forwarded(known: Extents, node: Node) -> Factors:
    if len(node.inputs) > 1:
        raise Uncertain
    labels = labels_of(known.dims(node.inputs[0]))
    return Factors([labels], [labels])


@numbers(*FORWARDING)
def _numbers(known: Extents, node: Node) -> ResultNumbers:
    return [if_certain(known.numbers, each) for each in node.inputs]


@contents("Identity")
def _content(known: Extents, node: Node) -> Content:
    return known.content(node.inputs[0])
