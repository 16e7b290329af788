"""Random numbers that are a function of a key, such as (seed, step, image, layer).

If ranks drew from a shared stream in turn, results would depend on the number of ranks. Here each
number is computed from its key, by blake2b and numpy's counter-based Philox generator; numpy
guarantees that its raw output never changes.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray


def key(*parts: int | str) -> int:
    """A 128-bit number that is a function of `parts`: blake2b of them, joined by commas."""
    text = ",".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")


def uniform(count: int, *parts: int | str, first: int = 0) -> NDArray[np.float64]:
    """`count` numbers in [0, 1) that are a function of `parts`: 53 bits each from Philox.

    Args:
        first: Number of the key's numbers to skip. This costs nothing, since Philox is a counter.
    """
    return np.asarray(_raw(count, first, *parts) >> np.uint64(11), dtype=np.float64) * 2.0**-53


def sixteen_bits(count: int, *parts: int | str, first: int = 0) -> NDArray[np.uint16]:
    """`count` whole numbers below 2¹⁶ that are a function of `parts`.

    Each of Philox's 64-bit numbers gives four, the lowest bits first.

    Args:
        first: Number of the key's numbers to skip, which costs nothing.
    """
    word, skipped = divmod(first, 4)
    raw = _raw(-(-(skipped + count) // 4), word, *parts)
    return raw.astype("<u8", copy=False).view("<u2")[skipped : skipped + count]


def _raw(count: int, first: int, *parts: int | str) -> NDArray[np.uint64]:
    """`count` of the numbers of a key's Philox generator, from number `first` on."""
    block, skipped = divmod(first, 4)  # Philox computes four numbers per count
    return np.random.Philox(key=key(*parts), counter=block).random_raw(skipped + count)[skipped:]
