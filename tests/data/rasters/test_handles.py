"""However many rasters a rank has, it holds open those that it read last."""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
from affine import Affine
from mpi4py import MPI

from tilenet.data.labels.raster import Labels
from tilenet.data.rasters import handles
from tilenet.data.rasters.raster import Raster
from tilenet.geometry.windows import Window

WINDOW = Window(1, 2, 6, 5)


def open_files(folder: Path) -> int:
    """How many files of a folder this process has open."""
    links = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
    return sum(name.startswith(os.path.realpath(folder)) for name in links)


def test_more_rasters_than_may_be_open_are_read_as_if_all_were(
    write_raster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Single files, stacks and labels on other grids, also as another rank gets them."""
    own, other = Affine(2, 0, 5e5, 0, -2, 4e6), Affine(2.5, 0, 5e5 - 5, 0, -2.5, 4e6 + 5)
    values = np.random.default_rng(1).integers(1, 250, (12, 1, 37, 53), np.uint8)
    names = [write_raster(f"{n}.tif", plane, transform=own) for n, plane in enumerate(values)]
    apart = write_raster("apart.tif", values[0], transform=other)
    with ExitStack() as stack:
        images = [stack.enter_context(Raster(name)) for name in names]
        images += [stack.enter_context(Raster(f"{name}+{apart}")) for name in names[:4]]
        labels = [stack.enter_context(Labels(apart, image, 255)) for image in images[:4]]
        assert all(part.resampled for part in labels)
        sources: list[Any] = [*images, *labels]

        def found(sources: list[Any]) -> list[Any]:
            read = [source.read(WINDOW) for source in sources]
            return [getattr(one, "values", one) for one in read]

        assert open_files(tmp_path) >= len(sources)
        wanted = found(sources)
        monkeypatch.setattr(handles, "MOST_OPEN", 3)
        for given in (sources, MPI.pickle.loads(MPI.pickle.dumps(sources))):
            for one in given:
                stack.enter_context(one)
            with ThreadPoolExecutor(1) as reader:  # what it opened this thread closes
                read = reader.submit(found, given).result()
            for one, same in zip(read, wanted, strict=True):
                np.testing.assert_array_equal(one, same)
            assert open_files(tmp_path) <= 2 * 3
    assert open_files(tmp_path) == 0


def test_what_lies_next_to_a_file_is_looked_for_once(
    write_raster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of thousands of images is not read for each of them; a mask is still found."""
    monkeypatch.setattr(handles, "MOST_OPEN", 1)
    asked: list[tuple[str, Any]] = []

    def noted(path: str, real: Any = rasterio.open) -> Any:
        beside = rasterio.env.getenv().get("GDAL_DISABLE_READDIR_ON_OPEN")
        asked.append((Path(path).name, beside))
        return real(path)

    values = np.ones((1, 37, 53), np.uint8)
    plain, masked = (write_raster(name, values) for name in ("plain.tif", "masked.tif"))
    with rasterio.Env(GDAL_TIFF_INTERNAL_MASK=False), rasterio.open(masked, "r+") as file:
        file.write_mask(np.tri(37, 53, dtype=bool))
    monkeypatch.setattr(rasterio, "open", noted)
    with Raster(plain) as one, Raster(masked) as other:
        for _ in range(2):
            assert one.read(one.whole).valid.all()
            np.testing.assert_array_equal(other.read(other.whole).valid, np.tri(37, 53, dtype=bool))
    first = [("plain.tif", None), ("masked.tif", None)]
    assert asked == [*first, *[("plain.tif", "EMPTY_DIR"), ("masked.tif", None)] * 2]
