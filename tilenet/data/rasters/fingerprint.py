"""Whether files are still those that were read: by their names, sizes and times of change."""

import glob
import os
from collections.abc import Iterable
from pathlib import Path

# Absolute path, bytes, and nanoseconds of the last change, of each file.
Fingerprint = tuple[tuple[str, int, int], ...]


def fingerprint(paths: Iterable[str]) -> Fingerprint | None:
    """Fingerprint of files as they are now; None: one is in an archive, on the web, or of Zarr.

    Of Zarr GDAL names what describes the pixels, not the files that hold them.
    """
    paths = tuple(paths)
    if any(os.path.basename(path) in (".zarray", "zarr.json") for path in paths):
        return None
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

    No file of a virtual one (OGR VRT), since those that it reads are not known.

    A Shapefile's attributes and CRS stand in files of the same stem, as does what a GeoPackage that
    is open elsewhere has not yet taken in, in a file of the same beginning.
    """
    whole = Path(path)
    if whole.suffix.lower() == ".vrt":
        return ()
    if whole.is_dir():
        return tuple(sorted(str(part) for part in whole.rglob("*") if part.is_file()))
    folder = glob.escape(str(whole.parent))
    stem, name = glob.escape(whole.stem), glob.escape(whole.name)
    files = {*glob.glob(f"{folder}/{stem}.*"), *glob.glob(f"{folder}/{name}-wal")}
    return tuple(sorted({path, *(part for part in files if Path(part) != whole)}))
