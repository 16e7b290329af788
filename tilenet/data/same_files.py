"""The files that a run is trained and scored on: what tells them apart, in one hash.

Names without folders, sizes in bytes and what GDAL says of them: so a folder may be moved between
two runs, but a file may not be another one, neither in a run that goes on nor on another node.

Check that all ranks see the same files: each node may have its own copy, or an old one.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tilenet.data.labels.source import LabelSource
from tilenet.data.rasters.raster import Raster
from tilenet.data.rasters.stack import stacked_paths
from tilenet.errors import TilenetError
from tilenet.parallel.ranks.comm import agreed

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["SampleFile", "check_apart", "check_same_files", "hash_of", "sample_files"]


@dataclass(frozen=True)
class SampleFile:
    """An image or its labels.

    Attributes:
        path: As given; not a part of the hash.
        split: `train` or `validation`.
        role: `image` or `labels`.
        bytes: Bytes of each file of a stack; None: no file of the file system, such as /vsicurl/.
        facts: What GDAL says of it.
    """

    path: str
    split: str
    role: str
    bytes: tuple[int | None, ...]
    facts: str

    @property
    def text(self) -> str:
        """What must be the same everywhere, without the folder."""
        names = "+".join(os.path.basename(part) for part in stacked_paths(self.path))
        return f"{self.split} {self.role} {names}: {self.shown}"

    @property
    def shown(self) -> str:
        """Sizes and facts, for people too."""
        sizes = "+".join("?" if size is None else str(size) for size in self.bytes)
        return f"{sizes} bytes" + f", {self.facts}" * bool(self.facts)


def sample_files(
    images: Sequence[Raster], labels: Sequence[LabelSource], split: str
) -> list[SampleFile]:
    """The files of open images and labels, in order."""
    found = []
    for image, part in zip(images, labels, strict=True):
        found.append(SampleFile(image.path, split, "image", _bytes(image.path), image.facts))
        found.append(SampleFile(part.path, split, "labels", _bytes(part.path), part.facts))
    return found


def hash_of(files: Sequence[SampleFile]) -> str:
    """A function of the files' texts, in their order."""
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        digest.update(f"{file.text}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def check_apart(files: Sequence[SampleFile], *, once: bool) -> None:
    """Refuse images that are both trained on and scored on.

    Args:
        once: Whether no image, and no file of a stack, may stand twice among those that are
            trained on either: where blocks of it are held out, those of the other one would not be.

    Raises:
        TilenetError: With the first of them.
    """
    split_of: dict[str, str] = {}
    for file in files:
        if file.role != "image":
            continue
        for part in _real_paths(file.path):
            before = split_of.setdefault(part, file.split)
            if before != file.split:
                raise TilenetError(
                    f"an image is for training or for validation, not both ({file.path}), since "
                    "its score would be that of what is known by heart; take it out of one of them"
                )
            split_of[part] = file.split
    if once:
        paths = [
            part
            for file in files
            if file.role == "image" and file.split == "train"
            for part in _real_paths(file.path)
        ]
        twice = next((path for path, count in Counter(paths).items() if count > 1), None)
        if twice is not None:
            raise TilenetError(
                f"where blocks are held out, images stands for each image once ({twice}: several "
                "times); list it once, or leave validation.share out"
            )


def _real_paths(path: str) -> tuple[str, ...]:
    """The files of an image, each once, whatever links lead there."""
    return tuple(dict.fromkeys(os.path.realpath(part) for part in stacked_paths(path)))


def _bytes(path: str) -> tuple[int | None, ...]:
    return tuple(_size(part) for part in stacked_paths(path))


def _size(path: str) -> int | None:
    try:
        return os.path.getsize(path)
    except OSError:
        return None


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
