"""Find a checkpoint with whole files, to resume a run from or to make a map with."""

import os
from dataclasses import dataclass
from pathlib import Path

from tilenet.errors import TilenetError
from tilenet.storage.checkpoints import (
    FILES,
    NETWORK,
    WEIGHTS,
    find_checkpoint,
    saved_checkpoints,
    step_order,
)
from tilenet.storage.checksums import wrong_file

MOST_SAID = 3


@dataclass(frozen=True)
class BrokenCheckpoint:
    """A checkpoint that is not as it was written.

    Attributes:
        path: Link to the checkpoint, or its folder.
        wrong: Reason why it is broken.
    """

    path: Path
    wrong: str

    @property
    def folder(self) -> Path:
        """The checkpoint's folder, without links; it may be missing."""
        return Path(os.path.realpath(self.path))


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a run resumes from.

    Attributes:
        checkpoint: Its folder; None: the run has no checkpoint.
        broken: Newer checkpoints that are broken, and the best one if that is broken.
    """

    checkpoint: Path | None
    broken: tuple[BrokenCheckpoint, ...]


def newest_whole(run: Path) -> ResumePoint:
    """The checkpoint that `last` names if it is whole, else the newest whole one before it.

    All files of each, and of the best one, are read and compared with their checksums.

    Raises:
        TilenetError: There are checkpoints, but no whole one.
    """
    candidates = saved_checkpoints(run)[::-1]
    if os.path.lexists(run / "last"):
        order = step_order(Path(os.path.realpath(run / "last")))
        if order is not None:
            candidates = [c for c in candidates if (step_order(c) or order) < order]
        candidates.insert(0, run / "last")
    broken: list[BrokenCheckpoint] = []
    chosen = None
    for candidate in candidates:
        wrong = wrong_file(candidate, FILES)
        if wrong is None:
            chosen = candidate
            break
        broken.append(BrokenCheckpoint(candidate, wrong))
    if chosen is None and broken:
        listing = "; ".join(f"{entry.path}: {entry.wrong}" for entry in broken[:MOST_SAID])
        more = f"; and {len(broken) - MOST_SAID} more" * (len(broken) > MOST_SAID)
        raise TilenetError(
            f"a run goes on from a whole checkpoint ({listing}{more}); put a copy of one in place, "
            "or start over with --overwrite instead of --resume"
        )
    if chosen is None:
        return ResumePoint(None, ())
    best = run / "best"
    compared = {os.path.realpath(path) for path in (chosen, *(entry.path for entry in broken))}
    if os.path.lexists(best) and os.path.realpath(best) not in compared:
        wrong = wrong_file(best, FILES)
        if wrong is not None:
            broken.append(BrokenCheckpoint(best, wrong))
    return ResumePoint(chosen, tuple(broken))


def checked_checkpoint(path: Path) -> Path:
    """Find a checkpoint as `find_checkpoint` does, and compare its network with the checksums.

    An older one never takes its place: a map made with other weights would look right.

    Raises:
        TilenetError: The path names no checkpoint, or a file of it is broken; the error names a
            whole checkpoint of the run.
    """
    folder = path / "last" if os.path.lexists(path / "last") else path
    if not folder.is_symlink() and not any((folder / name).is_file() for name in FILES):
        return find_checkpoint(path)
    files = (WEIGHTS, NETWORK)
    wrong = wrong_file(folder, files)
    if wrong is None:
        return folder
    candidates = saved_checkpoints(Path(os.path.realpath(folder)).parent.parent)[::-1]
    newest = next((other for other in candidates if wrong_file(other, files) is None), None)
    remedy = "no other one of its run is whole"
    if newest is not None:
        remedy = f"name {newest}, which is whole"
    raise TilenetError(f"a checkpoint's files must be whole ({folder}: {wrong}); {remedy}")
