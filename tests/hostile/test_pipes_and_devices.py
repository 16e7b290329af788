"""Pipes, devices and sockets are refused unopened: they would be waited for, or read forever."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilenet.data.image_list import read_image_list
from tilenet.data.labels.open import open_labels
from tilenet.data.rasters.raster import Raster
from tilenet.data.survey_record import load_survey
from tilenet.errors import TilenetError, UsageError
from tilenet.mapping.writer import check_target
from tilenet.planning.plan import read_plan
from tilenet.report.run_view import RunView
from tilenet.storage.checkpoints import FILES, load_json, load_tensors
from tilenet.storage.checksums import wrong_file
from tilenet.storage.tables import History
from tilenet.training.config.read import read_run_file
from tilenet.training.folder import RunFolder


@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize(
    "use",
    [
        load_json,
        load_tensors,
        read_plan,
        lambda path: read_image_list(str(path)),
        lambda path: Raster(str(path)),
        lambda path: open_labels(str(path), None, 255),  # type: ignore[arg-type]
        lambda path: History(path, 1),
        lambda path: read_run_file(["-c", str(path)]),
        lambda path: read_run_file([f"--config={path}"]),
        lambda path: load_survey(path, "key"),
    ],
)
@pytest.mark.usefixtures("in_time")
def test_pipes_and_devices_are_not_read(tmp_path: Path, kind: str, use: Any) -> None:
    path = tmp_path / "file.csv"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises((TilenetError, UsageError), match="is a pipe, device or socket"):
        use(path)


@pytest.mark.usefixtures("in_time")
def test_a_virtual_raster_of_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "a.vrt").write_text(
        '<VRTDataset rasterXSize="9" rasterYSize="9"><VRTRasterBand dataType="Byte" band="1">'
        '<SimpleSource><SourceFilename relativeToVRT="1">pipe</SourceFilename></SimpleSource>'
        "</VRTRasterBand></VRTDataset>"
    )
    with pytest.raises(TilenetError, match=r"a\.vrt.*is a pipe"):
        Raster(str(tmp_path / "a.vrt"))


@pytest.mark.parametrize("name", [*FILES, "checksums.json"])
@pytest.mark.usefixtures("in_time")
def test_a_checkpoint_of_a_pipe_is_broken(tmp_path: Path, name: str) -> None:
    (tmp_path / "checksums.json").write_text(json.dumps({name: {"sha256": "", "bytes": 0}}))
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    assert "cannot be read" in str(wrong_file(tmp_path, [name]))


@pytest.mark.usefixtures("in_time")
def test_a_report_passes_pipes_by(tmp_path: Path) -> None:
    for name in ("run.yaml", "run.json", "timings.json", "history.csv", "validation.csv"):
        os.mkfifo(tmp_path / name)
    view = RunView(tmp_path)
    assert (view.run, view.run_text, view.facts, view.timings) == (None, None, {}, {})
    assert (view.history, view.validation) == (None, None)


def test_names_that_are_no_utf8_are_refused(
    tmp_path: Path, write_raster: Callable[..., str]
) -> None:
    name = str(tmp_path / os.fsdecode(b"a\xff.tif"))
    with pytest.raises(TilenetError, match=r"the name of a map is UTF-8"):
        check_target(name, overwrite=False)
    os.rename(write_raster("a.tif", np.arange(64, dtype="uint8").reshape(8, 8)), name)
    with pytest.raises(TilenetError, match=r"the name of a raster is UTF-8"):
        Raster(name)
    with pytest.raises(TilenetError, match="the name of output is UTF-8"):
        RunFolder(Path(name), write=True).prepare(resume=False, overwrite=False)
