"""Operations whose results are their operands."""

from __future__ import annotations

from keras_ddl.cut.contents import Content
from keras_ddl.cut.extents import Extents, Numbers, contents, numbers
from keras_ddl.cut.factors import Factors, Kind, labels_of, spec
from keras_ddl.cut.program import Node

FORWARDING = ("Identity", "IdentityN", "StopGradient", "PreventGradient", "Snapshot")


@spec(*FORWARDING, kind=Kind.FORWARD)
def _forwarded(known: Extents, node: Node) -> Factors | None:
    labels = labels_of(known.dims(node.inputs[0]))
    return None if labels is None or len(node.inputs) > 1 else Factors([labels], [labels])


@numbers(*FORWARDING)
def _numbers(known: Extents, node: Node) -> list[Numbers | None]:
    return [known.numbers(each) for each in node.inputs]


@contents("Identity")
def _content(known: Extents, node: Node) -> Content | None:
    return known.content(node.inputs[0])
