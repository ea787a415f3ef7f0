"""Texts entry by entry, and the tables in which they are looked up."""

from __future__ import annotations

from typing import Any

from keras_ddl.cut.extent_rules import finds_for_each_key
from keras_ddl.cut.registry import rule
from keras_ddl.cut.rules.elementwise import aligned
from keras_ddl.cut.states import Rows

# Of their first input entry by entry; others are scalars.
OF_FIRST = (
    "StringLower StringUpper StringStrip StringLength AsString StringToNumber StringToHashBucket "
    "StringToHashBucketFast StringToHashBucketStrong StaticRegexReplace StaticRegexFullMatch RegexReplace "
    "RegexFullMatch DecodeBase64 EncodeBase64 UnicodeTranscode UnicodeScript Bucketize"
)
BROADCASTING = "StringJoin Substr"


@rule(*OF_FIRST.split())
def of_first(b: Any, node: Any) -> Any:
    value, others = node.inputs[0], node.inputs[1:]
    state = b.state(value)
    if not isinstance(state, Rows):
        return None
    b.wholes(others)
    return [(b.make(node, [b.held(value), *map(b.whole, others)])[0], state)]


@rule(*BROADCASTING.split())
def broadcasting(b: Any, node: Any) -> Any:
    return aligned(b, node, node.inputs)


@rule("LookupTableFindV2")
def look_up(b: Any, node: Any) -> Any:
    """Rows of keys in a table that every rank has whole: what writes to it has no rule, so ranks write alike."""
    table, keys, default = node.inputs
    state = b.state(keys)
    if not isinstance(state, Rows) or not finds_for_each_key(node) or default.rank != 0:
        return None
    b.wholes([default])
    return [(b.make(node, [b.whole(table), b.held(keys), b.whole(default)])[0], state)]
