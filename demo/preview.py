"""Put image, labels and map side by side into one small PNG."""

import argparse
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import rasterio
from numpy.typing import NDArray
from rasterio.enums import Resampling
from rasterio.errors import NotGeoreferencedWarning

from tilenet.mapping.writing.class_colours import class_colours

PANEL_PX = 680
GAP_PX = 12
NOT_LABELLED = 255
RED_GREEN_BLUE = (3, 2, 1)

Picture = NDArray[np.uint8]


def image_picture(folder: Path) -> Picture:
    """The scene, (H, W, 3)."""
    return np.ascontiguousarray(_image(folder / "scene.tif").transpose(1, 2, 0))


def class_picture(folder: Path) -> Picture:
    """The map in its colours, (H, W, 3)."""
    mapped, names = _classes(folder / "map.tif")
    return np.ascontiguousarray(_coloured(mapped, len(names)).transpose(1, 2, 0))


def main() -> None:
    """Write a preview of a scene, its labels and its map."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="of the demo's rasters")
    parser.add_argument("out", type=Path, help="PNG to write")
    given = parser.parse_args()
    # By default GDAL would cache a twentieth of the memory.
    with rasterio.Env(GDAL_CACHEMAX=64 << 20):
        image = _image(given.folder / "scene.tif")
        train, _ = _classes(given.folder / "labels_train.tif")
        test, _ = _classes(given.folder / "labels_test.tif")
        mapped, names = _classes(given.folder / "map.tif")
        labels = _coloured(np.where(train != NOT_LABELLED, train, test), len(names))
        gap = np.full((3, image.shape[1], GAP_PX), 255, np.uint8)
        panels = [image, gap, labels, gap, _coloured(mapped, len(names))]
        _write(given.out, np.concatenate(panels, axis=2))
    colours = class_colours(len(names))
    print(
        "  ".join(
            f"{n} #{c[0]:02x}{c[1]:02x}{c[2]:02x}" for n, c in zip(names, colours, strict=True)
        )
    )


def _shape(dataset: Any) -> tuple[int, int]:
    """Rows and columns of a panel: the raster's, divided until they fit."""
    factor = max(1.0, max(dataset.height, dataset.width) / PANEL_PX)
    return round(dataset.height / factor), round(dataset.width / factor)


def _image(path: Path) -> Picture:
    """The scene in true colours, each band stretched between its 1st and 99th percentile."""
    with rasterio.open(path) as dataset:
        bands = dataset.read(
            RED_GREEN_BLUE,
            out_shape=(3, *_shape(dataset)),
            resampling=Resampling.average,
            masked=True,
        )
    values = np.ma.getdata(bands).astype(np.float32)
    cloud = np.ma.getmaskarray(bands).any(axis=0)
    picture = np.empty(values.shape, np.uint8)
    for band, pixels in enumerate(values):
        low, high = np.percentile(pixels[~cloud], (1, 99))
        share = np.clip((pixels - low) / max(high - low, 1), 0, 1)
        picture[band] = 255 * share**0.7  # brightens the dark half, as screens are used to
    picture[:, cloud] = 0
    return picture


def _classes(path: Path) -> tuple[NDArray[np.uint8], list[str]]:
    """Class numbers, each pixel the most frequent below it, and the names of the classes."""
    with rasterio.open(path) as dataset:
        classes: NDArray[np.uint8] = dataset.read(
            1, out_shape=_shape(dataset), resampling=Resampling.mode
        )
        tags = dataset.tags(1)
    return classes, [
        tags[f"class_{number}"] for number in range(len(tags)) if f"class_{number}" in tags
    ]


def _coloured(classes: NDArray[np.uint8], count: int) -> Picture:
    table = np.zeros((256, 3), np.uint8)
    table[:count] = np.array(class_colours(count), np.uint8)[:, :3]
    return np.ascontiguousarray(table[classes].transpose(2, 0, 1))


def _write(path: Path, picture: Picture) -> None:
    _, height, width = picture.shape
    warnings.simplefilter("ignore", NotGeoreferencedWarning)  # a picture lies nowhere
    with rasterio.open(
        path, "w", driver="PNG", height=height, width=width, count=3, dtype="uint8"
    ) as dataset:
        dataset.write(picture)


if __name__ == "__main__":
    main()
