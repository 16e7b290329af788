"""Check that all ranks see the same files: each node may have its own copy, or an old one."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tilenet.errors import TilenetError
from tilenet.parallel.ranks.comm import agreed

if TYPE_CHECKING:
    from mpi4py import MPI
from tilenet.data.same_files import SampleFile, hash_of

__all__ = ["check_same_files"]


def check_same_files(files: Sequence[SampleFile], comm: "MPI.Intracomm") -> str:
    """How many files there are, and their hash, which is that of all ranks. Collective.

    Only hashes travel, unless they differ.

    Raises:
        AgreedError: A file differs from that of rank 0; all ranks name the first such file.
    """
    own = hash_of(files)
    if len(set(comm.allgather(own))) == 1:
        return f"{len(files)} files, {own}"
    first = comm.bcast([(file.text, file.path, file.shown) for file in files])
    with agreed(comm):
        if len(files) != len(first):
            raise TilenetError(
                f"all ranks must be given the same files (rank 0: {len(first)}, rank {comm.rank}: "
                f"{len(files)}); start them with one run file"
            )
        for file, (text, path, shown) in zip(files, first, strict=True):
            if file.text != text:
                raise TilenetError(
                    f"all ranks must see the same files ({path} on rank 0: {shown}; {file.path} "
                    f"on rank {comm.rank}: {file.shown}); copy it again to that node, or use a "
                    "shared folder"
                )
    raise AssertionError("hashes differ and no file does")
