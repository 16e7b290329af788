"""`tilenet info` says how labels lie to their image, and counts pixels and classes."""

from typing import Any

import numpy as np
import pytest
import shapely
from affine import Affine
from info_answers import GRID, Info, Write, pixels

from tilenet.data.class_weights import balanced_weights


def test_how_label_rasters_lie_to_their_image(write_raster: Write, info: Info) -> None:
    labels = pixels(1, "uint8")[0] % 3
    image = write_raster("image.tif", pixels(2))
    same = write_raster("same.tif", labels)
    bare = write_raster("bare.tif", labels, crs=None)
    finer = write_raster("finer.tif", np.kron(labels, np.ones((2, 2), "uint8")), **half())
    moved = write_raster("moved.tif", labels, transform=GRID @ Affine.translation(30, 10))
    found = info.asked(*[image] * 4, "--labels", same, bare, finer, moved)
    grids = [one["labels"]["grid"] for one in found]
    assert grids[0] == "the image's own grid"
    assert grids[1].startswith("taken to lie on the image's grid")
    assert grids[2] == (
        "the image's own grid; 2 × 2 label pixels per pixel, the most frequent class"
    )
    assert grids[3].startswith("another grid than the image's: resampled")
    shares = [one["labels"]["share"] for one in found]
    assert shares[0] == shares[2] == pytest.approx(1, rel=1e-12)
    assert shares[1] is None
    # half of the columns and three quarters of the rows, of bounds that the rotation widens
    assert shares[3] == pytest.approx(0.5 * 0.75, abs=0.06)
    assert all(one["labels"]["kind"].endswith("uint8") for one in found)


def half() -> dict[str, Any]:
    return {"transform": GRID @ Affine.scale(0.5)}


def test_how_polygons_lie_to_their_image(
    write_raster: Write, write_vector: Write, info: Info
) -> None:
    image = write_raster("image.tif", pixels(2), transform=Affine(2, 0, 5e5, 0, -2, 4e6))
    shapes = [
        shapely.box(5e5, 4e6 - 80, 5e5 + 30, 4e6),
        shapely.box(5e5 + 20, 4e6 - 20, 5e5 + 60, 4e6),
    ]
    path = write_vector("a.gpkg", shapes, ["road", "house"], None, layer="b")
    options = ["--label-crs", "EPSG:32630", "--field", "class", "--classes", "road=1,house=4"]
    (found,) = info.asked(image, "--labels", path, *options, "--pixels")
    labels = found["labels"]
    assert labels["kind"] == "2 polygons of layer b (fields: class)"
    assert labels["grid"] == "burned on the image's grid as classes from field class"
    assert (labels["crs"], labels["share"]) == ("EPSG:32630", 0.5)
    assert labels["bounds"] == [5e5, 4e6 - 80, 5e5 + 60, 4e6]
    assert labels["class_pixels"] == [2400 - 600 - 150, 15 * 40 - 50, 0, 0, 20 * 10]
    (found,) = info.asked(image, "--labels", path, "--label-crs", "image")
    assert found["labels"]["grid"] == "burned on the image's grid as class 1"
    (found,) = info.asked(image, "--labels", path, code=1)
    assert "need a CRS" in found["refused"]
    assert found["size"] == [40, 60]


# --- pixels


def test_statistics_and_classes_are_those_of_all_pixels_with_data(
    write_raster: Write, info: Info
) -> None:
    values, labels = pixels(3, "float32") / 7, pixels(1, "uint8", 2)[0] % 5
    values[1] = 12.5
    values[:, 3:20, 10:40] = -1
    values[0, 30, 5:9] = np.nan
    labels[labels == 1] = 77
    image = write_raster("image.tif", values.astype("float32"), nodata=-1)
    path = write_raster("labels.tif", labels)
    options = ["--labels", path, "--ignore-index", "77", "--pixels"]
    (found,) = info.asked(image, *options)
    valid = (values != -1).any(axis=0) & np.isfinite(values).all(axis=0)
    inside = values.astype("float32")[:, valid].astype(np.float64)
    seen = found["pixels"]
    assert (seen["num_pixels"], seen["num_valid"]) == (2400, valid.sum())
    assert seen["share_without_data"] == 1 - valid.sum() / 2400
    for place, band in enumerate(seen["bands"]):
        ours = inside[place]
        assert band["band"] == place + 1
        assert (band["minimum"], band["maximum"]) == (ours.min(), ours.max())
        assert band["mean"] == pytest.approx(ours.mean(), rel=1e-14)
        assert band["std"] == pytest.approx(ours.std(), rel=1e-13)
    counts = np.bincount(labels[valid & (labels != 77)])
    assert counts[1] == 0
    assert found["labels"]["class_pixels"] == counts.tolist()
    assert found["labels"]["class_weights"] == list(balanced_weights(counts.tolist()))
    assert found["labels"]["share_labelled"] == counts.sum() / valid.sum()
    assert any("2 (12.5); leave them out with bands: [1, 3]" in note for note in found["notes"])
    text, _ = info.shown(image, *options)
    lines = [line.split() for line in text.splitlines()]
    assert ["2", "12.5", "0", "12.5", "12.5"] in lines
    assert ["4", f"{counts[4]:,}", f"{counts[4] / counts.sum():.2%}"] in [x[:3] for x in lines]
    assert not any(x[:1] == ["1"] and "%" in x[-2] for x in lines)


def test_labels_of_one_class_are_named(write_raster: Write, info: Info) -> None:
    image = write_raster("image.tif", pixels(2))
    labels = write_raster("labels.tif", np.where(pixels(1)[0] > 99, 255, 0).astype("uint8"))
    text, _ = info.shown(image, "--labels", labels, "--pixels")
    assert "all labelled pixels are of one class (0)" in text
    assert "ignore_index (255)" in text
    text, _ = info.shown(image, "--labels", labels, "--pixels", "--ignore-index", "99")
    assert "one class" not in text
