"""Spoilt files of every kind: one sentence or a result, and nothing else; `make fuzz` runs more."""

import json
import os
import struct
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
import torch
import yaml
from hostile import few, noisy, said, spoilt, written
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from tilenet.data.image_list import read_image_list
from tilenet.data.image_patterns import is_pattern, matched
from tilenet.data.labels.open import open_labels
from tilenet.data.labels.vector_keys import VectorKeys
from tilenet.data.rasters.raster import Raster
from tilenet.geometry.unet import UNetOptions, unet_layers
from tilenet.geometry.windows import Window
from tilenet.model.network import build_network, check_weight_count, load_weights
from tilenet.planning.plan import read_plan
from tilenet.storage.checkpoints import load_json, load_tensors
from tilenet.storage.network_json import NetworkRecord
from tilenet.storage.tables import History
from tilenet.training.config.read import read_run_file
from tilenet.training.folder import check_state

pytestmark = pytest.mark.filterwarnings("ignore")

OPTIONS = UNetOptions(poolings=1, base=2, bands=1, classes=2, norm="batch", upsampling="transposed")
RECORD = NetworkRecord(
    unet_layers(OPTIONS), (1,), ("a", "b"), 255, (0.5,), (2.0,), None, 3.0, "float32", 5
)
NETWORK = json.loads(json.dumps(RECORD.to_json()))
WEIGHTS = save({k: v.float() for k, v in build_network(RECORD.layers).state_dict().items()})
PLAN = {
    "tilenet_plan": 1,
    "run": {"mesh": {"rows": 1}, "tiles": {"rows": 2, "columns": 2}, "halo": "exact"}
    | {"partitions": 2, "balance": [3, 4], "batch_size": 1, "precision": "float32"},
    "asked": {"options": {"poolings": 2, "norm": "batch", "dropout": 0.1}, "image": [100, 200]},
}
RUN = {
    "images": ["a.tif", "b.tif"],
    "labels": ["c.tif", "d.tif"],
    "classes": ["sea", "land"],
    "output": "out",
    "steps": 3,
    "bands": [1, "red"],
    "network": {"preset": "small", "base": 8, "groups": 4},
    "tiles": {"rows": 2, "columns": 2},
    "vectors": {"field": "kind", "classes": {"road": 1, "ruin": None}, "priority": [0, 1]},
    "validation": {"share": 0.2, "block_px": 64},
    "optimizer": {"lr": 0.1, "clip_norm": 1.0},
    "schedule": {"name": "step", "milestones": [1, 2], "factor": 0.1},
    "augment": {"flips": True, "noise": 0.1},
    "class_weights": [1.0, 2.0],
    "profile": {"steps": "1-2"},
    "swapping": {"min_mib": 1.0},
}
SQUARE = [[[500005, 3999995], [500040, 3999995], [500040, 3999960], [500005, 3999995]]]
GEOJSON = {
    "type": "FeatureCollection",
    "crs": {"type": "name", "properties": {"name": "urn:ogc:def:crs:EPSG::32630"}},
    "features": [
        {
            "type": "Feature",
            "properties": {"class": 1, "image": "a.tif", "label": "b.tif", "split": "train"},
            "geometry": {"type": kind, "coordinates": coordinates},
        }
        for kind, coordinates in (("Polygon", SQUARE), ("MultiPolygon", [SQUARE, SQUARE]))
    ],
}
LIST = b'image,label,split\na.tif,b.tif,train\nR.tif+G.tif,c.gpkg,val\n"d,.tif",e.tif,test\n'
HISTORY = b"step,loss,weight_sum,seconds\n1,0.5,100,1\n2,0.25,100,1.5\n3,nan,,2\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("hostile")
    grid = {"crs": "EPSG:32630", "transform": rasterio.Affine(1, 0, 5e5, 0, -1, 4e6)}
    size = {"driver": "GTiff", "count": 1, "height": 64, "width": 64, "dtype": "uint8"}
    pixels = np.random.default_rng(7).integers(0, 200, (1, 64, 64)).astype("uint8")
    for name, more in (("strips.tif", {}), ("tiles.tif", {"tiled": True, "blockxsize": 32})):
        more |= {"blockysize": 32, "compress": "deflate"} if more else {}
        with rasterio.open(made / name, "w", **size, **grid, **more) as file:
            file.write(pixels)
    for name, driver in (("a.png", "PNG"), ("a.jpg", "JPEG")):
        with (
            warnings.catch_warnings(),
            rasterio.open(made / name, "w", **size | {"driver": driver}) as file,
        ):
            file.write(pixels)
    (made / "good.vrt").write_text(
        '<VRTDataset rasterXSize="64" rasterYSize="64"><VRTRasterBand dataType="Byte" band="1">'
        '<SimpleSource><SourceFilename relativeToVRT="1">strips.tif</SourceFilename>'
        "<SourceBand>1</SourceBand></SimpleSource></VRTRasterBand></VRTDataset>"
    )
    (made / "a_mask.tif").write_text("")
    return made


def read_raster(path: Path, **keys: Any) -> None:
    with Raster(str(path), **keys) as image:
        height, width = min(image.height, 64), min(image.width, 64)
        image.read(Window(0, 0, height, width))
        image.read(Window(image.height - height, image.width - width, height, width))


def read_labels(folder: Path, path: Path, keys: VectorKeys) -> None:
    with (
        Raster(str(folder / "strips.tif")) as image,
        open_labels(str(path), image, 255, keys) as labels,
    ):
        labels.read(image.whole)


@few
@given(entry=spoilt(NETWORK))
def test_network_json(folder: Path, entry: Any) -> None:
    path = written(folder, "network.json", entry)

    def use() -> None:
        record = NetworkRecord.from_json(load_json(path))
        weights = load_tensors(written(folder, "w.safetensors", WEIGHTS))
        check_weight_count(record.layers, weights, "w")
        load_weights(build_network(record.layers), weights, "w")
        json.dumps(record.to_json())

    said(use)


@few
@given(data=noisy(json.dumps(NETWORK).encode()))
def test_network_json_of_noise(folder: Path, data: bytes) -> None:
    path = written(folder, "network.json", data)
    said(lambda: NetworkRecord.from_json(load_json(path)))


@few
@given(entry=spoilt(PLAN))
def test_plans(folder: Path, entry: Any) -> None:
    path = written(folder, "plan.json", entry)
    said(lambda: read_plan(path))
    run = written(folder, "run.yaml", "images: a\nlabels: b\nclasses: 2\noutput: c\nsteps: 1\n")
    said(lambda: read_run_file(["-c", str(run), "--plan", str(path)]))


@few
@given(entry=spoilt(RUN))
def test_run_files(folder: Path, entry: Any) -> None:
    text = yaml.safe_dump(entry, allow_unicode=True)
    run = written(folder, "run.yaml", text)
    said(lambda: read_run_file(["-c", str(run)]))


@few
@given(data=noisy(yaml.safe_dump(RUN).encode()))
def test_run_files_of_noise(folder: Path, data: bytes) -> None:
    run = written(folder, "run.yaml", data)
    said(lambda: read_run_file(["-c", str(run)]))


@few
@given(
    key=st.sampled_from(
        ["images", "network", "network.base", "bands", "halo", "steps", "seed", "c"]
    ),
    value=st.text(max_size=30)
    | st.sampled_from(["[" * 9000, "9" * 4400, "{a: [", "!!x", "&a [*a]"]),
)
def test_options(folder: Path, key: str, value: str) -> None:
    run = written(folder, "run.yaml", yaml.safe_dump(RUN))
    said(lambda: read_run_file(["-c", str(run), f"--{key}={value}"]))


@few
@given(header=spoilt(json.loads(WEIGHTS[8 : 8 + struct.unpack("<Q", WEIGHTS[:8])[0]])))
def test_headers_of_weights(folder: Path, header: Any) -> None:
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    body = WEIGHTS[8 + struct.unpack("<Q", WEIGHTS[:8])[0] :]
    use_weights(folder, struct.pack("<Q", len(text)) + text + body)


@few
@given(data=noisy(WEIGHTS))
def test_weights_of_noise(folder: Path, data: bytes) -> None:
    use_weights(folder, data)


def use_weights(folder: Path, data: bytes) -> None:
    path = written(folder, "w.safetensors", data)
    network = build_network(RECORD.layers)
    said(lambda: load_weights(network, load_tensors(path), "w"))
    optimizer = torch.optim.AdamW(network.parameters())
    name, parameter = next(iter(network.named_parameters()))
    said(lambda: check_state(name, parameter, load_tensors(path), optimizer, "w"))


@few
@given(data=noisy(HISTORY), done=st.integers(0, 4))
def test_histories(folder: Path, data: bytes, done: int) -> None:
    path = written(folder, "history.csv", data)

    def use() -> None:
        history = History(path, done)
        history.close()
        for row in history.rows():
            assert 1 <= int(row["step"]) <= done
            [float(value or 0) for value in row.values()]

    said(use)


@few
@given(data=noisy(LIST))
def test_lists(folder: Path, data: bytes) -> None:
    path = written(folder, "list.csv", data)
    said(lambda: read_image_list(str(path)))


@few
@given(entry=spoilt(GEOJSON))
def test_geojson(folder: Path, entry: Any) -> None:
    path = written(folder, "v.geojson", entry)
    said(lambda: read_labels(folder, path, VectorKeys(field="class")))
    said(lambda: read_image_list(str(path)))


@pytest.mark.parametrize("name", ["strips.tif", "tiles.tif", "a.png", "a.jpg", "good.vrt"])
@few
@given(data=st.data())
def test_rasters(folder: Path, name: str, data: st.DataObject) -> None:
    spoiled = data.draw(noisy((folder / name).read_bytes()))
    path = written(folder, f"spoilt-{name}", spoiled)
    said(lambda: read_raster(path, nodata=data.draw(st.sampled_from([None, "collar", 0.0]))))
    said(lambda: read_labels(folder, path, VectorKeys()))


@few
@given(pattern=st.text(alphabet="a*?[]!^-/.\0\x1b~{}", min_size=1, max_size=24))
def test_patterns(folder: Path, pattern: str) -> None:
    before = os.getcwd()
    os.chdir(folder)
    try:
        if is_pattern(pattern) and not pattern.startswith("/") and ".." not in pattern:
            said(lambda: matched(pattern, pattern))
    finally:
        os.chdir(before)
