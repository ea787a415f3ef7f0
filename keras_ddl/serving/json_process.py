"""A process that reads and writes large JSON, so that the server's other requests need not wait for it.

Parsers of JSON keep Python's lock until they are done, and what they make of 64 MB may take gigabytes. Here this holds
up nobody, is bounded by the system, and ends with the process. It imports no TensorFlow: it starts in 0.2 s.

    python -m keras_ddl.serving.json_process BYTES

Reads calls from stdin and writes answers to stdout: `write`, `read`.
"""

from __future__ import annotations

import os
import pickle
import resource
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from keras_ddl.serving import json_values
from keras_ddl.serving.status import Code, RequestError

FUNCTIONS: dict[str, Callable[..., Any]] = {
    each.__name__: each
    for each in (json_values.predict_request, json_values.examples_request, json_values.predict_response)
}
_SIZE = struct.Struct("<Q")
HEADER = struct.Struct("<QQ")  # bytes of the pickle, number of buffers


def packed(value: Any) -> list[bytes | memoryview]:
    """Returns a value as what goes through a pipe: header, sizes of buffers, pickle, buffers (arrays, not copied)."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    raws = [each.raw() for each in buffers]
    sizes = b"".join(_SIZE.pack(len(each)) for each in raws)
    return [HEADER.pack(len(data), len(raws)) + sizes, data, *raws]


def sizes_of(data: bytes) -> list[int]:
    """Returns the sizes that follow a header."""
    return [size for (size,) in _SIZE.iter_unpack(data)]


def _read(stream: BinaryIO) -> Any:
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    size, count = HEADER.unpack(header)
    sizes = sizes_of(stream.read(_SIZE.size * count))
    data = stream.read(size)
    buffers = [bytearray(each) for each in sizes]
    for each in buffers:
        stream.readinto(each)  # of a BufferedReader: all of it
    return pickle.loads(data, buffers=buffers)


def main() -> None:
    # NumPy reserves address space for each core: what counts is how much is added.
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + int(sys.argv[1])
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))  # orjson may crash then
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whoever prints does not print into an answer
    while (call := _read(sys.stdin.buffer)) is not None:
        name, arguments = call
        try:
            value = FUNCTIONS[name](*arguments)
            # Bytes go as arrays do, without a copy into the pickle.
            answer = True, pickle.PickleBuffer(value) if isinstance(value, bytes) else value
        except RequestError as error:
            answer = False, (int(error.code), error.message, error.http_status)
        except MemoryError:
            text = "The request or its answer takes too much memory as JSON."
            answer = False, (int(Code.RESOURCE_EXHAUSTED), text, 413)
        except Exception as error:  # a defect here, which must not look like one of the request
            answer = False, (int(Code.INTERNAL), f"{type(error).__name__}: {error}", 500)
        for each in packed(answer):
            answers.write(each)
        answers.flush()
        call = arguments = answer = value = None


if __name__ == "__main__":
    main()
