"""Random numbers that are a function of a key, such as (seed, step, image, layer).

If ranks drew from a shared stream in turn, results would depend on the number of ranks. Here each
number is computed from its key, by blake2b and numpy's counter-based Philox generator; numpy
guarantees that its raw output never changes.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

__all__ = ["key", "uniform"]


def key(*parts: int | str) -> int:
    """A 128-bit number that is a function of `parts`: blake2b of them, joined by commas."""
    text = ",".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")


def uniform(count: int, *parts: int | str, first: int = 0) -> NDArray[np.float64]:
    """`count` numbers in [0, 1) that are a function of `parts`: 53 bits each from Philox.

    Args:
        first: Number of the key's numbers to skip. This costs nothing, since Philox is a counter.
    """
    block, skipped = divmod(first, 4)  # Philox computes four numbers per count
    raw = np.random.Philox(key=key(*parts), counter=block).random_raw(skipped + count)[skipped:]
    return np.asarray(raw >> np.uint64(11), dtype=np.float64) * 2.0**-53
