"""Tables and lists that hold other things than they should."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tilenet.data.image_list import read_image_list
from tilenet.data.labels.open import open_labels
from tilenet.data.labels.vector_keys import VectorKeys
from tilenet.data.rasters.raster import Raster
from tilenet.errors import TilenetError
from tilenet.storage.tables import History


@pytest.mark.parametrize(
    "text",
    [b"step,loss\n1,x\n", b"step,loss\n1,\xff\n", b'step,loss\n1,"' + b"9" * 200_000 + b'"\n'],
    ids=["word", "bytes", "long"],
)
def test_a_table_of_other_things_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "history.csv").write_bytes(text)
    with pytest.raises(TilenetError, match="a table of a run must hold numbers"):
        History(tmp_path / "history.csv", 3)


@pytest.mark.parametrize("step", ["²", "0", "x", "1.0", ""])
def test_a_row_of_no_step_is_refused(tmp_path: Path, step: str) -> None:
    path = tmp_path / "history.csv"
    path.write_text(f"step,loss\n{step},2\n1,3\n")
    with pytest.raises(TilenetError, match=r"history\.csv, line 2: .* is no step\)"):
        History(path, 3)


def test_a_table_without_names_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "history.csv"
    path.write_text("1,0.25,70\n2,0.75,80\n")
    with pytest.raises(TilenetError, match=r"history\.csv, line 2: '' is no step\)"):
        History(path, 3)


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
