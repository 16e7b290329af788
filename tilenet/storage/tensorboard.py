"""Scalars of a run for TensorBoard, in a folder next to its tables.

Written here and not by TensorBoard's own writer: that one has a thread, in which a full disk is an
error that nobody catches, and a queue at which the steps would wait. A file is a sequence of
records (TFRecord: length, its checksum, bytes, their checksum), each a protocol buffer `Event`.
"""

import os
import secrets
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from tilenet.errors import TilenetError

__all__ = ["FOLDER", "Scalars"]

FOLDER = "tensorboard"


def _crc_table() -> tuple[int, ...]:
    """CRC-32C (Castagnoli) of each byte."""
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return tuple(table)


CRC = _crc_table()


class Scalars:
    """Writes `<run>/tensorboard`.

    A run is not lost for it: what cannot be written after the first record is said once, and the
    run goes on without.

    Args:
        run: The run's folder.
        steps_done: What it holds of later steps is hidden: the run repeats them.
        warn: Called at most once, with a sentence.

    Raises:
        TilenetError: The folder cannot be written.
    """

    def __init__(self, run: Path, steps_done: int, warn: Callable[[str], None]) -> None:
        self._warn, self._end = warn, 0
        # TensorBoard reads files in the order of their names.
        name = f"events.out.tfevents.{time.time_ns():020d}.{secrets.token_hex(4)}"
        self._path = run / FOLDER / name
        self._file = -1
        try:
            self._path.parent.mkdir(exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._file = os.open(self._path, flags, 0o666)
            version = _event(steps_done + 1, _text(3, b"brain.Event:2"))
            start = _event(steps_done + 1, _text(7, b"\x08\x01"))  # which hides what was there
            self._write(_record(version) + _record(start))
        except OSError as error:
            self.close()
            raise TilenetError(
                f"scalars need a folder that can be written ({run / FOLDER}: {error.strerror}); "
                "choose another output"
            ) from error

    def add(self, step: int, values: Mapping[str, float | None]) -> None:
        """Add values by their names; None is left out. They stand in the file on return."""
        if self._file < 0:
            return
        given = ((name, value) for name, value in values.items() if value is not None)
        pairs = (
            _text(1, _text(1, name.encode()) + b"\x15" + _float32(value)) for name, value in given
        )
        try:
            self._write(_record(_event(step, _text(5, b"".join(pairs)))))
        except OSError as error:
            with suppress(OSError):  # half a record is none
                os.ftruncate(self._file, self._end)
            self.close()
            self._warn(
                f"scalars for TensorBoard cannot be written any more ({self._path}: "
                f"{error.strerror}); training goes on, and history.csv and validation.csv hold the "
                "same"
            )

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            with suppress(OSError):  # each record was written when it was added
                os.close(self._file)
            self._file = -1

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:  # a disk that becomes full takes some first
            left = left[os.write(self._file, left) :]
        self._end += len(data)


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _checksum(length) + data + _checksum(data)


def _checksum(data: bytes) -> bytes:
    """CRC-32C, turned and shifted as TFRecord has it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ CRC[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _event(step: int, field: bytes) -> bytes:
    """An `Event`: time (1), step (2), and one field more."""
    return b"\x09" + struct.pack("<d", time.time()) + b"\x10" + _varint(step) + field


def _text(number: int, data: bytes) -> bytes:
    """A field of a protocol buffer that holds bytes, text or another message."""
    return bytes([number << 3 | 2]) + _varint(len(data)) + data


def _varint(number: int) -> bytes:
    digits = bytearray()
    while number > 0x7F:
        digits.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*digits, number])


def _float32(value: float) -> bytes:
    try:
        return struct.pack("<f", value)
    except OverflowError:  # beyond float32
        return struct.pack("<f", float("inf") if value > 0 else float("-inf"))
