"""SHA-256 of a checkpoint's files: written with it, compared before anything relies on them.

Not a faster sum: CRC-32 would take a tenth off a save (docs/checkpoint.md), and `sha256sum` is
everywhere, so that a copy in an archive can be checked without tilenet.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tilenet.files.plain_file import read_plain, refuse_special

__all__ = ["CHECKSUMS", "checksums_text", "differing_files", "forget_cached", "wrong_file"]

CHECKSUMS = "checksums.json"
PIECE_BYTES = 1 << 20
MOST_BYTES = 1 << 20  # of checksums.json


def checksums_text(files: Iterable[Path]) -> str:
    """What `checksums.json` says of files: by name the SHA-256 and the bytes, read from them.

    Raises:
        OSError: One cannot be read.
    """
    return json.dumps({file.name: _sum(file) for file in files}, indent=1) + "\n"


def wrong_file(folder: Path, names: Iterable[str]) -> str | None:
    """What is wrong with the first of a checkpoint's files that is not as written; None: nothing.

    A checkpoint without `checksums.json`, of an older version, is looked at for its form only: are
    the files there, is their JSON JSON, are tensors as long as their headers say.
    """
    if not folder.is_dir():
        return "it is not there"
    sums: Any = None
    try:
        if (folder / CHECKSUMS).exists():
            sums = json.loads(read_plain(folder / CHECKSUMS, MOST_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        return f"{CHECKSUMS} cannot be read: {error}"
    for name in names:
        try:
            refuse_special(folder / name)
            wrong = _wrong_form(folder / name) if sums is None else _wrong_sum(folder / name, sums)
        except FileNotFoundError:
            wrong = "is missing"
        except OSError as error:
            wrong = f"cannot be read: {error.strerror}"
        if wrong:
            return f"{name} {wrong}"
    return None


def differing_files(
    folder: Path, tensors: dict[str, dict[str, Tensor]], texts: dict[str, str]
) -> list[str]:
    """Names of files that do not hold, to the last bit, the tensors and texts given by name.

    Raises:
        OSError: One cannot be read.
    """
    wrong = [name for name, text in texts.items() if (folder / name).read_bytes() != text.encode()]
    for name, values in tensors.items():
        try:
            # One tensor at a time: no second copy of all.
            with safe_open(folder / name, "pt") as file:
                same = set(file.keys()) == values.keys() and all(
                    _equal(file.get_tensor(key), value) for key, value in values.items()
                )
        except SafetensorError:  # shorter than its header says, or no header
            same = False
        if not same:
            wrong.append(name)
    return wrong


def forget_cached(file: Path) -> None:
    """Have the system forget what it holds of a file, so that who reads it next asks the disk.

    What is not on the disk yet stays; where the system has no such request nothing happens.
    """
    if hasattr(os, "posix_fadvise"):
        handle = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same bits: a NaN equals itself."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (one, other)))


def _sum(file: Path) -> dict[str, str | int]:
    found, num_bytes, piece = hashlib.sha256(), 0, bytearray(PIECE_BYTES)
    with file.open("rb", buffering=0) as opened:
        while got := opened.readinto(piece):
            found.update(memoryview(piece)[:got])
            num_bytes += got
    return {"sha256": found.hexdigest(), "bytes": num_bytes}


def _wrong_sum(file: Path, sums: Any) -> str | None:
    wanted = sums.get(file.name) if isinstance(sums, dict) else None
    if not isinstance(wanted, dict) or not {"sha256", "bytes"} <= wanted.keys():
        return f"has no SHA-256 in {CHECKSUMS}"
    num_bytes = file.stat().st_size
    if num_bytes != wanted["bytes"]:  # known without reading it
        return f"has {num_bytes} bytes of {wanted['bytes']}"
    return None if _sum(file) == wanted else f"is not what {CHECKSUMS} says: its SHA-256 differs"


def _wrong_form(file: Path) -> str | None:
    try:
        if file.suffix == ".json":
            json.loads(file.read_text())
        else:
            file.stat()  # for its kind of error, where it is missing
            with safe_open(file, "pt"):
                pass
    except (SafetensorError, ValueError, RecursionError) as error:
        return f"is broken: {error}"
    return None
