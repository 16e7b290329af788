"""Malformed weights and optimizer states are refused in one sentence."""

from typing import Any

import pytest
import torch

from tilenet.errors import TilenetError
from tilenet.geometry.unet import UNetOptions, unet_layers
from tilenet.model.network import build_network, check_weight_count, load_weights
from tilenet.training.states import check_state

LAYERS = unet_layers(UNetOptions(poolings=1, base=2, bands=1, classes=2, norm="batch"))


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
