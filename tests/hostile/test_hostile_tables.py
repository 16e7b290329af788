"""Lists and polygons that hold other things than they should."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tilenet.data.image_list import read_image_list
from tilenet.data.labels.open import open_labels
from tilenet.data.labels.vector_keys import VectorKeys
from tilenet.data.rasters.raster import Raster


def test_lists_within_a_list_are_texts(tmp_path: Path) -> None:
    feature = {"type": "Feature", "geometry": None, "properties": {"image": [1, 2], "label": "b"}}
    path = tmp_path / "list.geojson"
    path.write_text(json.dumps({"type": "FeatureCollection", "features": [feature]}))
    assert len(read_image_list(str(path)).train) == 1


def test_what_gdal_mends_of_polygons_is_not_said(
    tmp_path: Path, write_raster: Callable[..., str]
) -> None:
    ring = [[500001, 3999999], [500009, 3999999], [500009, 3999985], [500001, 3999985]]
    shape = {"type": "Polygon", "coordinates": [ring]}
    feature = {"type": "Feature", "id": 3, "properties": {"class": 1}, "geometry": shape}
    crs = {"type": "name", "properties": {"name": "urn:ogc:def:crs:EPSG::32630"}}
    path = tmp_path / "a.geojson"
    entry = {"type": "FeatureCollection", "crs": crs, "features": [feature, feature]}
    path.write_text(json.dumps(entry))
    pixels = np.arange(64, dtype="uint8").reshape(8, 8)
    with (
        warnings.catch_warnings(),
        Raster(write_raster("a.tif", pixels)) as image,
        open_labels(str(path), image, 255, VectorKeys(field="class")) as labels,
    ):
        warnings.simplefilter("error")
        assert (labels.read(image.whole) == 1).any()
