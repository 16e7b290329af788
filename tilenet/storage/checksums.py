"""SHA-256 of a checkpoint's files: written with it, compared before anything relies on them.

Not a faster sum: `sha256sum` is everywhere, so that a copy in an archive can be checked without
tilenet.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tilenet.storage.strict_json import parsed_json

CHECKSUMS = "checksums.json"
PIECE_BYTES = 1 << 20


def checksums_text(files: Iterable[Path]) -> str:
    """Contents of `checksums.json`: SHA-256 and bytes of files by name, read from them.

    Raises:
        OSError: A file cannot be read.
    """
    return json.dumps({file.name: _sum(file) for file in files}, indent=1) + "\n"


def wrong_file(folder: Path, names: Iterable[str]) -> str | None:
    """Describe the first of a checkpoint's files that differs; None: all are as written.

    Without `checksums.json`, in a folder made by hand, files need only be there.
    """
    if not folder.is_dir():
        return "it is not there"
    sums: Any = None
    try:
        if (folder / CHECKSUMS).exists():
            sums = parsed_json((folder / CHECKSUMS).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        return f"{CHECKSUMS} cannot be read: {error}"
    for name in names:
        try:
            (folder / name).stat()
            wrong = None if sums is None else _wrong_sum(folder / name, sums)
        except FileNotFoundError:
            wrong = "is missing"
        except OSError as error:
            wrong = f"cannot be read: {error.strerror}"
        if wrong:
            return f"{name} {wrong}"
    return None


def _sum(file: Path) -> dict[str, str | int]:
    digest, num_bytes, piece = hashlib.sha256(), 0, bytearray(PIECE_BYTES)
    with file.open("rb", buffering=0) as opened:
        while got := opened.readinto(piece):
            digest.update(memoryview(piece)[:got])
            num_bytes += got
    return {"sha256": digest.hexdigest(), "bytes": num_bytes}


def _wrong_sum(file: Path, sums: Any) -> str | None:
    recorded = sums.get(file.name) if isinstance(sums, dict) else None
    if not isinstance(recorded, dict) or not {"sha256", "bytes"} <= recorded.keys():
        return f"has no SHA-256 in {CHECKSUMS}"
    num_bytes = file.stat().st_size
    if num_bytes != recorded["bytes"]:  # known without reading it
        return f"has {num_bytes} bytes of {recorded['bytes']}"
    return None if _sum(file) == recorded else f"is not what {CHECKSUMS} says: its SHA-256 differs"
