"""SHA-256 of a checkpoint's files: written with it, compared before anything relies on them.

Not a faster sum: CRC-32 would take a tenth off a save (docs/checkpoint.md), and `sha256sum` is
everywhere, so that a copy in an archive can be checked without tilenet.

JSON of which no object says a key twice: Python's reader takes the last and keeps quiet.
"""

import hashlib
import json
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

__all__ = [
    "CHECKSUMS",
    "checksums_text",
    "differing_files",
    "forget_cached",
    "parsed_json",
    "wrong_file",
]


def parsed_json(text: str | bytes) -> Any:
    """The value of a text.

    Raises:
        ValueError: It is no JSON, or an object has a key twice.
        RecursionError: It is nested too deeply.
    """
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} stands {names.count(twice)} times in one object")
    return made


CHECKSUMS = "checksums.json"
PIECE_BYTES = 1 << 20
DTYPES = {  # as safetensors names them
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


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
            sums = parsed_json((folder / CHECKSUMS).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        return f"{CHECKSUMS} cannot be read: {error}"
    for name in names:
        try:
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
            same = _holds(folder / name, values)
        except (ValueError, KeyError, TypeError, AttributeError, struct.error):  # no such header
            same = False
        if not same:
            wrong.append(name)
    return wrong


def _holds(path: Path, tensors: dict[str, Tensor]) -> bool:
    """Whether a safetensors file holds these tensors and no more.

    Read piece by piece, and not by safetensors: that maps the file, so that a disk which fails
    kills the rank, and keeps a kilobyte for each file that it opened (0.8.0).
    """
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        (length,) = struct.unpack("<Q", file.read(8))
        if length > size:
            return False
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        begin = end = 8 + length
        for name, value in tensors.items():
            facts = header.pop(name)
            start, stop = facts["data_offsets"]
            if (facts["dtype"], facts["shape"]) != (DTYPES[value.dtype], list(value.shape)):
                return False
            # Bits: a NaN equals itself
            wanted = value.reshape(-1).view(torch.uint8).numpy()
            if stop - start != wanted.size:
                return False
            file.seek(begin + start)
            for at in range(0, wanted.size, PIECE_BYTES):
                piece = wanted[at : at + PIECE_BYTES]
                if file.read(piece.size) != piece.tobytes():
                    return False
            end = max(end, begin + stop)
        return not header and end == size


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
