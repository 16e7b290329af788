"""Runs and maps of images over a network are those of the files, also where a server fails."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
from mpi4py import MPI
from range_server import Served, served
from scenes import KEYS

import tilenet
from tilenet.data.rasters import rereading
from tilenet.errors import TilenetError

Serve = Callable[..., Served]
NETWORK = {"poolings": 2, "base": 8}


@pytest.fixture
def serve(scene: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Serve the folder of the scene from rank 0."""
    monkeypatch.setenv("GDAL_HTTP_RETRY_DELAY", "0.05")
    monkeypatch.setattr(rereading, "PAUSES_S", (0.05,) * 3)
    comm = MPI.COMM_WORLD
    with ExitStack() as stack:

        def start(*how: Any) -> Served:
            url = None
            if comm.rank == 0:
                url = stack.enter_context(served(scene, *how)).url
            return Served(comm.bcast(url))

        yield start
        comm.Barrier()


def trained(output: str, where: str = "") -> tuple[list[float], Any]:
    """Losses and scores of a run, and pixels of its map, on rank 0."""
    rows: list[Any] = []
    keys = {**KEYS, "images": f"{where}i.tif", "labels": f"{where}l.tif"}
    run = tilenet.train(output=output, on_step=rows.append, network=NETWORK, **keys)
    tilenet.predict(run, f"{where}i.tif", f"{output}.tif")
    MPI.COMM_WORLD.Barrier()
    with rasterio.open(f"{output}.tif") as file:
        return [row["loss"] for row in rows], file.read()


@pytest.mark.ranks(1, 2)
def test_a_run_and_a_map_over_http_are_those_of_the_files(serve: Serve) -> None:
    server = serve()
    losses, pixels = trained("a")
    ours, same = trained("b", f"{server.url}/")
    assert ours == losses
    assert len(losses) == (KEYS["steps"] if MPI.COMM_WORLD.rank == 0 else 0)
    assert np.array_equal(same, pixels)
    counts = server.counts()
    ranks = MPI.COMM_WORLD.size
    assert counts["missing"] == 0  # no names that could lie next to the files
    # Of each rank: a head and the header of a file, its rows, and those again for the map.
    assert 0 < counts["heads"] <= 3 * ranks
    assert 0 < counts["gets"] <= 12 * ranks


@pytest.mark.parametrize(("every", "how"), [(2, "503"), (5, "broken")])
def test_a_server_that_fails_now_and_then_costs_requests_alone(
    serve: Serve, every: int, how: str
) -> None:
    server = serve(every, how)
    losses, pixels = trained("a")
    ours, same = trained("b", f"{server.url}/")
    assert server.counts()["failed"] > 0
    assert ours == losses
    assert np.array_equal(same, pixels)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    ("every", "name", "said"),
    [
        (0, "none.tif", "HTTP response code: 404.*; check the address, the network"),
        (1, "i.tif", "must be a file that GDAL can open.*check the address, the network"),
    ],
)
def test_what_a_server_lacks_is_one_sentence_on_all_ranks(
    serve: Serve, every: int, name: str, said: str
) -> None:
    server = serve(every)
    with pytest.raises(TilenetError, match=said):
        tilenet.train(output="a", network=NETWORK, **{**KEYS, "images": f"{server.url}/{name}"})


def test_s3_is_asked_as_gdals_variables_say(
    serve: Serve, scene: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (scene / "bucket").mkdir()
    for name in ("i.tif", "l.tif"):
        shutil.copy(scene / name, scene / "bucket" / name)
    server = serve()
    for name, value in {
        "AWS_S3_ENDPOINT": server.url.removeprefix("http://"),
        "AWS_HTTPS": "NO",
        "AWS_VIRTUAL_HOSTING": "FALSE",
        "AWS_NO_SIGN_REQUEST": "YES",
    }.items():
        monkeypatch.setenv(name, value)
    losses, pixels = trained("a")
    ours, same = trained("b", "s3://bucket/")
    assert ours == losses
    assert np.array_equal(same, pixels)
    assert server.counts()["gets"] > 0


def test_a_query_is_no_part_of_a_files_name(serve: Serve) -> None:
    server = serve()
    for steps, signature in ((1, "a/1"), (2, "b/2")):
        image = {"images": f"{server.url}/i.tif?signature={signature}", "steps": steps}
        run = tilenet.train(output="a", network=NETWORK, resume=steps > 1, **{**KEYS, **image})
    assert len(run.history["loss"]) == 2
