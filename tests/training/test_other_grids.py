"""Heights on another grid, in another CRS, are a band like any other on any number of ranks."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import rasterio
from left_by_runs import alone, check_close, losses
from mpi4py import MPI
from rasterio.warp import transform_bounds
from test_same_as_whole_image import NETWORKS, run_file, scenes_of

from tilenet.library.whole_run import train
from tilenet.training.config.keys import MeshKeys, TileKeys
from tilenet.training.config.validation_keys import ValidationKeys

PIXEL = 7.3e-5  # about 3.7 pixels of the images


def heights_of(folder: Path, image: Path, comm: MPI.Intracomm) -> Path:
    """Heights in degrees around an image, with a hole. Collective."""
    path = folder / "heights.tif"
    if comm.rank == 0:
        with rasterio.open(image) as file:
            bounds = transform_bounds(file.crs, "EPSG:4326", *file.bounds)
        west, south, east, north = bounds
        rows, cols = (int(side / PIXEL) + 9 for side in (north - south, east - west))
        values = np.random.default_rng(1).normal(300, 40, (1, rows, cols)).astype("float32")
        values[:, 5:9, 6:11] = -9999
        grid = rasterio.Affine(PIXEL, 0, west - 4 * PIXEL, 0, -PIXEL, north + 4 * PIXEL)
        size = {"count": 1, "height": rows, "width": cols, "dtype": "float32", "nodata": -9999}
        with rasterio.open(
            path, "w", driver="GTiff", crs="EPSG:4326", transform=grid, **size
        ) as file:
            file.write(values)
    comm.Barrier()
    return path


@pytest.mark.ranks(2)
def test_a_run_with_heights_is_that_of_one_rank(
    comm: MPI.Intracomm, shared_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    scenes = scenes_of(shared_path, [(157, 121), (64, 90), (61, 75)], comm)
    heights = heights_of(shared_path, scenes[0].image, comm)
    run = run_file(shared_path, scenes[:2], NETWORKS["same-bilinear"], mesh=MeshKeys(rows=2))
    plain = replace(run, output=str(shared_path / "plain"))
    images = [f"{scene.image}+{heights}" for scene in scenes]
    validation = ValidationKeys(images[2], str(scenes[2].labels))
    run = replace(run, images=images[:2], tiles=TileKeys(4, 3), validation=validation)
    assert train(run, comm=comm) == 0
    said = capfd.readouterr().err
    assert said.count("heights.tif lie on another grid") == (comm.rank == 0)
    assert said.count("resampled to it (bilinear)") == (comm.rank == 0)
    wanted = alone(run, comm, mesh=MeshKeys(), tiles=TileKeys())
    check_close(run, wanted)
    assert train(plain, comm=comm) == 0
    assert losses(plain) != losses(run)
