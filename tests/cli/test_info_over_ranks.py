"""`tilenet info --pixels` over ranks: printed once, the numbers of one rank, refused by all."""

import json
from pathlib import Path

import pytest
from mpi4py import MPI
from test_same_as_whole_image import scenes_of

from tilenet.__main__ import main
from tilenet.data import survey as module
from tilenet.data.inspect import InfoRequest, describe

Capture = pytest.CaptureFixture[str]

pytestmark = pytest.mark.ranks(1, 2, 3)


def test_pixels_are_shared_by_ranks_and_printed_once(
    comm: MPI.Intracomm, shared_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (scene,) = scenes_of(shared_path, [(157, 211)], comm)
    monkeypatch.setattr(module, "BLOCK_PX", 50)
    paths = [str(scene.image), "/nowhere.tif", str(scene.image)]
    labels = [str(scene.labels)] * 2 + [str(shared_path)]
    code = main(["info", *paths, "--labels", *labels, "--pixels", "--json"])
    assert comm.allgather(code) == [1] * comm.size
    printed = "".join(comm.allgather(capfd.readouterr().out))
    assert printed.count("\n") == 1
    first, refused, unlabelled = json.loads(printed)["images"]
    alone = describe(paths[0], labels[0], InfoRequest(pixels=True), MPI.COMM_SELF)
    assert first == json.loads(json.dumps(alone))
    assert refused["refused"].startswith("a raster must be a file that GDAL can open")
    assert unlabelled["refused"].startswith("labels must be a raster or a vector file")
    assert unlabelled["pixels"] == first["pixels"]
    assert main(["info", *paths, "--pixels"]) == 1
    text, said = capfd.readouterr()
    everything = "".join(comm.allgather(text))
    assert everything.count(paths[0]) == 2
    assert everything.count("are without data") == 2
    assert "".join(comm.allgather(said)).count("tilenet: ") == 1
