"""What one forward, one backward cannot train is refused for one reason each."""

from typing import Any

import pytest

from tilenet.geometry.unet import UNetOptions, unet_layers
from tilenet.planning.compatibility import flow_obstacle

FINE: dict[str, Any] = {
    "norm": "none", "partitions": 2, "checkpointing": "always", "swap": "off",
    "loss_terms": ("ce", "focal"), "halo_mode": "overlap",
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
        {"norm": "group"},
        {"norm": "instance"},
        {"norm": "instance", "halo_mode": "exchange"},
        {"halo_mode": "exchange"},
    ],
    ids=str,
)
def test_it_flows(more: dict[str, Any]) -> None:
    assert obstacle(**more) is None


@pytest.mark.parametrize(
    ("more", "said", "remedy"),
    [
        ({"partitions": 1}, "partitions: 1", {"partitions": 2}),
        (
            {"checkpointing": "except_last"},
            "checkpointing: except_last",
            {"checkpointing": "never"},
        ),
        ({"swap": "all"}, "swap: all", {"swap": "off"}),
        ({"swap": True}, "swap: True", {"swap": "off"}),
        ({"loss_terms": ("ce", "dice")}, "loss: dice", {"loss_terms": ("ce",)}),
        ({"halo_mode": "sweep"}, "halo_mode: sweep", {"halo_mode": "exchange"}),
        ({"norm": "batch"}, "over whole images: batch norm", {"norm": "group"}),
    ],
    ids=str,
)
def test_it_is_refused(more: dict[str, Any], said: str, remedy: dict[str, Any]) -> None:
    sentence = str(obstacle(**more))
    assert sentence.startswith("one forward, one backward ")
    assert f"(pipeline: 1f1b, {said}); use pipeline: gpipe, or " in sentence
    assert obstacle(**more | remedy) is None
