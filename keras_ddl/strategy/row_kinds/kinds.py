"""The kinds: what a tensor can have to do with the rows of the batch."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Kind:
    """What a tensor has to do with the rows."""

    name: (
        str  # independent | rows | total | count | shape | mean (over some of the rows) | max | min | function | opaque
    )
    axis: int = 0  # rows: the dimension along which they lie; shape: the element that counts them
    power: int = 0  # rows, total, count: the power of the number of rows in it
    whole: bool = True  # rows, shape: all of the batch, not some of them
    mixed: bool = False  # a row's value depends on other rows of this rank
    compared: bool = False  # and on them one by one, not on totals alone
    splits: bool = False  # where the rows of a ragged tensor begin: one more than there are rows

    @property
    def is_mean(self) -> bool:
        return self.name == "total" and self.power == -1

    @property
    def is_sum(self) -> bool:
        return (self.name == "total" and self.power == 0) or (self.name == "count" and self.power == 1)


INDEPENDENT = Kind("independent")
ROWS = Kind("rows")
FUNCTION = Kind("function")
OPAQUE = Kind("opaque")
SUM = Kind("total")
MEAN = Kind("total", power=-1)
COUNT = Kind("count", power=1)
IN_LIST = -1  # the axis of rows that are in a list of tensors, over the steps of a loop
AGGREGATES = ("total", "count", "mean", "max", "min", "function", "opaque")


def comparing(kind: Kind, compares: bool) -> Kind:
    return replace(kind, mixed=True, compared=True) if compares else kind
