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
from rasterio.vrt import WarpedVRT

from tilenet.data.labels.raster import Labels
from tilenet.data.rasters import handles, location
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


def noted_options(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """From now on names of files that are opened, and what GDAL is told of names next to them."""
    asked: list[tuple[str, Any]] = []

    def noted(path: str, *more: Any, real: Any = rasterio.DatasetReader, **options: Any) -> Any:
        beside = rasterio.env.getenv() if rasterio.env.hasenv() else {}
        asked.append((Path(path).name, beside.get("GDAL_DISABLE_READDIR_ON_OPEN")))
        return real(path, *more, **options)

    monkeypatch.setattr(rasterio, "DatasetReader", noted)
    return asked


def write_mask(path: str) -> None:
    """A mask in a file next to a raster."""
    with rasterio.Env(GDAL_TIFF_INTERNAL_MASK=False), rasterio.open(path, "r+") as file:
        file.write_mask(np.tri(37, 53, dtype=bool))


def test_what_lies_next_to_a_file_is_looked_for_once(
    write_raster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of thousands of images is not read for each of them; a mask is still found."""
    monkeypatch.setattr(handles, "MOST_OPEN", 1)
    asked = noted_options(monkeypatch)
    values = np.ones((1, 37, 53), np.uint8)
    plain, masked = (write_raster(name, values) for name in ("plain.tif", "masked.tif"))
    write_mask(masked)
    asked.clear()
    with Raster(plain) as one, Raster(masked) as other:
        for _ in range(2):
            assert one.read(one.whole).valid.all()
            np.testing.assert_array_equal(other.read(other.whole).valid, np.tri(37, 53, dtype=bool))
    first = [("plain.tif", None), ("masked.tif", None)]
    assert asked == [*first, *[("plain.tif", "EMPTY_DIR"), ("masked.tif", None)] * 2]


@pytest.mark.parametrize("masked", [False, True])
def test_the_place_of_a_file_is_read_once_unless_a_view_needs_it(
    write_raster: Any, masked: bool
) -> None:
    """A CRS takes longer than the pixels of a small GeoTIFF."""
    values = np.random.default_rng(4).integers(1, 250, (2, 37, 53), np.uint8)
    path = write_raster("one.tif", values, transform=Affine(2, 0, 5e5, 0, -2, 4e6), nodata=7)
    if masked:
        write_mask(path)
    with Raster(path) as image:
        crs, transform, wanted = image.crs, image.transform, image.read(image.whole)
        image.close()
        same = image.read(image.whole)
        np.testing.assert_array_equal(same.values, wanted.values)
        np.testing.assert_array_equal(same.valid, wanted.valid)
        assert crs is not None
        assert image.dataset.crs == (crs if masked else None)

        def opened(files: list[Any]) -> WarpedVRT:
            assert files == [image.dataset]
            return WarpedVRT(files[0])

        for _ in range(2):  # also where they are open with it
            view = image.stack.view("view", opened)
            assert (view.crs, view.transform) == (crs, transform)
            image.close()


@pytest.mark.parametrize("names", [3, 4])
def test_a_folder_of_more_names_than_gdal_lists_is_not_listed(
    write_raster: Any, monkeypatch: pytest.MonkeyPatch, names: int
) -> None:
    """GDAL would read a thousand names of it, drop them, and ask for those that matter."""
    monkeypatch.setattr(location, "LISTED", 3)
    masked = write_raster("masked.tif", np.ones((1, 37, 53), np.uint8))
    write_mask(masked)
    for number in range(names - 2):
        Path(masked).with_name(f"{number}.txt").touch()
    asked = noted_options(monkeypatch)
    with Raster(masked) as image:
        np.testing.assert_array_equal(image.read(image.whole).valid, np.tri(37, 53, dtype=bool))
    assert asked == [("masked.tif", "TRUE" if names > 3 else None)]
    monkeypatch.setenv("GDAL_READDIR_LIMIT_ON_OPEN", "9")  # a user's limit is left alone
    Raster(masked).close()
    assert asked[1:] == [("masked.tif", None)]
