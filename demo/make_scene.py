"""Make a synthetic scene of any size, with labels to train on and labels to judge a map by.

It is made and written block by block, so memory stays the same whatever the size.
"""

import argparse
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import rasterio
from affine import Affine
from labelling import drawn_labels
from land import CLASSES, make_land
from rasterio.windows import Window as FileWindow
from spectra import MARGIN_PX, cloudy, reflectance
from tqdm import tqdm

from tilenet.geometry.windows import Window

BLOCK_PX = 512
NOT_LABELLED = 255
PIXEL_M = 2.0
HELD_OUT_SHARE = 1 / 3  # of the columns, at the right: these train no network


def main() -> None:
    """Write scene.tif, labels_train.tif and labels_test.tif."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the files go")
    parser.add_argument("--size", type=int, default=2048, help="rows and columns (2048)")
    parser.add_argument("--seed", type=int, default=0, help="another seed is another land (0)")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    # By default GDAL would cache a twentieth of the memory.
    with rasterio.Env(GDAL_CACHEMAX=64 << 20):
        _write(given.folder, given.size, given.seed << 32)


def _write(folder: Path, size: int, seed: int) -> None:
    profile = {
        "driver": "GTiff",
        "height": size,
        "width": size,
        "crs": "EPSG:32632",
        "transform": Affine(PIXEL_M, 0, 600_000, 0, -PIXEL_M, 5_400_000),
        "tiled": True,
        "blockxsize": BLOCK_PX,
        "blockysize": BLOCK_PX,
        "compress": "deflate",
        "zlevel": 1,
        "BIGTIFF": "IF_SAFER",
    }
    scene = {**profile, "count": 4, "dtype": "uint16", "nodata": 0, "predictor": 2}
    labels = {**profile, "count": 1, "dtype": "uint8", "nodata": NOT_LABELLED}
    with ExitStack() as stack:
        image = stack.enter_context(rasterio.open(folder / "scene.tif", "w", **scene))
        train = stack.enter_context(rasterio.open(folder / "labels_train.tif", "w", **labels))
        test = stack.enter_context(rasterio.open(folder / "labels_test.tif", "w", **labels))
        for band, name in enumerate(("blue", "green", "red", "near infrared"), start=1):
            image.set_band_description(band, name)
        for file in (train, test):
            file.update_tags(1, **{f"class_{index}": name for index, name in enumerate(CLASSES)})
        split = round(size * (1 - HELD_OUT_SHARE))
        places = [(r, c) for r in range(0, size, BLOCK_PX) for c in range(0, size, BLOCK_PX)]
        for row, col in tqdm(places, unit="block", mininterval=1.0):
            window = Window(row, col, min(BLOCK_PX, size - row), min(BLOCK_PX, size - col))
            around = Window(
                row - MARGIN_PX,
                col - MARGIN_PX,
                window.height + 2 * MARGIN_PX,
                window.width + 2 * MARGIN_PX,
            )
            land = make_land(seed + 1000, around)
            unseen = cloudy(seed + 2000, window)
            drawn = drawn_labels(seed + 3000, window, land, MARGIN_PX)
            true = land.classes[MARGIN_PX:-MARGIN_PX, MARGIN_PX:-MARGIN_PX]
            held_out = np.arange(col, col + window.width) >= split
            place = FileWindow(col, row, window.width, window.height)
            image.write(reflectance(seed + 2000, window, land), window=place)
            train.write(np.where(unseen | held_out, np.uint8(255), drawn), 1, window=place)
            test.write(np.where(unseen | ~held_out, np.uint8(255), true), 1, window=place)


if __name__ == "__main__":
    main()
