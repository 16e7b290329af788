"""Layers of checkpoints before there were cellwise ones compute what they did."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tilenet.errors import TilenetError
from tilenet.geometry.layer_json import layer_from_json
from tilenet.model.dropout import MaskKey
from tilenet.model.network import build_layer

FIVE = {"in_channels": 5, "out_channels": 5}
Weights = dict[str, Tensor]


def channel_norm(x: Tensor, w: Weights) -> Tensor:
    cells = x.permute(0, 2, 3, 1)
    return F.layer_norm(cells, [5], w.get("weight"), w.get("bias"), 1e-3).permute(0, 3, 1, 2)


def each(weight: Tensor) -> Tensor:
    return weight[:, None, None]


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": F.elu, "silu": F.silu, "gelu": F.gelu, "hardswish": F.hardswish,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "hardsigmoid": F.hardsigmoid,
    "sigmoid": torch.sigmoid, "tanh": torch.tanh, "softplus": F.softplus, "mish": F.mish,
    "channel_softmax": lambda x: x.softmax(1),
}  # fmt: skip
CASES: list[tuple[dict[str, Any], Callable[[Tensor, Weights], Tensor]]] = [
    ({"kind": "channel_norm", "epsilon": 1e-3}, channel_norm),
    ({"kind": "channel_norm", "epsilon": 1e-3, "affine": False}, channel_norm),
    ({"kind": "scale", "factor": 0.5, "offset": -0.25}, lambda x, w: x * 0.5 - 0.25),
    ({"kind": "scale", "weight": True}, lambda x, w: x * each(w["weight"])),
    ({"kind": "scale", "bias": True, "trained": False}, lambda x, w: x + each(w["bias"])),
    (
        {"kind": "scale", "factor": 2.0, "weight": True, "bias": True},
        lambda x, w: x * 2 * each(w["weight"]) + each(w["bias"]),
    ),
    *(
        ({"kind": "activation", "function": name}, lambda x, w, f=function: f(x))
        for name, function in FUNCTIONS.items()
    ),
]


@pytest.mark.parametrize(("entry", "function"), CASES, ids=[str(entry) for entry, _ in CASES])
def test_older_layers_compute_what_they_did(
    entry: dict[str, Any], function: Callable[[Tensor, Weights], Tensor]
) -> None:
    layer = layer_from_json({**entry, **FIVE})
    module = build_layer(layer, 0, MaskKey()).double()
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(2, 5, 3, 7, dtype=torch.float64, generator=generator)
    weights = dict(module.state_dict(keep_vars=True))
    with torch.no_grad():
        for one in weights.values():
            one.copy_(torch.randn(one.shape, generator=generator))
    assert torch.allclose(module(x), function(x, weights), rtol=1e-14, atol=1e-15)
    trained = {name for name, _ in module.named_parameters()}
    assert trained == ({*weights} if entry.get("trained", True) else set())
    assert layer.num_parameters == 5 * len(trained)


@pytest.mark.parametrize(
    "entry",
    [
        {"kind": "scale", "in_channels": "five", "out_channels": 5},
        {"kind": "scale", "factor": [1]},
        {"kind": "activation", "function": None},
        {"kind": "channel_norm", "epsilon": "small"},
    ],
    ids=str,
)
def test_other_entries_of_older_kinds_are_refused(entry: dict[str, Any]) -> None:
    with pytest.raises(TilenetError, match="known"):
        build_layer(layer_from_json({**FIVE, **entry}), 0, MaskKey())
