"""Pixels and labels in blocks on a node's own disk, decoded, for all the ranks there.

Blocks lie where they lie whatever is read. What a read misses is read from its source in whole
blocks, which are then written; two ranks that miss the same one write the same file.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilenet.files.staging_folder import StagingFolder
from tilenet.geometry.tiles import Window

__all__ = ["BLOCK_PX", "Kind", "StagedBlocks"]

BLOCK_PX = 512

Arrays = tuple[NDArray[Any], ...]


@dataclass(frozen=True)
class Kind:
    """One of the arrays that a read gives.

    Attributes:
        planes: Shape in front of rows and columns: (C,) of values, () of what is one plane.
        dtype: That is read.
        stored: That is written; blocks whose numbers it cannot hold are not.
    """

    planes: tuple[int, ...]
    dtype: np.dtype[Any]
    stored: np.dtype[Any]

    @property
    def num_planes(self) -> int:
        """How many there are."""
        return int(np.prod(self.planes, dtype=np.int64))


class StagedBlocks:
    """The blocks of an image, or of its labels.

    Args:
        folder: Where they are.
        identity: Whatever values depend on: files, when they were changed, bands, keys. It is
            compared by its `repr`.
        size: Height and width of the image at the resolution that is read.
        kinds: Of the arrays that a read gives.
    """

    def __init__(
        self,
        folder: StagingFolder,
        identity: object,
        size: tuple[int, int],
        kinds: Sequence[Kind],
    ) -> None:
        self._folder, self._size, self._kinds = folder, size, tuple(kinds)
        text = repr((identity, size, self._kinds, BLOCK_PX))
        self._key = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def read(self, window: Window, source: Callable[[Window], Arrays]) -> Arrays:
        """What `source` gives for a window within the image, from blocks where they are there.

        Raises:
            TilenetError: The source cannot be read there.
        """
        arrays = tuple(
            np.empty((*kind.planes, window.height, window.width), kind.dtype)
            for kind in self._kinds
        )
        for row in range(window.row // BLOCK_PX, -(-(window.row + window.height) // BLOCK_PX)):
            cols = range(window.col // BLOCK_PX, -(-(window.col + window.width) // BLOCK_PX))
            missing = [col for col in cols if not self._load(row, col, window, arrays)]
            # Neighbours at once: files in rows would be decoded once for each.
            for _, run in groupby(enumerate(missing), lambda pair: pair[1] - pair[0]):
                wanted = [col for _, col in run]
                place = self._place(row, wanted[0], len(wanted))
                found = source(place)
                rows, columns = _overlap(window, place)
                of_rows, of_columns = _overlap(place, window)
                for array, given in zip(arrays, found, strict=True):
                    array[..., rows, columns] = given[..., of_rows, of_columns]
                for col in wanted:
                    self._store(row, col, place, found)
        return arrays

    def _place(self, row: int, col: int, count: int) -> Window:
        """Pixels of so many blocks beside one another."""
        top, left = row * BLOCK_PX, col * BLOCK_PX
        width = min(count * BLOCK_PX, self._size[1] - left)
        return Window(top, left, min(BLOCK_PX, self._size[0] - top), width)

    def _name(self, row: int, col: int) -> str:
        return f"{self._key}-{row}-{col}"

    def _load(self, row: int, col: int, window: Window, arrays: Arrays) -> bool:
        """Fill in what a block holds of a window; False: it is not there, or not whole."""
        block = self._place(row, col, 1)
        area = block.height * block.width
        whole = sum(kind.num_planes * kind.stored.itemsize for kind in self._kinds) * area
        (rows, cols), (into_rows, into_cols) = _overlap(block, window), _overlap(window, block)
        try:
            with (self._folder.path / self._name(row, col)).open("rb", buffering=0) as file:
                if os.fstat(file.fileno()).st_size != whole:
                    return False
                start = 0
                for kind, array in zip(self._kinds, arrays, strict=True):
                    planes = array.reshape(-1, *array.shape[-2:])
                    lines = np.empty((rows.stop - rows.start, block.width), kind.stored)
                    for plane in planes:
                        file.seek(start + rows.start * block.width * kind.stored.itemsize)
                        if file.readinto(lines.data.cast("B")) != lines.nbytes:
                            return False
                        plane[into_rows, into_cols] = lines[:, cols]
                        start += area * kind.stored.itemsize
        except OSError:
            return False
        return True

    def _store(self, row: int, col: int, place: Window, found: Arrays) -> None:
        """Write a block of those that were read together."""
        rows, cols = _overlap(place, self._place(row, col, 1))
        arrays = []
        for kind, array in zip(self._kinds, found, strict=True):
            part = array[..., rows, cols]
            stored = np.ascontiguousarray(part, kind.stored)
            if kind.stored != kind.dtype and not np.array_equal(stored, part):
                return
            arrays.append(stored)
        self._folder.write(self._name(row, col), arrays)


def _overlap(of: Window, other: Window) -> tuple[slice, slice]:
    """Rows and columns of a window that another has too, counted in the first."""
    return (
        _common(of.row, of.height, other.row, other.height),
        _common(of.col, of.width, other.col, other.width),
    )


def _common(first: int, count: int, other: int, other_count: int) -> slice:
    start, stop = max(first, other), min(first + count, other + other_count)
    return slice(start - first, stop - first)
