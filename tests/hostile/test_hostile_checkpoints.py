"""Malformed network descriptions, weights and optimizer states are refused in one sentence."""

import json
from typing import Any

import pytest
import torch

from tilenet.errors import TilenetError
from tilenet.geometry.unet import UNetOptions, unet_layers
from tilenet.model.network import build_network, check_weight_count, load_weights
from tilenet.storage.network_json import NetworkRecord
from tilenet.training.folder import check_state

LAYERS = unet_layers(UNetOptions(poolings=1, base=2, bands=1, classes=2, norm="batch"))
RECORD = NetworkRecord(LAYERS, (1,), ("a", "b"), 255, (0.5,), (2.0,), None, None, "float32", 5)


@pytest.mark.parametrize(
    ("key", "value"),
    [(key, value) for key in ("out_channels", "kernel") for value in (0, -1, "x", 10**9)]
    + [("padding", -1), ("padding", 0.5), ("bias", 1), ("dilation", float("nan"))],
)
def test_a_layer_of_wrong_values_is_refused(key: str, value: Any) -> None:
    entry = RECORD.to_json()
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

    entry = RECORD.to_json() | {"layers": [*layers, HEAD]}
    monkeypatch.setattr("tilenet.storage.network_json.context_of", busy)
    with pytest.raises(TilenetError, match=said) as raised:
        NetworkRecord.from_json(entry)
    assert len(str(raised.value)) < 1000


def test_a_larger_network_than_its_weights_is_refused_before_it_is_built() -> None:
    weights = build_network(LAYERS).state_dict()
    check_weight_count(LAYERS, weights, "w")
    wide = unet_layers(UNetOptions(poolings=1, base=2**20, bands=1, classes=2))
    with pytest.raises(TilenetError, match=r"weights must fit .*network\.json: \d\d,\d{3},\d{3},"):
        check_weight_count(wide, weights, "w")


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 1j])
def test_weights_that_are_no_numbers_are_refused(wrong: Any) -> None:
    network = build_network(LAYERS)
    weights = dict(network.state_dict())
    weights["0.weight"] = weights["0.weight"] * torch.tensor(wrong)
    with pytest.raises(TilenetError, match=r"finite real numbers \(w: 0\.weight and 0 more"):
        load_weights(network, weights, "w")


@pytest.mark.parametrize(
    "change",
    [
        {"exp_avg": torch.ones(3)},
        {"exp_avg": torch.full((2, 1, 3, 3), torch.nan)},
        {"step": torch.ones(2)},
        {"momentum_buffer": torch.ones(2, 1, 3, 3)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_an_optimizers_state_must_fit(change: dict[str, torch.Tensor]) -> None:
    network = build_network(LAYERS)
    optimizer = torch.optim.AdamW(network.parameters())
    good = {"step": torch.tensor(3.0)}
    good |= {name: torch.ones(2, 1, 3, 3) for name in ("exp_avg", "exp_avg_sq")}
    check_state("0.weight", network[0].weight, good, optimizer, "s")  # type: ignore[arg-type]
    with pytest.raises(TilenetError, match=rf"\(s: {next(iter(change))} of 0\.weight"):
        check_state("0.weight", network[0].weight, good | change, optimizer, "s")  # type: ignore[arg-type]
