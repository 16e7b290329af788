"""Turn the argument `net` of the library's functions into keys of the run file."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from tilenet.errors import TilenetError
from tilenet.geometry.unet import PRESETS

UNET_PREFIX = "unet-"


def network_keys(
    net: nn.Module | str | Mapping[str, Any] | None, keys: Mapping[str, Any]
) -> dict[str, Any]:
    """The run file's group `network` for the network that a program passes.

    Args:
        net: A module; `package:function` that builds one; the name of a U-Net; keys of the group;
            or None: the group of `keys`.
        keys: Keys of a run; those of its group `network` stay where `net` does not set them.

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
    names = ", ".join(f"{UNET_PREFIX}{name}" for name in PRESETS)
    raise TilenetError(
        f"a network is a torch.nn.Module, package:function, or one of {names} (net: {net}); name "
        "one of these, or leave it out and pass network={...}"
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
        "the number of bands is that of a network's first convolution "
        f"({type(net).__name__} has none); pass bands=N"
    )
