"""Fingerprints of files that a map is computed from, to notice when a file changes."""

import hashlib
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tilenet.data.rasters.opening import opened
from tilenet.errors import TilenetError

__all__ = ["describe_files", "hash_file", "list_files"]


def list_files(paths: Iterable[str]) -> list[str]:
    """Return the files, and those that VRTs read through other VRTs, which GDAL does not list."""
    files = list(paths)
    for path in files:  # which grows
        if path.lower().endswith(".vrt"):
            with suppress(TilenetError), opened(path) as inner:
                files += [file for file in map(str, inner.files) if file not in files]
    return files


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
