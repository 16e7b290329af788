"""Two yardsticks for the map: what single pixels can tell, and what one class for all would score.

The classifier of single pixels is about as good as one can be: for a pixel's four values, binned,
it looks up which class the training labels name most often. It assumes nothing about how values
are spread, and the scene has far more pixels than the table has entries.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import rasterio
from numpy.typing import NDArray
from rasterio.windows import Window

from tilenet.scores import scores

NOT_LABELLED = 255
NODATA = 0
BLOCK_PX = 1024
BINS = 12  # per band, each with as many pixels

Counts = NDArray[np.int64]


def main() -> None:
    """Print the yardsticks of a scene and write them to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="of the demo's rasters")
    parser.add_argument("out", type=Path, help="JSON to write")
    given = parser.parse_args()
    # By default GDAL would cache a twentieth of the memory.
    with rasterio.Env(GDAL_CACHEMAX=64 << 20):
        found = yardsticks(given.folder)
    given.out.write_text(json.dumps(found))
    for name in ("single pixels", "one class for all"):
        print(f"{name}: mean IoU {found[name]['mean_iou']:.3f}")


def yardsticks(folder: Path) -> dict[str, Any]:
    """Scores on the held-out labels, and the names of the classes."""
    names = _class_names(folder / "labels_train.tif")
    bin_of = _bins(folder / "scene.tif")
    counts = np.zeros((len(names), BINS ** len(bin_of)), np.int64)
    for place, labels in _labelled(folder, "labels_train.tif", bin_of):
        both = np.bincount(labels * counts.shape[1] + place, minlength=counts.size)
        counts += both.reshape(counts.shape)
    most = int(counts.sum(axis=1).argmax())
    # Values that no label was seen for are taken for the most frequent class.
    guess = np.where(counts.any(axis=0), counts.argmax(axis=0), most)

    pixelwise = np.zeros((len(names), len(names)), np.int64)
    constant = np.zeros_like(pixelwise)
    for place, labels in _labelled(folder, "labels_test.tif", bin_of):
        both = np.bincount(labels * len(names) + guess[place], minlength=pixelwise.size)
        pixelwise += both.reshape(pixelwise.shape)
        constant[:, most] += np.bincount(labels, minlength=len(names))
    return {
        "classes": names,
        "single pixels": _scores(pixelwise),
        "one class for all": _scores(constant),
    }


def _scores(matrix: Counts) -> dict[str, Any]:
    """Scores as `tilenet evaluate` gives them; its last column counts pixels without a class."""
    return scores(np.pad(matrix, ((0, 0), (0, 1))))


def _class_names(path: Path) -> list[str]:
    with rasterio.open(path) as dataset:
        tags = dataset.tags(1)
    return [tags[f"class_{index}"] for index in range(sum(tag[:6] == "class_" for tag in tags))]


def _bins(path: Path) -> list[NDArray[np.uint8]]:
    """For each band, the bin of each value that its dtype can hold."""
    with rasterio.open(path) as dataset:
        shape = min(dataset.height, 1024), min(dataset.width, 1024)
        sample = dataset.read(out_shape=(dataset.count, *shape))
    shares = np.arange(1, BINS) / BINS
    values = np.arange(np.iinfo(sample.dtype).max + 1)
    return [
        np.searchsorted(np.quantile(band[band != NODATA], shares), values).astype(np.uint8)
        for band in sample
    ]


def _labelled(
    folder: Path, name: str, bin_of: list[NDArray[np.uint8]]
) -> Iterator[tuple[Counts, Counts]]:
    """For each block of the scene, the table's entry and the label of its labelled pixels."""
    with (
        rasterio.open(folder / "scene.tif") as image,
        rasterio.open(folder / name) as labels,
    ):
        for row in range(0, image.height, BLOCK_PX):
            for col in range(0, image.width, BLOCK_PX):
                height = min(BLOCK_PX, image.height - row)
                window = Window(col, row, min(BLOCK_PX, image.width - col), height)
                truth = labels.read(1, window=window)
                where = truth != NOT_LABELLED
                place = np.zeros(np.count_nonzero(where), np.int64)
                for bins, values in zip(bin_of, image.read(window=window), strict=True):
                    place = place * BINS + bins[values[where]]
                yield place, truth[where].astype(np.int64)


if __name__ == "__main__":
    main()
