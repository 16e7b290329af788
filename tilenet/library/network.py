"""A network by the names and objects by which programs say it."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from tilenet.errors import TilenetError
from tilenet.geometry.unet import PRESETS

__all__ = ["first_bands", "network_keys"]

OURS = "unet-"


def network_keys(net: nn.Module | str | None, keys: Mapping[str, Any]) -> dict[str, Any]:
    """The run file's group `network`, of what a program calls its network.

    Args:
        net: A module, its maker's name, or that of a U-Net.
        keys: With or without a group `network` of their own.

    Raises:
        TilenetError: There is no such network.
    """
    given = keys.get("network") or {}
    group = dict(given) if isinstance(given, Mapping) else dict(vars(given))
    if isinstance(net, nn.Module):
        kind = type(net)
        return group | {"module": f"{kind.__module__}:{kind.__qualname__}"}
    if net is None:
        return group
    preset = net.removeprefix(OURS)
    if net != preset and preset in PRESETS:
        return group | {"preset": preset}
    if ":" in net:
        return group | {"module": net}
    raise TilenetError(
        f"a network is a torch.nn.Module, package:function, or one of {OURS}"
        f"{f', {OURS}'.join(PRESETS)} (net: {net}); name one of these, or leave it out and give "
        "network={...}"
    )


def first_bands(net: nn.Module) -> int:
    """The channels of a module's images, as its first convolution says it.

    Raises:
        TilenetError: It has none.
    """
    for part in net.modules():
        if isinstance(part, nn.Conv2d):
            return part.in_channels
    raise TilenetError(
        f"a network's first convolution says how many bands it takes ({type(net).__name__} has "
        "none); give bands"
    )
