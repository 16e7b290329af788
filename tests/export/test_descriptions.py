"""What is said of an exported network: to Deepness, in a STAC item, on the terminal."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
import torch
from torch import nn

from tilenet.__main__ import main
from tilenet.export.deepness import deepness_properties
from tilenet.export.description import Description, Origin, origin_of
from tilenet.export.job import MOST_ROUNDED, _note_rounding
from tilenet.export.pixels import FromPixels
from tilenet.export.stac import stac_item
from tilenet.export.tile import ExportTile
from tilenet.geometry.layers import Conv
from tilenet.model.inputs import standardise
from tilenet.storage.network_json import NetworkRecord

Run = Callable[[str], Path]
RECORD = NetworkRecord(
    (Conv(3, 2, 5, padding=2),),
    (4, 2, 1),
    ("a field", "Straße"),
    255,
    (10.0, 20.0, 30.0),
    (1.0, 2.0, 0.0),
    resolution=None,
    nodata=None,
    precision="float32",
    epsilon_px=0,
    band_names=("red", None, "blue"),
)
TILE = ExportTile(525, 1, on_grid=True)
ABOUT = Description(
    *("my net.onnx", RECORD, "logits", TILE, None, "float32", 152, "2026-01-02T03:04:05Z"),
    Origin("U-Net", 0.25),
)

# What STAC 1.1 and MLM v1.5.2 require, and what its names may be made of.
FIELDS: dict[str, Any] = {
    "type": "Feature",
    "stac_version": r"1\.[1-9]\d*\.\d+",
    "stac_extensions": [r"https://stac-extensions\.github\.io/mlm/v1\.5\.2/schema\.json"],
    "id": r".+",
    "geometry": type(None),
    "links": list,
    "properties": {
        "datetime": r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ",
        "bands": [{"name": r".+"}],
        "mlm:name": r"[a-zA-Z][a-zA-Z0-9_.\-\s]+[a-zA-Z0-9]",
        "mlm:architecture": r".+",
        "mlm:tasks": [r"semantic-segmentation|regression"],
        "mlm:framework": r"PyTorch",
        "mlm:framework_version": r"\d+\.\d+\.\d+([-+][0-9A-Za-z.-]+)?",
        "mlm:total_parameters": int,
        "mlm:input": [
            {
                "name": r".+",
                "bands": [r".+"],
                "input": {"shape": [int], "dim_order": [r"[a-z-_]+"], "data_type": r"float(32|64)"},
            }
        ],
        "mlm:output": [
            {
                "name": r".+",
                "tasks": [r"semantic-segmentation|regression"],
                "result": {"shape": [int], "dim_order": [r"[a-z-_]+"], "data_type": r"float\d\d"},
                "classification:classes": [
                    {"value": int, "name": r"[0-9A-Za-z-_]+", "description": r".+"}
                ],
            }
        ],
        "tilenet:halo_px": int,
        "tilenet:alignment_px": int,
    },
    "assets": {
        "model": {
            "href": r"\./.+",
            "roles": [r"mlm:model"],
            "bands": [{"name": r".+"}],
            "mlm:artifact_type": r"torch\..+",
        }
    },
}


def check(found: Any, wanted: Any, where: str = "") -> None:
    """Each field is there and of its kind; of a list all items."""
    if isinstance(wanted, dict):
        for name, one in wanted.items():
            assert name in found, f"{where}/{name}"
            check(found[name], one, f"{where}/{name}")
    elif isinstance(wanted, list):
        assert isinstance(found, list), where
        for one in found:
            check(one, wanted[0], where)
    elif isinstance(wanted, str):
        assert re.fullmatch(wanted, found), (where, found)
    else:
        assert isinstance(found, wanted), (where, found)


def test_deepness_gets_its_form_filled_in() -> None:
    found = {name: json.loads(text) for name, text in deepness_properties(ABOUT).items()}
    assert found.pop("class_names") == {"0": "a field", "1": "Straße"}
    # As Deepness does: divided by 255, less the mean, divided by the deviation.
    mean, std = found.pop("standardization_mean"), found.pop("standardization_std")
    pixels = np.random.default_rng(1).integers(0, 4000, (5, 3))
    assert np.allclose((pixels / 255 - mean) / std, pixels, rtol=1e-12)
    assert found == {
        "model_type": "Segmentor",
        "tiles_size": 525,
        "tile_size": 525,
        "tiles_overlap": 1,
        "seg_thresh": 0.0,
        "resolution": 25.0,
    }
    heights = replace(RECORD, task="regression", classes=("height", "slope"))
    bare = deepness_properties(replace(ABOUT, record=heights, origin=Origin("U-Net", None)))
    assert bare["model_type"] == '"Regressor"'
    assert not {"resolution", "seg_thresh"} & bare.keys()


def test_a_stac_item_has_the_fields_of_its_extension() -> None:
    item = json.loads(json.dumps(stac_item(ABOUT)))
    check(item, FIELDS)
    facts = item["properties"]
    assert facts["mlm:name"] == "tilenet-my-net"
    assert facts["mlm:input"][0]["bands"] == ["red", "2", "blue"]
    assert facts["bands"] == [{"name": "red"}, {"name": "2"}, {"name": "blue"}]
    assert facts["mlm:input"][0]["input"]["shape"] == [1, 3, 525, 525]
    assert facts["mlm:output"][0]["result"]["shape"] == [1, 2, 525, 525]
    classes = facts["mlm:output"][0]["classification:classes"]
    assert classes[1] == {"value": 1, "name": "Stra-e", "description": "Straße"}
    assert (facts["tilenet:halo_px"], facts["tilenet:alignment_px"], facts["gsd"]) == (2, 1, 0.25)

    heights = replace(RECORD, task="regression", classes=("height", "slope"))
    other = stac_item(replace(ABOUT, file="網.pt2", record=heights, least_px=16))
    check(other, FIELDS)
    facts = other["properties"]
    assert (facts["mlm:name"], facts["mlm:tasks"]) == ("tilenet", ["regression"])
    assert facts["mlm:output"][0]["classification:classes"] == []
    assert facts["mlm:output"][0]["name"] == "values"
    assert facts["mlm:output"][0]["result"]["shape"] == [-1, 2, -1, -1]
    assert other["assets"]["model"]["mlm:artifact_type"] == "torch.export.save"
    kinds = (one["assets"]["model"]["type"].partition("; ")[2] for one in (item, other))
    assert [*kinds] == ["framework=onnx", "framework=pytorch"]


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (("поле", "лес", "вода 2"), ["0", "1", "2"]),
        (("a b", "a-b", "_a b_", "a.b"), ["a-b", "a-b-1", "a-b-2", "a-b-3"]),
        (("1", "林", "a-3", "a", "", "ä"), ["1", "1-1", "a-3", "a", "4", "5"]),
        (("a-2", "a", "a"), ["a-2", "a", "a-2-2"]),
    ],
)
def test_classes_of_an_item_are_told_apart(names: tuple[str, ...], wanted: list[str]) -> None:
    record = replace(RECORD, classes=names)
    (output,) = stac_item(replace(ABOUT, record=record))["properties"]["mlm:output"]
    found = output["classification:classes"]
    assert [one["name"] for one in found] == wanted
    assert [one["description"] for one in found] == [
        name or str(number) for number, name in enumerate(names)
    ]


@pytest.mark.parametrize(
    ("mean", "std", "dtype", "said"),
    [
        (1e8 + 0.3, 289.0, "float32", "band blue (100000000, deviation 289) float32 holds multip"),
        (1e8 + 0.3, 289.0, "float64", ""),
        (3e6, 289.0, "float32", ""),  # where multiples of 0.25 are held
        (-3e9, 2e5, "float32", "(-3e+09, deviation 2e+05) float32 holds multiples of 256 alone"),
        (-3e9, 2e6, "float32", ""),
        (123456789.0, 0.0, "float32", "(123456789, deviation 0) float32 holds multiples of 8 alo"),
        (0.0, 1e-9, "float32", ""),
    ],
)
def test_pixels_that_float32_does_not_hold_are_said(
    mean: float, std: float, dtype: str, said: str
) -> None:
    """Where, and only where, the file and `tilenet predict` standardise unlike."""
    record = replace(RECORD, mean=(10.0, -20.0, mean), std=(1.0, 2.0, std))
    found = _note_rounding(replace(ABOUT, record=record, dtype=dtype))
    assert len(found) == bool(said)
    assert all(said in sentence for sentence in found)
    values = (
        np.random.default_rng(2).normal(record.mean, record.std, (40, 50, 3)).transpose(2, 0, 1)
    )
    kind = getattr(torch, dtype)
    wanted = standardise(values, np.ones((40, 50), bool), record.mean, record.std, kind)
    given = torch.from_numpy(values).to(kind)[None]
    standardised = FromPixels(nn.Identity(), record, kind, softmax=False)(given)
    assert (float((standardised - wanted).abs().max()) > MOST_ROUNDED / 2) == bool(said)


def test_an_item_lies_next_to_the_file(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, item = tmp_path / "net.pt2", tmp_path / "net.json"
    item.write_text("mine")
    assert main(["export", str(run("own")), str(out)]) == 1
    assert "the description of an exported network is not overwritten" in capsys.readouterr().err
    assert not out.exists()
    assert main(["export", str(run("own")), str(out), "--overwrite"]) == 0
    found = json.loads(item.read_text())
    check(found, FIELDS)
    facts = found["properties"]
    assert facts["gsd"] == 2.0
    assert facts["mlm:architecture"] == "scenes:Net"
    assert facts["mlm:total_parameters"] == 471
    assert facts["mlm:input"][0]["input"]["data_type"] == "float64"


def test_pixels_have_a_size_where_the_image_says_it_in_metres(run: Run, tmp_path: Path) -> None:
    folder = run("own")
    image, feet = folder.with_name("i.tif"), {"crs": "EPSG:2263"}  # in US survey feet
    checkpoint = (folder / "last").resolve()
    record = replace(RECORD, bands=(1, 2))
    assert origin_of(checkpoint, record).pixel_m == 2
    assert origin_of(checkpoint, replace(record, resolution=6.0)).pixel_m == 6
    assert origin_of(tmp_path / "a" / "b", record) == Origin("U-Net", None)
    text = (folder / "run.yaml").read_text()
    for profile, wanted in ((feet, 2 * 1200 / 3937), ({"crs": "EPSG:4326"}, None)):
        other = tmp_path / f"{profile['crs'][5:]}.tif"
        with (
            rasterio.open(image) as file,
            rasterio.open(other, "w", **{**file.profile, **profile}) as copy,
        ):
            copy.write(file.read())
        (tmp_path / "run.yaml").write_text(text.replace(str(image), str(other)))
        found = origin_of(tmp_path / "checkpoints" / "step-1", record).pixel_m
        assert found == (None if wanted is None else pytest.approx(wanted, rel=1e-9))
    other.unlink()
    assert origin_of(tmp_path / "checkpoints" / "step-1", record).pixel_m is None


def test_what_differs_on_windows_is_said(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for way, said in (("pooled", True), ("own", False)):
        assert main(["export", str(run(way)), str(tmp_path / f"{way}.pt2")]) == 0
        text = capsys.readouterr().err
        assert ("averages, statistics or places of the whole image" in text) == said
        assert "overlap by " in text
