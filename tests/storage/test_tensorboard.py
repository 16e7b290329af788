"""Scalars for TensorBoard: what it reads, and a run that goes on where they find no room."""

import errno
import os
import resource
import struct
import threading
from pathlib import Path

import pytest

from tilenet.errors import TilenetError
from tilenet.storage.tensorboard import FOLDER, Scalars, _checksum


def never(sentence: str) -> None:
    raise AssertionError(sentence)


def records(path: Path) -> list[bytes]:
    """Those of a file, whose checksums fit."""
    data, found = path.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        record, data = data[12 : 12 + length], data[16 + length :]
        assert len(record) == length
        found.append(record)
    return found


def test_checksums_are_those_of_tfrecord() -> None:
    # RFC 3720, B.4: CRC-32C of 32 zeros is aa 36 91 8a, the lowest byte first.
    turned = (0x8A9136AA >> 15 | 0x8A9136AA << 17) + 0xA282EAD8
    assert _checksum(bytes(32)) == struct.pack("<I", turned & 0xFFFFFFFF)


def test_records_hold_steps_names_and_values(tmp_path: Path) -> None:
    scalars = Scalars(tmp_path, 299, never)
    threads = threading.active_count()
    scalars.add(300, {"loss": 0.25, "left out": None, "validation/iou/Wälder, feucht": 1e300})
    scalars.close()
    assert threading.active_count() == threads
    (path,) = (tmp_path / FOLDER).iterdir()
    version, start, values = records(path)
    step_300 = b"\x10\xac\x02"
    assert version[9:] == step_300 + b"\x1a\x0dbrain.Event:2"
    assert start[9:] == step_300 + b"\x3a\x02\x08\x01"
    name = "validation/iou/Wälder, feucht".encode()
    second = b"\x0a" + bytes([len(name)]) + name + b"\x15" + struct.pack("<f", float("inf"))
    first = b"\x0a\x04loss\x15" + struct.pack("<f", 0.25)
    both = b"".join(b"\x0a" + bytes([len(one)]) + one for one in (first, second))
    assert values[9:] == step_300 + b"\x2a" + bytes([len(both)]) + both
    (seconds,) = struct.unpack("<d", values[1:9])
    assert abs(path.stat().st_mtime - seconds) < 1000


def test_tensorboard_reads_them_and_hides_what_is_repeated(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard: pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, steps in ((0, (1, 2, 3)), (1, (2, 3, 400))):
        scalars = Scalars(tmp_path, first, never)
        for step in steps:
            scalars.add(step, {"loss": step + first / 2, "validation/iou/Wälder": 1 / step})
        scalars.close()
    events = EventAccumulator(str(tmp_path / FOLDER))
    events.Reload()
    values = [(event.step, event.value) for event in events.Scalars("loss")]
    assert values == [(1, 1.0), (2, 2.5), (3, 3.5), (400, 400.5)]
    assert len(events.Scalars("validation/iou/Wälder")) == 4


@pytest.mark.parametrize("room", range(1, 60, 7))
def test_a_full_disk_is_said_once_and_leaves_whole_records(tmp_path: Path, room: int) -> None:
    said: list[str] = []
    scalars = Scalars(tmp_path, 0, said.append)
    scalars.add(1, {"loss": 0.5, "learning_rate": 0.1})
    (path,) = (tmp_path / FOLDER).iterdir()
    whole = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + room, limits[1]))
    try:
        for step in range(2, 50):
            scalars.add(step, {"loss": 0.5, "learning_rate": 0.1})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        scalars.close()
    (sentence,) = said
    assert sentence.startswith(f"scalars for TensorBoard cannot be written any more ({path}: ")
    assert "training goes on" in sentence
    assert path.read_bytes() == whole


def test_an_interrupted_write_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:5]))
    scalars = Scalars(tmp_path, 0, never)
    scalars.add(1, {"loss": 0.5})
    scalars.close()
    (path,) = (tmp_path / FOLDER).iterdir()
    assert len(records(path)) == 3


def test_a_folder_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TilenetError, match=r"scalars need a folder that can be written \(.*No suc"):
        Scalars(tmp_path / "nowhere", 0, never)

    def full(file: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(TilenetError, match="No space left on device"):
        Scalars(tmp_path, 0, never)
