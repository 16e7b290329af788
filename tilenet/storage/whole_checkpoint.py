"""Which checkpoint of a run is whole: to go on from, or to make a map with."""

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
from tilenet.storage.checksums import (
    wrong_file,
)

__all__ = ["Broken", "GoingOn", "checked_checkpoint", "newest_whole"]

MOST_SAID = 3


@dataclass(frozen=True)
class Broken:
    """A checkpoint that is not as it was written.

    Attributes:
        named: The link or folder that it was found by.
        wrong: What is wrong with it.
    """

    named: Path
    wrong: str

    @property
    def folder(self) -> Path:
        """The checkpoint's, without links; it may not be there."""
        return Path(os.path.realpath(self.named))


@dataclass(frozen=True)
class GoingOn:
    """What a run goes on from.

    Attributes:
        checkpoint: The one; None: the run has none.
        broken: Those that stand before it, and the best one, where it is.
    """

    checkpoint: Path | None
    broken: tuple[Broken, ...]


def newest_whole(run: Path) -> GoingOn:
    """The checkpoint that `last` names, if it is whole, or else the newest whole one before it.

    All of each is read and compared with its checksums, and so is the best one.

    Raises:
        TilenetError: There are checkpoints, and none is whole.
    """
    candidates = saved_checkpoints(run)[::-1]
    if os.path.lexists(run / "last"):
        order = step_order(Path(os.path.realpath(run / "last")))
        before = [one for one in candidates if order is None or (step_order(one) or order) < order]
        candidates = [run / "last", *before]
    broken: list[Broken] = []
    chosen = None
    for named in candidates:
        wrong = wrong_file(named, FILES)
        if wrong is None:
            chosen = named
            break
        broken.append(Broken(named, wrong))
    if chosen is None and broken:
        shown = "; ".join(f"{one.named}: {one.wrong}" for one in broken[:MOST_SAID])
        more = f"; and {len(broken) - MOST_SAID} more" * (len(broken) > MOST_SAID)
        raise TilenetError(
            f"a run goes on from a whole checkpoint ({shown}{more}); put a copy of one in place, "
            "or start over with --overwrite instead of --resume"
        )
    if chosen is None:
        return GoingOn(None, ())
    best = run / "best"
    seen = {os.path.realpath(one) for one in (chosen, *(one.named for one in broken))}
    if os.path.lexists(best) and os.path.realpath(best) not in seen:
        wrong = wrong_file(best, FILES)
        if wrong is not None:
            broken.append(Broken(best, wrong))
    return GoingOn(chosen, tuple(broken))


def checked_checkpoint(path: Path) -> Path:
    """The checkpoint that a path names, as `find_checkpoint`, whose network is as written.

    Never an older one in its place: weights that nobody asked for make a map that looks right.

    Raises:
        TilenetError: There is none, or a file of it is broken; it names a whole one of the run.
    """
    folder = path / "last" if os.path.lexists(path / "last") else path
    if not folder.is_symlink() and not any((folder / name).is_file() for name in FILES):
        return find_checkpoint(path)
    files = (WEIGHTS, NETWORK)
    wrong = wrong_file(folder, files)
    if wrong is None:
        return folder
    others = saved_checkpoints(Path(os.path.realpath(folder)).parent.parent)[::-1]
    newest = next((one for one in others if wrong_file(one, files) is None), None)
    remedy = "no other of its run is whole" if newest is None else f"{newest} is whole: name that"
    raise TilenetError(f"a checkpoint's files must be whole ({folder}: {wrong}); {remedy}")
