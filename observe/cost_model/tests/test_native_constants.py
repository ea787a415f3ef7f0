"""The cost model's copies of native constants equal the originals in the sources of native/."""

import re
from pathlib import Path

from keras_ddl.cost_model import all_reduce

NATIVE = Path(__file__).resolve().parents[3] / "native"


def matches(path, pattern):
    return re.findall(pattern, re.sub(r"//.*", "", (NATIVE / path).read_text(encoding="utf-8")), re.DOTALL)


def test_cost_model_splits_messages_as_the_engine_does():
    (message,) = matches("core/src/net/wire.h", r"kWireMessageBytes = uint64_t\{(\d+)\} \* 1024;")
    header = "core/src/hierarchy/hierarchical_collectives.h"
    (shard,) = matches(header, r"kLargestShardBytes = (\d+) \* 1024 \* 1024;")
    (blocks,) = matches(header, r"kBlocks = (\d+);")
    engine = [int(message) << 10, int(shard) << 20, int(blocks)]
    assert engine == [all_reduce.MESSAGE_BYTES, all_reduce.LARGEST_SHARD_BYTES, all_reduce.BLOCKS_AHEAD]
