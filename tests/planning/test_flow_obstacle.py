"""What one forward, one backward cannot train is refused for one reason each."""

from typing import Any

import pytest

from tilenet.geometry.unet import UNetOptions, unet_layers
from tilenet.planning.compatibility import flow_obstacle

FINE: dict[str, Any] = {
    "norm": "none", "partitions": 2, "checkpointing": "always", "swap": "off",
    "loss_terms": ("ce", "focal"), "halo_mode": "overlap", "image_ranks": 4,
}  # fmt: skip


def obstacle(**more: Any) -> str | None:
    keys = FINE | more
    norm = keys.pop("norm")
    return flow_obstacle(unet_layers(UNetOptions(2, base=4, norm=norm, norm_scope="image")), **keys)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"checkpointing": "never"},
        {"swap": False},
        {"norm": "group", "image_ranks": 1},
        {"norm": "instance", "image_ranks": 1},
    ],
    ids=str,
)
def test_it_flows(more: dict[str, Any]) -> None:
    assert obstacle(**more) is None


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"partitions": 1}, "partitions: 1"),
        ({"checkpointing": "except_last"}, "checkpointing: except_last"),
        ({"swap": "all"}, "swap: all"),
        ({"swap": True}, "swap: True"),
        ({"loss_terms": ("ce", "dice")}, "loss: dice"),
        ({"halo_mode": "exchange"}, "halo_mode: exchange"),
        ({"halo_mode": "sweep"}, "halo_mode: sweep"),
        ({"norm": "group"}, "over whole images: group norm"),
        ({"norm": "batch", "image_ranks": 1}, "over whole images: batch norm"),
    ],
    ids=str,
)
def test_it_is_refused(more: dict[str, Any], said: str) -> None:
    assert f"(pipeline: 1f1b, {said}); use pipeline: gpipe" in str(obstacle(**more))
