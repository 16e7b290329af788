"""STAC item collections: which asset is which image, and everything wrong."""

import json
from pathlib import Path
from typing import Any

import pytest

from tilenet.data.lists.item_list import read_items
from tilenet.errors import TilenetError
from tilenet.training.config.read import with_listed_images
from tilenet.training.config.run_file import RunFile


def item(name: str, split: str | None = None, **assets: str) -> dict[str, Any]:
    properties = {"datetime": "2026-05-01T10:00:00Z", **({"split": split} if split else {})}
    hrefs = {key: {"href": href} for key, href in assets.items()}
    return {"type": "Feature", "id": name, "geometry": None, "properties": properties} | {
        "assets": hrefs
    }


def write(*items: Any) -> None:
    Path("scenes").mkdir()
    collection = {"type": "FeatureCollection", "features": list(items)}
    Path("scenes/items.json").write_text(json.dumps(collection))


def test_assets_are_files_as_seen_from_the_collection(here: Path) -> None:
    write(
        item("a", red="./a_red.tif", nir="https://host/a_nir.tif", mask="../masks/a.tif"),
        item("b", red="/data/b_red.tif", nir="s3://bucket/b_nir.tif", mask="m.tif"),
    )
    found = read_items("scenes/items.json#red+nir", "scenes/items.json#mask")
    assert found.train == (
        ("scenes/./a_red.tif+https://host/a_nir.tif", "scenes/../masks/a.tif"),
        ("/data/b_red.tif+s3://bucket/b_nir.tif", "scenes/m.tif"),
    )
    assert not found.has_splits


def test_a_plus_sign_in_an_address_stays(here: Path) -> None:
    write(
        item("a", red="https://host/S2+a.tif", dem="heights.tif", mask="https://host/m.tif?s=1+2")
    )
    Path("scenes/heights.tif").touch()
    found = read_items("scenes/items.json#red+dem", "scenes/items.json#mask")
    assert found.train == (
        ("https://host/S2+a.tif+scenes/heights.tif", "https://host/m.tif?s=1+2"),
    )


@pytest.mark.parametrize(
    ("labels", "first"),
    [("labels/*_mask.tif", "labels/S2.a_mask.tif"), ("all.gpkg", "all.gpkg")],
)
def test_labels_are_named_by_the_id_or_are_one_file(here: Path, labels: str, first: str) -> None:
    write(item("S2.a", visual="a.tif"), item("S2.b", visual="b.tif"))
    found = read_items("scenes/items.json#visual", labels)
    assert found.train[0][1] == str(here / first)
    assert read_items("scenes/items.json#visual", "https://host/*.tif").train == (
        ("scenes/a.tif", "https://host/S2.a.tif"),
        ("scenes/b.tif", "https://host/S2.b.tif"),
    )


def test_a_run_takes_splits_from_properties(here: Path) -> None:
    kinds = {"a": "train", "b": "val", "c": "test", "d": "train"}
    write(*(item(name, split, v=f"{name}.tif", m=f"{name}.png") for name, split in kinds.items()))
    run = RunFile(
        images="scenes/items.json#v", labels="scenes/items.json#m", classes=2, output="o", steps=1
    )
    listed, notes = with_listed_images(run)
    assert listed.image_paths == ("scenes/a.tif", "scenes/d.tif")
    assert listed.label_paths == ("scenes/a.png", "scenes/d.png")
    assert listed.validation.image_paths == ("scenes/b.tif",)
    assert "2 images to train on, 1 for validation, 1 for test" in notes[0]


@pytest.mark.parametrize(
    ("items", "images", "labels", "said"),
    [
        ([item("a", v="a.tif")], "#w", "l", r"assets that are named after # \(.*a: w, has v\)"),
        ([item("a", v="a.tif")], "#v", "items.json#v", "assets of one item"),
        ([item("a", v="a.tif"), item("b", v="a.tif")], "#v", "*.tif", "entries 1 and 2"),
        ([item("a", "x", v="a.tif")], "#v", "*.tif", "split is train"),
        ([item("a", "val", v="a.tif"), item("b", v="b.tif")], "#v", "*.tif", "split is train"),
        (
            [{"type": "Feature", "properties": {}}],
            "#v",
            "l",
            "STAC item collection.*KeyError: 'id'",
        ),
        ([], "#v", "l", "must name at least one"),
        (None, "#v", "l", "STAC item collection.*No such file"),
    ],
)
def test_what_is_wrong_is_said(
    here: Path, items: list[Any] | None, images: str, labels: str, said: str
) -> None:
    if items is not None:
        write(*items)
    with pytest.raises(TilenetError, match=said):
        read_items(f"scenes/items.json{images}", labels)
