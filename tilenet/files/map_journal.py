"""What is done of a map: lines of JSON beside it, each true once it stands there.

The first line says what the map is made of; the others name tiles that are on the disk, and sums
that were found on the way to them. A map goes on only where nothing of the first line has changed.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilenet.errors import TilenetError

__all__ = ["Done", "MapJournal", "file_facts", "hash_of"]


@dataclass
class Done:
    """What a journal says.

    Attributes:
        tiles: Numbers of the tiles whose pixels are on the disk.
        sums: By a name, the last that was noted under it.
    """

    tiles: set[int] = field(default_factory=set)
    sums: dict[str, dict[str, Any]] = field(default_factory=dict)


class MapJournal:
    """The journal of a map; rank 0 keeps it.

    Args:
        path: Of its file.
        made_of: What the map is made of: plain values.
    """

    def __init__(self, path: str, made_of: dict[str, Any]) -> None:
        self.path = path
        # As they come back from the file: lists for tuples.
        self.made_of: dict[str, Any] = json.loads(json.dumps(made_of))

    def read(self) -> tuple[Done | None, str]:
        """What was done of the same map; else None and why, "" where there was no journal.

        A line that a killed run did not finish is as if it were not there.
        """
        try:
            text = Path(self.path).read_bytes()
        except OSError:
            return None, ""
        entries = list(_entries(text))
        if not entries:
            return None, "not said any more: its journal cannot be read"
        before = entries[0]
        # As text: nodata may be NaN, which equals nothing.
        other = [
            name
            for name in {**self.made_of, **before}
            if json.dumps(self.made_of.get(name)) != json.dumps(before.get(name))
        ]
        if other:
            return None, f"of something else: {', '.join(other)}"
        done = Done()
        for entry in entries[1:]:
            done.tiles.update(entry.get("tiles", ()))
            done.sums.update(entry.get("sums", {}))
        return done, ""

    def begin(self) -> None:
        """Start anew."""
        with open(self.path, "wb"):
            pass
        self._add(self.made_of)

    def mend(self) -> None:
        """Take away the line that a killed run did not finish."""
        whole = Path(self.path).read_bytes().rfind(b"\n") + 1
        os.truncate(self.path, whole)

    def add_tiles(self, tiles: Sequence[int]) -> None:
        """Note tiles whose pixels are on the disk."""
        self._add({"tiles": list(tiles)})

    def add_sums(self, name: str, sums: dict[str, Any]) -> None:
        """Note sums; floats come back to the last bit."""
        self._add({"sums": {name: sums}})

    def remove(self) -> None:
        """Delete it."""
        Path(self.path).unlink(missing_ok=True)

    def _add(self, entry: dict[str, Any]) -> None:
        with open(self.path, "ab") as file:
            file.write(json.dumps(entry).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def _entries(text: bytes) -> Iterator[dict[str, Any]]:
    """Those of whole lines, up to the first that is none."""
    with contextlib.suppress(ValueError, TypeError):
        for line in text.split(b"\n")[:-1]:
            yield dict(json.loads(line))


def file_facts(paths: Iterable[str]) -> list[list[Any]]:
    """Of each file its name, bytes and time of its last change; the name alone of no local file."""
    facts: list[list[Any]] = []
    for path in paths:
        facts.append([os.path.basename(path)])
        with contextlib.suppress(OSError):
            found = os.stat(path)
            facts[-1] += [found.st_size, found.st_mtime_ns]
    return facts


def hash_of(path: Path) -> str:
    """SHA-256 of a file.

    Raises:
        TilenetError: It cannot be read.
    """
    try:
        found = hashlib.sha256()
        with open(path, "rb") as file:
            while part := file.read(1 << 24):
                found.update(part)
    except OSError as error:
        raise TilenetError(
            f"a checkpoint's files must be whole ({path}: {error.strerror}); use another checkpoint"
        ) from error
    return found.hexdigest()
