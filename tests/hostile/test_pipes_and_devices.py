"""Pipes, devices and sockets are refused unopened: they would be waited for, or read for ever."""

import os
from pathlib import Path
from typing import Any

import pytest

from tilenet.errors import TilenetError, UsageError
from tilenet.files.history import History
from tilenet.files.image_list import read_image_list
from tilenet.files.label_files import open_labels
from tilenet.files.raster import Raster
from tilenet.files.weights import load_json, load_tensors
from tilenet.planning.plan import read_plan
from tilenet.run.arguments import read_run_file


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
