"""A pool of host memory or of a file, for tensors that are swapped out.

The pool grows by slabs, whose parts are handed out first fit and taken back. Slabs and not one
allocation per tensor: pinning memory stops the device, and torch's own pinned allocator rounds each
allocation up to a power of two.
"""

import errno
import mmap
import os
import tempfile
from abc import ABC, abstractmethod
from bisect import insort
from dataclasses import dataclass

import torch
from torch import Tensor

from tilenet.errors import TilenetError

MIB = 1 << 20
ALIGNMENT = 512  # bytes: any dtype may begin there, and devices copy whole lines


@dataclass(frozen=True, order=True)
class SlabPart:
    """A piece of a slab.

    Attributes:
        slab: Number of the slab.
        start: First byte in it.
        size: Bytes, a multiple of the alignment.
    """

    slab: int
    start: int
    size: int


class Slabs(ABC):
    """A pool that grows by slabs up to a limit.

    Args:
        limit_bytes: Most bytes of all slabs together; None for no limit.
        slab_bytes: Least bytes of a slab; a larger tensor gets a slab of its own.

    Attributes:
        used_bytes: Bytes that are handed out now.
        total_bytes: Bytes of all slabs.
    """

    def __init__(self, limit_bytes: int | None = None, slab_bytes: int = 64 * MIB) -> None:
        self._limit_bytes, self._slab_bytes = limit_bytes, slab_bytes
        self._slabs: list[Tensor] = []
        self._free: list[SlabPart] = []  # in order, none next to the next
        self.used_bytes = 0
        self.total_bytes = 0

    def take(self, num_bytes: int) -> SlabPart:
        """Hand out a part of at least `num_bytes` bytes.

        Raises:
            TilenetError: The limit is reached, or there is no room.
        """
        size = -(-max(num_bytes, 1) // ALIGNMENT) * ALIGNMENT
        place = next((i for i, free in enumerate(self._free) if free.size >= size), None)
        if place is None:
            place = self._grow(size)
        free = self._free.pop(place)
        if free.size > size:
            self._free.insert(place, SlabPart(free.slab, free.start + size, free.size - size))
        self.used_bytes += size
        return SlabPart(free.slab, free.start, size)

    def _grow(self, size: int) -> int:
        # In proportion, too: each slab of a file holds a file descriptor, of which there are few.
        room = max(self._slab_bytes, self.total_bytes // 8)
        if self._limit_bytes is not None:
            room = min(room, self._limit_bytes - self.total_bytes)
        size = self._slab_size(size, room)
        if self._limit_bytes is not None and self.total_bytes + size > self._limit_bytes:
            raise TilenetError(
                f"tensors that are swapped out must fit the host's share (needed: "
                f"{(self.total_bytes + size) / MIB:.1f} MiB, limit: "
                f"{self._limit_bytes / MIB:.1f} MiB); raise that limit "
                "(host_limit_bytes, of runs swapping.host_gib), or keep more on the device"
            )
        self._slabs.append(self._make(size))
        self.total_bytes += size
        slab = SlabPart(len(self._slabs) - 1, 0, size)
        insort(self._free, slab)
        return self._free.index(slab)

    def _slab_size(self, size: int, room: int) -> int:
        """Bytes of a new slab: at least `size`, and else at most `room`."""
        return max(size, room // ALIGNMENT * ALIGNMENT)

    def give_back(self, part: SlabPart) -> None:
        """Take a part back."""
        insort(self._free, part)
        place = self._free.index(part)
        for first in (place, place - 1):  # with the next one, then with the one before
            if 0 <= first < len(self._free) - 1:
                a, b = self._free[first], self._free[first + 1]
                if a.slab == b.slab and a.start + a.size == b.start:
                    self._free[first : first + 2] = [SlabPart(a.slab, a.start, a.size + b.size)]
        self.used_bytes -= part.size

    def bytes_of(self, part: SlabPart, num_bytes: int) -> Tensor:
        """The part's first bytes, uint8 and on the host."""
        return self._slabs[part.slab][part.start : part.start + num_bytes]

    @abstractmethod
    def suits(self, device: torch.device) -> bool:
        """Whether tensors of a device free its memory by moving to this pool."""

    @abstractmethod
    def _make(self, num_bytes: int) -> Tensor:
        """A new slab, uint8."""

    def close(self) -> None:
        """Free all slabs, with the parts that were handed out."""
        self._slabs.clear()
        self._free.clear()
        self.used_bytes = self.total_bytes = 0


class PinnedSlabs(Slabs):
    """Host memory that devices copy from and to by themselves."""

    def suits(self, device: torch.device) -> bool:
        return device.type != "cpu"

    def _slab_size(self, size: int, room: int) -> int:
        # Powers of two: what torch rounds others up to would be locked, and neither used nor
        # counted against the limit.
        return max(1 << (size - 1).bit_length(), 1 << room.bit_length() >> 1)

    def _make(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


class FileSlabs(Slabs):
    """A memory-mapped file, for where host memory is short or there is no device.

    The file has no name from the first moment on, so that nothing is left of it however the job
    ends, and its room is reserved before it is written: a full disk must be an error, not a signal.

    Args:
        folder: Folder on a disk with enough room.
    """

    def __init__(
        self, folder: str, limit_bytes: int | None = None, slab_bytes: int = 64 * MIB
    ) -> None:
        super().__init__(limit_bytes, slab_bytes)
        self._folder = folder
        self._end = 0
        try:
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115, it lives as this does
        except OSError as error:
            raise TilenetError(
                f"tensors are swapped to a file, so its folder must be writable ({folder}: "
                f"{error.strerror}); choose another (swap_dir, of runs swapping.folder)"
            ) from error

    def suits(self, device: torch.device) -> bool:
        return True

    def _make(self, num_bytes: int) -> Tensor:
        size = -(-num_bytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        try:
            os.posix_fallocate(self._file.fileno(), self._end, size)
            mapped = mmap.mmap(self._file.fileno(), size, offset=self._end)
        except OSError as error:
            os.ftruncate(self._file.fileno(), self._end)  # a full disk was filled to the brim
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM):
                raise
            raise TilenetError(
                f"tensors that are swapped out must fit the disk ({self._folder}: no room for "
                f"{(self._end + size) / MIB:.1f} MiB, {error.strerror}); choose a larger one "
                "(swap_dir, of runs swapping.folder), or keep more in memory"
            ) from error
        self._end += size
        return torch.frombuffer(mapped, dtype=torch.uint8)[:num_bytes]

    def close(self) -> None:
        super().close()
        self._file.close()


def open_slabs(folder: str | None, limit_bytes: int | None, *, pinned: bool) -> Slabs:
    """A pool for storages that are swapped out.

    Args:
        folder: Folder of its file; None for pinned memory, or the folder for temporary files.
        limit_bytes: Most bytes of all slabs together; None for no limit.
        pinned: Whether there is a device to pin memory for.

    Raises:
        TilenetError: The folder is not writable.
    """
    if pinned and folder is None:
        return PinnedSlabs(limit_bytes)
    return FileSlabs(folder or tempfile.gettempdir(), limit_bytes)
