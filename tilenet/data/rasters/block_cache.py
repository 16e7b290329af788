"""Blocks that were burned or resampled lately: a step reads what an earlier one read."""

from collections import OrderedDict
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilenet.parallel.health.node_memory import LEAST_BLOCKS_BYTES


class BlockCache:
    """The blocks that were used last, in a number of bytes."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.num_bytes = most_bytes, 0
        self._blocks: OrderedDict[tuple[int, int, int], NDArray[Any]] = OrderedDict()
        self._owned: dict[int, set[tuple[int, int, int]]] = {}  # keys of `_blocks`, by owner

    def get(self, owner: int, row: int, col: int) -> NDArray[Any] | None:
        """A block, if it is still there; whole numbers in the smallest dtype that holds them."""
        block = self._blocks.get((owner, row, col))
        if block is not None:
            self._blocks.move_to_end((owner, row, col))
        return block

    def put(self, owner: int, row: int, col: int, block: NDArray[Any]) -> None:
        """Keep a block; the ones that were used longest ago make room."""
        small = block
        if block.dtype.kind in "iu":
            least, most = np.min_scalar_type(block.min()), np.min_scalar_type(block.max())
            small = block.astype(np.result_type(least, most))
        self._blocks[owner, row, col] = small
        self._owned.setdefault(owner, set()).add((owner, row, col))
        self.num_bytes += small.nbytes
        while self.num_bytes > self.most_bytes and len(self._blocks) > 1:
            key, oldest = self._blocks.popitem(last=False)
            self._owned[key[0]].discard(key)
            self.num_bytes -= oldest.nbytes

    def drop(self, owner: int) -> None:
        """Forget all blocks of an owner."""
        for key in self._owned.pop(owner, ()):
            self.num_bytes -= self._blocks.pop(key).nbytes


BLOCKS = BlockCache(LEAST_BLOCKS_BYTES)  # of all files of the process; see `keep_blocks`
OWNERS = count()  # numbers of the files
