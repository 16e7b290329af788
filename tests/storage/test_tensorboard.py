"""Scalars for TensorBoard: what it reads, and a run that goes on where they find no room."""

import resource
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tilenet.errors import TilenetError
from tilenet.storage.tensorboard import FOLDER, Scalars


def never(sentence: str) -> None:
    raise AssertionError(sentence)


def read(folder: Path, name: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder / FOLDER))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_values_are_there_on_return_and_what_is_repeated_is_hidden(tmp_path: Path) -> None:
    for first, steps in ((0, (1, 2, 3)), (1, (2, 3, 400))):
        scalars = Scalars(tmp_path, first, never)
        for step in steps:
            given = {"loss": step + first / 2, "left out": None, "validation/iou/Wälder": 1 / step}
            scalars.add(step, given)
            assert read(tmp_path, "loss")[-1] == (step, step + first / 2)
        scalars.close()
    assert read(tmp_path, "loss") == [(1, 1.0), (2, 2.5), (3, 3.5), (400, 400.5)]
    assert len(read(tmp_path, "validation/iou/Wälder")) == 4


@pytest.mark.parametrize("room", range(1, 60, 17))
def test_a_full_disk_is_said_once_and_the_run_goes_on(tmp_path: Path, room: int) -> None:
    said: list[str] = []
    scalars = Scalars(tmp_path, 0, said.append)
    scalars.add(1, {"loss": 0.5, "learning_rate": 0.1})
    (path,) = (tmp_path / FOLDER).iterdir()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + room, limits[1]))
    try:
        for step in range(2, 50):
            scalars.add(step, {"loss": 0.5, "learning_rate": 0.1})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        scalars.close()
    (sentence,) = said
    assert sentence.startswith("scalars for TensorBoard cannot be written any more (")
    assert "File too large); training goes on" in sentence
    assert read(tmp_path, "loss")[0] == (1, 0.5)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TilenetError, match=r"scalars need a folder that can be written \(.*No suc"):
        Scalars(tmp_path / "nowhere", 0, never)


def test_without_the_package_the_key_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.record_writer", None)
    with pytest.raises(TilenetError, match=r"pip install tilenet\[tensorboard\]"):
        Scalars(tmp_path, 0, never)
