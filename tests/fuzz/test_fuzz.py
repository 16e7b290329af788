"""Spoilt images and checkpoints: one sentence or a result; `make fuzz` runs more."""

import json
import struct
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
import torch
from hostile import few, noisy, said, spoilt, written
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from tilenet.data.labels.open import open_labels
from tilenet.data.labels.vector_keys import VectorKeys
from tilenet.data.rasters.raster import Raster
from tilenet.geometry.unet import UNetOptions, unet_layers
from tilenet.geometry.windows import Window
from tilenet.model.network import build_network, check_weight_count, load_weights
from tilenet.storage.checkpoints import load_json, load_tensors
from tilenet.storage.network_json import NetworkRecord
from tilenet.storage.tables import History
from tilenet.training.states import check_state

pytestmark = pytest.mark.filterwarnings("ignore")

OPTIONS = UNetOptions(poolings=1, base=2, bands=1, classes=2, norm="batch", upsampling="transposed")
RECORD = NetworkRecord(
    unet_layers(OPTIONS), (1,), ("a", "b"), 255, (0.5,), (2.0,), None, 3.0, "float32", 5
)
NETWORK = json.loads(json.dumps(RECORD.to_json()))
WEIGHTS = save({k: v.float() for k, v in build_network(RECORD.layers).state_dict().items()})
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
@given(entry=spoilt(NETWORK) | noisy(json.dumps(NETWORK).encode()))
def test_network_json(folder: Path, entry: Any) -> None:
    path = written(folder, "network.json", entry)

    def use() -> None:
        record = NetworkRecord.from_json(load_json(path))
        weights = load_tensors(written(folder, "w.safetensors", WEIGHTS))
        check_weight_count(record.layers, weights, "w")
        load_weights(build_network(record.layers), weights, "w")
        json.dumps(record.to_json())

    said(use)


END = 8 + struct.unpack("<Q", WEIGHTS[:8])[0]


def with_header(header: Any) -> bytes:
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(text)) + text + WEIGHTS[END:]


@few
@given(data=spoilt(json.loads(WEIGHTS[8:END])).map(with_header) | noisy(WEIGHTS))
def test_weights(folder: Path, data: bytes) -> None:
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


@pytest.mark.parametrize("name", ["strips.tif", "tiles.tif", "a.png", "a.jpg", "good.vrt"])
@few
@given(data=st.data())
def test_rasters(folder: Path, name: str, data: st.DataObject) -> None:
    spoiled = data.draw(noisy((folder / name).read_bytes()))
    path = written(folder, f"spoilt-{name}", spoiled)
    said(lambda: read_raster(path, nodata=data.draw(st.sampled_from([None, "collar", 0.0]))))
    said(lambda: read_labels(folder, path, VectorKeys()))
