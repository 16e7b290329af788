"""The argument `net` of the library's functions, turned into keys of the run file."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from tilenet.errors import TilenetError
from tilenet.geometry.unet import PRESETS

__all__ = ["first_bands", "network_keys"]

UNET_PREFIX = "unet-"


def network_keys(
    net: nn.Module | str | Mapping[str, Any] | None, keys: Mapping[str, Any]
) -> dict[str, Any]:
    """The run file's group `network` for a network that a program names or holds.

    Args:
        net: A module, `package:function` that makes one, the name of a U-Net, or keys of the group.
        keys: Keys of a run; those of its group `network`, if it has one, are kept.

    Raises:
        TilenetError: There is no such network.
    """
    base = keys.get("network") or {}
    group = dict(base) if isinstance(base, Mapping) else dict(vars(base))
    if isinstance(net, Mapping):
        return group | dict(net)
    if isinstance(net, nn.Module):
        kind = type(net)
        return group | {"module": f"{kind.__module__}:{kind.__qualname__}"}
    if net is None:
        return group
    preset = net.removeprefix(UNET_PREFIX)
    if net != preset and preset in PRESETS:
        return group | {"preset": preset}
    if ":" in net:
        return group | {"module": net}
    raise TilenetError(
        f"a network is a torch.nn.Module, package:function, or one of {UNET_PREFIX}"
        f"{f', {UNET_PREFIX}'.join(PRESETS)} (net: {net}); name one of these, or leave it "
        "out and give network={...}"
    )


def first_bands(net: nn.Module) -> int:
    """Number of bands that a module's first convolution takes.

    Raises:
        TilenetError: The module has no convolution.
    """
    for part in net.modules():
        if isinstance(part, nn.Conv2d):
            return part.in_channels
    raise TilenetError(
        f"a network's first convolution says how many bands it takes ({type(net).__name__} has "
        "none); give bands"
    )
