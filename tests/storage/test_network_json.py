"""`network.json`: what is written is read back, and rebuilds the network without tilenet."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tilenet.errors import TilenetError
from tilenet.geometry.unet import UNetOptions, unet_layers
from tilenet.storage.checkpoints import load_json
from tilenet.storage.network_json import NetworkRecord

OPTIONS = [
    UNetOptions(poolings=2, base=6, bands=3, classes=3, norm="batch", dropout=0.2),
    UNetOptions(1, 2, 4, 3, 3, norm="group", groups=3, upsampling="bilinear"),
    UNetOptions(3, 1, 64, 3, 3, kernel=5, padding="valid", upsampling="transposed"),
]


def record(options: UNetOptions = OPTIONS[0]) -> NetworkRecord:
    return NetworkRecord(
        layers=unet_layers(options),
        bands=(4, 1, 2),
        classes=("water", "forêt", "2"),
        ignore_index=255,
        mean=(0.1 + 0.2, -3e-300, 1 / 3),
        std=(1e300, 2 / 7, 0.0),
        resolution=0.3,
        nodata=-9999.0,
        precision="float64",
        epsilon_px=92,
    )


@pytest.mark.parametrize("options", OPTIONS, ids=["batch", "group", "valid"])
@pytest.mark.parametrize("nodata", [None, "none", "collar", 0.5])
def test_a_record_survives_json_to_the_last_bit(options: UNetOptions, nodata: Any) -> None:
    wanted = replace(record(options), nodata=nodata, resolution=None)
    assert NetworkRecord.from_json(json.loads(json.dumps(wanted.to_json()))) == wanted
    assert NetworkRecord.from_json(record(options).to_json()) == record(options)


def test_bands_asked_for_by_name_are_looked_for_by_name() -> None:
    named = replace(record(), band_names=("nir", None, "red"))
    assert named.wanted_bands == ("nir", 1, "red")
    assert record().wanted_bands == (4, 1, 2)
    entry = json.loads(json.dumps(named.to_json()))
    assert (entry["bands"], entry["band_names"]) == ([4, 1, 2], ["nir", None, "red"])
    assert NetworkRecord.from_json(entry) == named
    del entry["band_names"]  # as older versions wrote it
    assert NetworkRecord.from_json(entry) == record()


@pytest.mark.parametrize(
    ("options", "padding", "px"),
    [
        (OPTIONS[0], "same", {"alignment_px": 4, "halo_px": 24, "offset_px": 0}),
        (OPTIONS[1], "same", {"alignment_px": 2, "halo_px": 10, "offset_px": 0}),
        (OPTIONS[2], "valid", {"alignment_px": 8, "halo_px": 44, "offset_px": 44}),
    ],
    ids=str,
)
def test_a_record_says_what_tiles_need(
    options: UNetOptions, padding: str, px: dict[str, int]
) -> None:
    entry = record(options).to_json()
    assert entry["padding"] == padding
    assert {name: entry[name] for name in px} == px
    assert record(options).context().halo_px == px["halo_px"]


@pytest.mark.parametrize("key", [*record().to_json(), "mean", "std"])
def test_a_missing_key_is_refused_unless_it_follows_from_the_layers(key: str) -> None:
    entry = record().to_json()
    del (entry["statistics"] if key in ("mean", "std") else entry)[key]
    of_older = "band_names", "names", "task", "unit", "all_bands", "scaling", "image_bands"
    if key in ("padding", "alignment_px", "halo_px", "offset_px", *of_older):
        assert NetworkRecord.from_json(entry) == record()
        return
    with pytest.raises(TilenetError, match="must have the format" if key == "format" else key):
        NetworkRecord.from_json(entry)


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "network.json"
    path.write_text(json.dumps(record().to_json()).replace("{", '{"ignore_index": 7, ', 1))
    with pytest.raises(TilenetError, match=r"network\.json: the key 'ignore_index' stands 2 times"):
        load_json(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": "tilenet-network-2"}, r"format tilenet-network-1 \(got 'tilenet-network-2'\)"),
        ({"bands": 3}, "must hold every key with its type"),
        ({"bands": ["red"]}, "must hold every key with its type"),
        ({"bands": [1, 2]}, r"\(bands: 2, mean: 3, std: 3\)"),
        ({"band_names": ["red"]}, r"\(bands: 3, band_names: 1\)"),
        ({"band_names": 3}, "must hold every key with its type"),
        ({"statistics": {"mean": [1, 2, 3], "std": [1]}}, r"mean: 3, std: 1"),
        ({"statistics": [1]}, "must hold every key with its type"),
        ({"ignore_index": None}, "must hold every key with its type"),
        ({"layers": [{"kind": "attention"}]}, "a layer must have a known kind"),
        ({"layers": ["conv"]}, "must hold every key with its type"),
        ({"layers": None}, "must hold every key with its type"),
        ({"layers": []}, "1 to 10000 layers"),
        ({"layers": record().to_json()["layers"][:1]}, "one channel per class"),
        ({"classes": ["a", "b"]}, "one channel per class"),
        ({"bands": [float("inf")]}, "every key with its type"),
        ({"bands": [1, 2], "statistics": {"mean": [0, 0], "std": [1, 1]}}, "layer 0.*in_channels"),
        ({"statistics": {"mean": [float("nan"), 0, 0], "std": [1, 1, 1]}}, "finite statistics"),
        ({"resolution": "fine"}, "every key with its type"),
        ({"precision": "float17"}, "'float17' is none of "),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_record_of_another_shape_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(TilenetError, match=said) as raised:
        NetworkRecord.from_json(record().to_json() | change)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [(key, value) for key in ("out_channels", "kernel") for value in (0, -1, "x", 10**9)]
    + [("padding", -1), ("padding", 0.5), ("bias", 1), ("dilation", float("nan"))],
)
def test_a_layer_of_wrong_values_is_refused(key: str, value: Any) -> None:
    entry = record().to_json()
    entry["layers"][0][key] = value
    with pytest.raises(TilenetError, match=r"layer 0 of network\.json|every key with its type"):
        NetworkRecord.from_json(json.loads(json.dumps(entry)))


CONV = {"kind": "conv", "in_channels": 1, "out_channels": 1, "kernel": 1}
ENLARGE = {"kind": "upsample", "in_channels": 1, "out_channels": 1}
HEAD = {**CONV, "out_channels": 2}


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ([{**CONV, "stride": 4093}] * 5 + [{**ENLARGE, "factor": 4093}] * 5, "16752649 px"),
        ([{**ENLARGE, "factor": 4093}] * 5 + [{**CONV, "stride": 4093}] * 5, "1/16752649 px"),
        ([{**CONV, "stride": 2}] * 7 + [CONV] * 9000 + [ENLARGE] * 7, r"9015 layers .* 29 px"),
        ([{**CONV, "kernel": 4096, "dilation": 4096}], "begin within 1048576 px"),
        ([{**CONV, "padding": 4096}] * 300, "begin within 1048576 px"),
    ],
    ids=["strides", "enlargements", "many layers", "kernel", "padding"],
)
def test_a_network_whose_tiles_take_endless_time_is_refused_before_they_are_worked_out(
    layers: list[dict[str, Any]], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(_: Any) -> None:
        raise AssertionError("its loop runs once per pixel of the alignment")

    one_band = {"bands": [1], "classes": ["a", "b"], "statistics": {"mean": [0.5], "std": [2.0]}}
    entry = record().to_json() | one_band | {"layers": [*layers, HEAD]}
    monkeypatch.setattr("tilenet.storage.network_json.context_of", busy)
    with pytest.raises(TilenetError, match=said) as raised:
        NetworkRecord.from_json(entry)
    assert len(str(raised.value)) < 1000
