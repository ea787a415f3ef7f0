"""Checksums of weights, at the speed of memory."""

from __future__ import annotations

import zlib

import numpy as np

_COLUMNS = 512  # words that are summed side by side: 4 KiB, which fit in the L1 cache


def checksum(array: np.ndarray) -> int:
    """Returns a number that differs when any one bit of `array` does, and almost surely when several do.

    The array's 64-bit words are added up, modulo 2**64, in 512 columns. The result is a CRC of the sums and of the
    remaining bytes. The additions take less time than reading the memory, while a CRC of everything would take five
    times as long. The checksum does not notice if two words of a column are swapped.
    """
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    end = data.size // (8 * _COLUMNS) * (8 * _COLUMNS)
    rest = zlib.crc32(data[end:].tobytes())
    if not end:
        return rest
    sums = np.add.reduce(data[:end].view(np.uint64).reshape(-1, _COLUMNS), axis=0)
    return zlib.crc32(sums, rest)
