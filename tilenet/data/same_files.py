"""The files that a run is trained and scored on: one hash tells whether all ranks see the same.

Names without folders, sizes in bytes and GDAL's facts: so a folder may be moved between
two runs, but a file may not be another one, neither in a run that goes on nor on another node.
Of files of one name another hash tells which is which, by the folders in which they differ.
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from tilenet.data.labels.source import LabelSource
from tilenet.data.rasters.location import file_name, is_remote, real_path
from tilenet.data.rasters.raster import Raster
from tilenet.data.rasters.stacked_paths import stacked_paths
from tilenet.errors import TilenetError
from tilenet.mpi import Intracomm
from tilenet.parallel.ranks.comm import agreed


@dataclass(frozen=True)
class SampleFile:
    """An image or its labels.

    Attributes:
        path: Path in the run file; not a part of the hash.
        split: `train` or `validation`.
        role: `image` or `labels`.
        facts: Bytes of each file of a stack, `?` for one elsewhere, such as /vsicurl/; and GDAL's
            facts about it.
        shared: Files of a stack that lie on another grid, such as heights: many images may have
            them.
        sources: Files that are read through a virtual raster (VRT).
    """

    path: str
    split: str
    role: str
    facts: str
    shared: frozenset[str] = frozenset()
    sources: frozenset[str] = frozenset()

    @property
    def text(self) -> str:
        """The text that must be the same on all ranks, without the folder."""
        names = "+".join(file_name(part) for part in stacked_paths(self.path))
        return f"{self.split} {self.role} {names}: {self.facts}"


def sample_files(
    images: Sequence[Raster], labels: Sequence[LabelSource], split: str
) -> list[SampleFile]:
    """The files of open images and labels, in order."""
    files = []
    for image, part in zip(images, labels, strict=True):
        shared = frozenset(view.path for view in image.stack.resampled)
        virtual = any(part.lower().endswith(".vrt") for part in stacked_paths(image.path))
        sources = frozenset(image.files if virtual else ())
        files.append(SampleFile(image.path, split, "image", _facts(image), shared, sources))
        files.append(SampleFile(part.path, split, "labels", _facts(part)))
    return files


def _facts(file: Raster | LabelSource) -> str:
    parts = stacked_paths(file.path)
    sizes = [str(os.path.getsize(part)) if os.path.exists(part) else "?" for part in parts]
    return f"{'+'.join(sizes)} bytes" + f", {file.facts}" * bool(file.facts)


def _identity(path: str) -> tuple[int, int] | str:
    """What a file has under all its names, hard links too; where it is no local one, its path."""
    try:
        status = os.stat(path)
    except OSError:
        return real_path(path)
    return status.st_dev, status.st_ino


def hash_of(files: Sequence[SampleFile]) -> str:
    """A function of the files' texts, in their order."""
    return _digest([file.text for file in files])


def _digest(texts: Sequence[str]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for text in texts:
        digest.update(f"{text}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def hash_of_folders(files: Sequence[SampleFile]) -> str:
    """A function of where files of one name lie, in their order; a folder of all may be moved.

    Images have names of their own, and labels have.
    """
    places = [(file.role, _places(part)) for file in files for part in stacked_paths(file.path)]
    folders: dict[tuple[str, str], list[list[str]]] = {}
    for role, (*folder, name) in places:
        folders.setdefault((role, name), []).append(folder)
    common = {key: _num_equal(several) for key, several in folders.items()}
    return _digest(["/".join(place[common[role, place[-1]] :]) for role, place in places])


def _num_equal(folders: Sequence[Sequence[str]]) -> int:
    """Number of the first parts that are the same in all of them."""
    levels = zip(*folders, strict=False)
    return len(list(takewhile(lambda level: len(set(level)) == 1, levels)))


def _places(path: str) -> list[str]:
    """The folders of a file, from the root or the server on, and its name."""
    local = not is_remote(path)
    return (os.path.abspath(path) if local else path.partition("?")[0]).split("/")


def check_apart(files: Sequence[SampleFile], *, once: bool) -> None:
    """Refuse images that are both trained on and scored on.

    Args:
        once: Whether no image, and no file of a stack, may stand twice among training images
            either: where blocks of one are held out, those of the other would not be.

    Raises:
        TilenetError: The error names the first of them.
    """
    # Split, and whether images may share it, of each file.
    splits: dict[tuple[int, int] | str, tuple[str, bool]] = {}
    for file in files:
        if file.role != "image":
            continue
        # The files of an image, each once, through links too.
        shared = set(map(_identity, file.shared))
        for key, part in {_identity(path): path for path in stacked_paths(file.path)}.items():
            before, was_shared = splits.get(key, ("", True))
            splits[key] = file.split, was_shared and key in shared
            if was_shared and key in shared:
                continue
            if before not in ("", file.split):
                raise _in_both(file.path)
            if once and before == "train":
                raise TilenetError(
                    f"where blocks are held out, images stands for each image once ({part}: "
                    "several times); list it once, or leave validation.share out"
                )
    # Each once: thousands of images may be read from one mosaic.
    keys = {source: _identity(source) for source in set().union(*(f.sources for f in files))}
    for file in files:
        for source in file.sources:
            split, is_shared = splits.get(keys[source], ("", True))
            if not is_shared and split != file.split:
                raise _in_both(f"{file.path} reads {source}")


def _in_both(what: str) -> TilenetError:
    return TilenetError(
        f"an image is for training or for validation, not both ({what}), since its score would be "
        "that of what is known by heart; take it out of one of them"
    )


def check_same_files(files: Sequence[SampleFile], comm: Intracomm) -> str:
    """Number of the files, and their hash, which is equal on all ranks. Collective.

    Only hashes travel, unless they differ.

    Raises:
        AgreedError: A file differs from that of rank 0; all ranks name the first such file.
    """
    own = hash_of(files)
    if len(set(comm.allgather(own))) == 1:
        return f"{len(files)} files, {own}"
    first = comm.bcast([(file.text, file.path, file.facts) for file in files])
    with agreed(comm):
        if len(files) != len(first):
            raise TilenetError(
                f"all ranks must be given the same files (rank 0: {len(first)}, rank {comm.rank}: "
                f"{len(files)}); start them with one run file"
            )
        for file, (text, path, facts) in zip(files, first, strict=True):
            if file.text != text:
                raise TilenetError(
                    f"all ranks must see the same files ({path} on rank 0: {facts}; {file.path} "
                    f"on rank {comm.rank}: {file.facts}); copy it again to that node, or use a "
                    "shared folder"
                )
    raise AssertionError("hashes differ and no file does")
