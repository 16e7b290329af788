"""Tiles of a map that are compressed: a record among its pieces says how many are whole."""

import json
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from tilenet.mapping.writing.map_pieces import put_file

RECORD = "compressed.json"
# Errors that a spoilt record raises.
SPOILT = ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError


@dataclass
class CompressedTiles:
    """Tiles of a map that are compressed: how many of each file the disk holds.

    Files of tiles are the same on any number of ranks, which fill them in rounds from the front. A
    record among the pieces lists the bytes of the tiles that the disk held when it was written:
    a job that goes on compresses the others. It is removed before any piece is written again.

    Attributes:
        folder: Folder of the record and the files.
        key: Hash of all that their bytes depend on, but for the pieces of the map.
        files: Bytes of the first tiles of each file, by the file's name.
    """

    folder: Path
    key: str
    files: dict[str, list[int]] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path, made_of: object) -> "CompressedTiles":
        """The record in a folder; an empty one where it is of something else, or cannot be read.

        Args:
            made_of: Values with a `repr` that changes with all that the bytes depend on.
        """
        key = sha256(repr(made_of).encode()).hexdigest()
        written_key, files = _read_record(folder)
        return cls(folder, key, files if written_key == key else {})

    def put(self, name: str, sizes: list[int]) -> None:
        """Have the record say these tiles of a file, which the disk holds.

        Raises:
            OSError: The disk does not take it.
        """
        self.files[name] = sizes
        text = json.dumps({"key": self.key, "files": self.files})
        put_file(self.folder / RECORD, text.encode())


def remove_record(folder: Path) -> None:
    """Remove the record: pieces of the map change.

    Raises:
        OSError: It cannot be removed.
    """
    (folder / RECORD).unlink(missing_ok=True)


def _read_record(folder: Path) -> tuple[str, dict[str, list[int]]]:
    """Key and files of the record."""
    try:
        record = json.loads((folder / RECORD).read_bytes())
        files = {str(name): [*map(int, sizes)] for name, sizes in record["files"].items()}
        return str(record["key"]), files
    except (OSError, *SPOILT):
        return "", {}


def remove_partial(cog: str) -> None:
    """Remove a file and those next to it that begin with its name, but for those of the record."""
    path = Path(cog)
    _, files = _read_record(path.parent)
    with suppress(OSError):
        for file in path.parent.glob(f"{path.name}*"):
            if not files.get(file.name):
                file.unlink()
