"""The files that a map is computed from: to notice when one changes, or would be replaced."""

import hashlib
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tilenet.errors import TilenetError

END_BYTES = 1 << 16


def check_image_stays(path: str, files: Iterable[str]) -> None:
    """Refuse a map in the place of a file that its image is read from, as one that a VRT names.

    Args:
        files: All files of the image.

    Raises:
        TilenetError: The map would replace one.
    """
    if os.path.exists(path) and os.path.realpath(path) in map(os.path.realpath, files):
        raise TilenetError(
            f"a map may not replace what its image is read from ({path}); give it another name"
        )


def describe_files(paths: Iterable[str]) -> list[list[Any]]:
    """Each file's name, bytes, time of last change and a hash of its ends; of remote ones the name.

    Files of one size that an archive held may have one name and time.
    """
    facts: list[list[Any]] = []
    for path in paths:
        facts.append([os.path.basename(path)])
        with suppress(OSError):
            status = os.stat(path)
            facts[-1] += [status.st_size, status.st_mtime_ns]
            with open(path, "rb") as file:
                begin = file.read(END_BYTES)
                file.seek(max(0, status.st_size - END_BYTES))
                facts[-1].append(hashlib.sha256(begin + file.read(END_BYTES)).hexdigest())
    return facts


def hash_file(path: Path) -> str:
    """SHA-256 of a file.

    Raises:
        TilenetError: It cannot be read.
    """
    try:
        checksum = hashlib.sha256()
        with open(path, "rb") as file:
            while part := file.read(1 << 24):
                checksum.update(part)
    except OSError as error:
        raise TilenetError(
            f"a checkpoint's files must be whole ({path}: {error.strerror}); use another checkpoint"
        ) from error
    return checksum.hexdigest()
