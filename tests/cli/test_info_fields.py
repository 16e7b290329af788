"""`tilenet info` counts the values of a field of polygons, and writes what a run file needs."""

import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyogrio
import pytest
import rasterio
import shapely
from affine import Affine
from info_answers import Info, Write, pixels

from tilenet.data.labels import vector_layer
from tilenet.data.labels.field_values import proposed_classes
from tilenet.training.config.read import read_run_file

GRID = Affine(2, 0, 5e5, 0, -2, 4e6)
RUN = "images: a.tif\nlabels: b.gpkg\nclasses: 9\noutput: run\nsteps: 1\n"


def polygons(path: Path, values: np.ndarray, name: str = "kind") -> str:
    """Boxes with these values, over an image of 40 × 60 px and beyond."""
    rng = np.random.default_rng(3)
    corners = np.array([5e5, 4e6 - 80]) + rng.uniform(-40, 160, (len(values), 2))
    shapes = np.array([shapely.box(x, y, x + 9, y + 7) for x, y in corners])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pyogrio.raw.write(
            path,
            shapely.to_wkb(shapes),
            [values],
            [name],
            geometry_type="Polygon",
            crs="EPSG:32630",
        )
    return str(path)


def image_of(write_raster: Write) -> str:
    return write_raster("image.tif", pixels(2), transform=GRID)


def field_of(found: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = found["labels"]["values"]
    return values


@pytest.mark.parametrize("at_once", [1 << 20, 7])
def test_values_are_counted_and_the_keys_fit_a_run_file(
    write_raster: Write, tmp_path: Path, info: Info, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(vector_layer, "VALUES_AT_ONCE", at_once, raising=False)
    kinds = ["road"] * 9 + ["yes"] * 5 + ["forêt: \N{DECIDUOUS TREE} x"] * 3 + [""] * 2 + [None]
    path = polygons(tmp_path / "a.gpkg", np.array(kinds, object)[::-1])
    options = image_of(write_raster), "--labels", path, "--field", "kind"
    assert field_of(info.asked(*options[:3])[0]) is None
    found = field_of(info.asked(*options)[0])
    assert (found["features"], found["distinct"]) == (20, 5)
    assert found["counts"] == {"road": 9, "yes": 5, kinds[14]: 3, "": 2, "null": 1}
    assert found["classes"] == {"road": 1, "yes": 2, kinds[14]: 3, "": None, "null": None}
    text, _ = info.shown(*options)
    assert "  field    kind: 5 values in 20 polygons\n" in text
    assert re.search(r'^ +2 +null  ""$', text, re.MULTILINE)
    (line,) = [line.strip() for line in text.splitlines() if "vectors:" in line]
    (tmp_path / "run.yaml").write_text(RUN + line, encoding="utf-8")
    run, _ = read_run_file(["-c", str(tmp_path / "run.yaml")])
    assert run.vectors.field == "kind"
    assert run.vectors.classes_of(kinds, 255, "x") == [1] * 9 + [2] * 5 + [3] * 3 + [255] * 3


@pytest.mark.parametrize(
    ("values", "classes"),
    [
        (["3", "1", "null"], {"3": 3, "1": 1, "null": None}),  # class numbers as they are
        (["3", "255"], {"3": 1, "255": 2}),  # codes
        (["-1", "4"], {"-1": 1, "4": 2}),
        (["0"], {"0": 1}),  # not what lies in no polygon
        (["0", "2"], {"0": 0, "2": 2}),
        (["a", "4"], {"a": 1, "4": 2}),
        (["", "null"], {"": None, "null": None}),
    ],
)
def test_each_value_gets_a_class_of_its_own(
    values: list[str], classes: dict[str, int | None]
) -> None:
    assert proposed_classes(values, {}, 255) == classes


def test_classes_that_are_given_stay_and_missing_ones_are_said(
    write_raster: Write, tmp_path: Path, info: Info
) -> None:
    path = polygons(tmp_path / "a.gpkg", np.array(["a", "b", "b", "c", "", "ignored"], object))
    options = image_of(write_raster), "--labels", path, "--field", "kind"
    given = "--classes", "a=2,b=1,ignored=ignore"
    found = field_of(info.asked(*options, *given)[0])
    assert found["missing"] == ["", "c"]
    assert found["classes"] == {"a": 2, "b": 1, "c": 3, "": None, "ignored": None}
    text, _ = info.shown(*options, *given)
    assert re.search(r"^ +1  not given  c$", text, re.MULTILINE)
    assert "classes: {b: 1, a: 2, c: 3, '': null, ignored: null}}" in text


def test_of_many_values_a_bounded_number_is_listed(
    write_raster: Write, tmp_path: Path, info: Info
) -> None:
    ids = np.concatenate([np.arange(300, dtype=np.int64), [77, 77, 299]])
    path = polygons(tmp_path / "a.gpkg", ids, name="ids of mine")
    options = image_of(write_raster), "--labels", path, "--field", "ids of mine"
    found = field_of(info.asked(*options)[0])
    assert (found["features"], found["distinct"], len(found["counts"])) == (303, 300, 50)
    assert list(found["counts"].items())[:3] == [("77", 3), ("299", 2), ("0", 1)]
    text, _ = info.shown(*options)
    assert "ids of mine: 300 values in 303 polygons, the 50 most frequent of them:" in text
    assert "vectors: {field: ids of mine, classes: {" in text


def test_an_empty_layer_and_long_values_can_be_read(
    write_raster: Write, tmp_path: Path, info: Info
) -> None:
    empty = polygons(tmp_path / "a.gpkg", np.array([], object))
    options = image_of(write_raster), "--field", "kind", "--labels"
    text, _ = info.shown(*options, empty)
    assert "kind: 0 values in 0 polygons\n" in text
    assert not re.search(r"\b(nan|inf)\b", text)
    long = polygons(tmp_path / "b.gpkg", np.array(["x" * 9999, "\x1b[2J"], object))
    text, _ = info.shown(*options, long)
    assert f"  {'x' * 79}…\n" in text
    assert r'classes: {"\e[2J": 1}}' in text
    assert "\x1b" not in text


def test_names_of_classes_in_a_map_are_said(write_raster: Write, info: Info) -> None:
    image, labels = write_raster("image.tif", pixels(2)), write_raster("a.tif", pixels(1, "uint8"))
    with rasterio.open(labels, "r+") as file:
        file.update_tags(1, class_10="lake", class_0="field", class_="x", classy="y")
    (found,) = info.asked(image, "--labels", labels)
    assert found["labels"]["names"] == {"0": "field", "10": "lake"}
    assert "classes are named: 0 field, 10 lake\n" in info.shown(image, "--labels", labels)[0]
