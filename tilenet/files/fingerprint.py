"""Whether files are still those that were read: their names, sizes and times of change."""

import glob
import os
from collections.abc import Iterable
from pathlib import Path

__all__ = ["Fingerprint", "files_beside", "fingerprint"]

# Absolute path, bytes, and nanoseconds of the last change, of each file.
Fingerprint = tuple[tuple[str, int, int], ...]


def fingerprint(paths: Iterable[str]) -> Fingerprint | None:
    """Of files as they are now; None: some are none (a file within an archive, on the web)."""
    try:
        return tuple(
            (os.path.abspath(path), stat.st_size, stat.st_mtime_ns)
            for path in paths
            for stat in [os.stat(path)]
        )
    except OSError:
        return None


def files_beside(path: str) -> tuple[str, ...]:
    """A file and those that belong to it; all that a folder holds (File Geodatabase).

    A Shapefile's attributes and CRS stand in files of the same stem, as does what a GeoPackage that
    is open elsewhere has not yet taken in, in a file of the same beginning.
    """
    whole = Path(path)
    if whole.is_dir():
        return tuple(sorted(str(part) for part in whole.rglob("*") if part.is_file()))
    folder = glob.escape(str(whole.parent))
    stem, name = glob.escape(whole.stem), glob.escape(whole.name)
    found = {*glob.glob(f"{folder}/{stem}.*"), *glob.glob(f"{folder}/{name}-wal")}
    return tuple(sorted({path, *(part for part in found if Path(part) != whole)}))
