"""A disk that does not take what GDAL writes when it closes a file, which GDAL does not say."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import rasterio
from maps_of_tests import CLASSES, Write, like, values_of

from tilenet.errors import TilenetError
from tilenet.geometry.windows import Window
from tilenet.mapping.writer import MapWriter


@contextmanager
def files_up_to(num_bytes: int) -> Iterator[None]:
    """A file takes nothing behind so many bytes, even where it has them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("keeps", [False, True])
def test_pixels_that_the_disk_did_not_take_are_found_before_anything_is_called_done(
    tmp_path: Path, write_raster: Write, keeps: bool
) -> None:
    path, values = tmp_path / "out" / "map.tif", values_of(CLASSES, (700, 1101))
    path.parent.mkdir()
    made_of = {"weights": "ab12"} if keeps else None
    rest = Window(333, 0, 367, 1101)

    def write(writer: MapWriter) -> None:
        writer.write(Window(0, 0, 333, 1101), values[:, :333])
        if keeps:
            writer.keep([0])
        else:  # so that blocks have their place
            writer._dataset.close()
            writer._dataset = rasterio.open(writer._raw, "r+")
        with files_up_to(100_000):
            writer.write(rest, values[:, 333:])
            if keeps:
                writer.keep([1])
            writer.finish()

    with (
        like(write_raster, (700, 1101)) as source,
        MapWriter(str(path), source, CLASSES, made_of=made_of) as writer,
        pytest.raises(TilenetError, match=r"writable to its end .*its pixels are not what was wri"),
    ):
        write(writer)
    assert not path.exists()
    assert sorted(os.listdir(path.parent)) == [".map.tif.journal.part", ".map.tif.raw.part"] * keeps
    if keeps:
        with (
            like(write_raster, (700, 1101)) as source,
            MapWriter(str(path), source, CLASSES, made_of=made_of) as writer,
        ):
            assert writer.done.tiles == {0}
            writer.write(rest, values[:, 333:])
            writer.finish()
        with rasterio.open(path) as file:
            assert np.array_equal(file.read(), values)
