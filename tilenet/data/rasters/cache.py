"""Pixels and labels in blocks on a node's own disk, decoded, for all the ranks there.

Blocks lie where they lie whatever is read. What a read misses is read from its source in whole
blocks, which are then written; two ranks that miss the same one write the same file.

A folder on a node's own disk for what a run's ranks there read; gone when the run is.

The folder is locked (`flock`) by every rank that uses it, and the system gives a lock back when its
process ends, however it ends. So a folder that no process holds was left by a run that was killed,
and the next run there removes it, if a marker in it says that tilenet made it: a user may have
folders of such names, too. Where a file system knows no locks, nothing is removed but a run's own
folder.

Blocks of labels that were burned lately: a step reads what an earlier one read.
"""

import fcntl
import hashlib
import os
import secrets
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilenet.errors import TilenetError
from tilenet.geometry.tiles import within
from tilenet.geometry.windows import Window, overlap
from tilenet.storage.atomic import read_plain

__all__ = ["BLOCK_PX", "BlockCache", "Kind", "StagedBlocks", "StagingFolder"]

PREFIX = "tilenet-cache-"  # of the names of all such folders
MARKER = ".made-by-tilenet"
MARK = b"Pixels that a run of tilenet copied to this node. A later run deletes this folder.\n"


class StagingFolder:
    """A rank's hold on the folder of its run.

    Args:
        path: Path of the folder, which is there.
        warn: Called once, with a sentence, when the folder cannot be written any more.

    Attributes:
        path: Path of the folder.

    Raises:
        TilenetError: The folder is not there.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self.path, self._warn, self._writable = path, warn, True
        self._own = secrets.token_hex(8)  # process numbers may be the same in two containers
        try:
            self._held = _hold(path)
        except OSError as error:
            raise _unusable(path.parent, error) from error

    @classmethod
    def make(cls, cache_dir: Path, warn: Callable[[str], None]) -> "StagingFolder":
        """Make a folder of a new name in `cache_dir`; remove those that killed runs left.

        Raises:
            TilenetError: It cannot be written.
        """
        try:
            cache_dir.mkdir(parents=True, exist_ok=True)
            for left in cache_dir.glob(f"{PREFIX}*"):
                _remove_unheld(left)
            made = cls(Path(tempfile.mkdtemp(prefix=PREFIX, dir=cache_dir)), warn)
            try:
                # Once it is held: until it is marked, no other run removes it.
                (made.path / MARKER).write_bytes(MARK)
            except OSError:
                made.remove()
                made.close()
                raise
        except OSError as error:
            raise _unusable(cache_dir, error) from error
        return made

    def write(self, name: str, arrays: Sequence[NDArray[Any]]) -> None:
        """Write a file of arrays, one after another, aside and renamed: it is whole or not there.

        Where that fails, it is said, and nothing is written any more.
        """
        if not self._writable:
            return
        part = self.path / f".{name}.{self._own}.part"
        try:
            with part.open("wb", buffering=0) as file:
                for array in arrays:
                    left = array.data.cast("B")
                    while left:  # a disk that becomes full takes some first
                        left = left[file.write(left) or 0 :]
            part.replace(self.path / name)
        except OSError as error:
            self._writable = False
            with suppress(OSError):
                part.unlink(missing_ok=True)
            self._warn(
                f"cache_dir cannot be written any more ({self.path}: {error.strerror}); what is "
                "not there is read from its files"
            )

    def remove(self) -> None:
        """Delete the folder and all in it, as far as that is possible."""
        shutil.rmtree(self.path, ignore_errors=True)

    def close(self) -> None:
        """Let go of the folder."""
        if self._held >= 0:
            os.close(self._held)
            self._held = -1


def _hold(folder: Path) -> int:
    """A folder's descriptor, which holds a lock on it where its file system knows any."""
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    with suppress(OSError):
        fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return held


def _remove_unheld(folder: Path) -> None:
    try:
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        if read_plain(folder / MARKER, len(MARK)) == MARK:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:  # it has no marker, a run holds it, or locks are not known
        return
    finally:
        os.close(held)


def _unusable(cache_dir: Path, error: OSError) -> TilenetError:
    return TilenetError(
        f"cache_dir must be a folder that can be written on every node, by all its ranks "
        f"({cache_dir}: {error.strerror}); name another one, or leave it out"
    )


BLOCK_PX = 512

Arrays = tuple[NDArray[Any], ...]


@dataclass(frozen=True)
class Kind:
    """One of the arrays that a read gives.

    Attributes:
        planes: Shape in front of rows and columns: (C,) of values, () of what is one plane.
        dtype: Dtype that is read.
        stored: Dtype that is written; blocks whose numbers it cannot hold are not.
    """

    planes: tuple[int, ...]
    dtype: np.dtype[Any]
    stored: np.dtype[Any]


class StagedBlocks:
    """The blocks of an image, or of its labels.

    Args:
        folder: Where they are.
        identity: Whatever values depend on: files, when they were changed, bands, keys. It is
            compared by its `repr`.
        size: Height and width of the image at the resolution that is read.
        kinds: Kinds of the arrays that a read gives.
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
                part = overlap(window, place)
                assert part is not None
                into, of = (..., *within(part, window)), (..., *within(part, place))
                for array, given in zip(arrays, found, strict=True):
                    array[into] = given[of]
                for col in wanted:
                    self._store(row, col, place, found)
        return arrays

    def _place(self, row: int, col: int, count: int) -> Window:
        """Pixels of a number of blocks next to one another."""
        top, left = row * BLOCK_PX, col * BLOCK_PX
        width = min(count * BLOCK_PX, self._size[1] - left)
        return Window(top, left, min(BLOCK_PX, self._size[0] - top), width)

    def _name(self, row: int, col: int) -> str:
        return f"{self._key}-{row}-{col}"

    def _load(self, row: int, col: int, window: Window, arrays: Arrays) -> bool:
        """Fill in what a block holds of a window; False: it is not there, or not whole."""
        block = self._place(row, col, 1)
        part = overlap(block, window)
        assert part is not None
        of, into = (..., *within(part, block)), (..., *within(part, window))
        shapes = [(*kind.planes, block.height, block.width) for kind in self._kinds]
        sizes = [prod(s) * k.stored.itemsize for s, k in zip(shapes, self._kinds, strict=True)]
        try:
            stored = np.fromfile(self._folder.path / self._name(row, col), np.uint8)
        except OSError:
            return False
        if len(stored) != sum(sizes):
            return False
        ends = np.cumsum(sizes)[:-1]
        for flat, shape, kind, array in zip(
            np.split(stored, ends), shapes, self._kinds, arrays, strict=True
        ):
            array[into] = flat.view(kind.stored).reshape(shape)[of]
        return True

    def _store(self, row: int, col: int, place: Window, found: Arrays) -> None:
        """Write a block of those that were read together."""
        of = (..., *within(self._place(row, col, 1), place))
        arrays = []
        for kind, array in zip(self._kinds, found, strict=True):
            part = array[of]
            stored = np.ascontiguousarray(part, kind.stored)
            if kind.stored != kind.dtype and not np.array_equal(stored, part):
                return
            arrays.append(stored)
        self._folder.write(self._name(row, col), arrays)


class BlockCache:
    """The blocks that were used last, in a number of bytes."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.num_bytes = most_bytes, 0
        self._blocks: OrderedDict[tuple[Hashable, int, int], NDArray[np.int64]] = OrderedDict()

    def get(self, owner: Hashable, row: int, col: int) -> NDArray[np.int64] | None:
        """A block, if it is still there; of the smallest dtype that holds it."""
        block = self._blocks.get((owner, row, col))
        if block is not None:
            self._blocks.move_to_end((owner, row, col))
        return block

    def put(self, owner: Hashable, row: int, col: int, block: NDArray[np.int64]) -> None:
        """Keep a block; the ones that were used longest ago make room."""
        least, most = np.min_scalar_type(block.min()), np.min_scalar_type(block.max())
        small = block.astype(np.result_type(least, most))
        self._blocks[owner, row, col] = small
        self.num_bytes += small.nbytes
        while self.num_bytes > self.most_bytes and len(self._blocks) > 1:
            self.num_bytes -= self._blocks.popitem(last=False)[1].nbytes

    def drop(self, owner: Hashable) -> None:
        """Forget all blocks of an owner."""
        for key in [key for key in self._blocks if key[0] == owner]:
            self.num_bytes -= self._blocks.pop(key).nbytes
