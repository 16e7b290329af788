"""The files that a map is computed from: to notice when one changes, or would be replaced."""

import hashlib
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tilenet.errors import TilenetError

__all__ = ["check_image_stays", "describe_files", "hash_file"]


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
    """Return each file's name, bytes and time of last change; of remote files the name alone."""
    facts: list[list[Any]] = []
    for path in paths:
        facts.append([os.path.basename(path)])
        with suppress(OSError):
            status = os.stat(path)
            facts[-1] += [status.st_size, status.st_mtime_ns]
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
