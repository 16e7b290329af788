"""`tilenet.halo`: how far a network looks around a pixel."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from tilenet.adoption.adopt import Adopted, adopt
from tilenet.geometry.halo import Context, context_of
from tilenet.library.network import first_bands, network_keys
from tilenet.library.run import Run
from tilenet.storage.checkpoints import find_checkpoint, load_json
from tilenet.storage.network_json import NetworkRecord
from tilenet.training.config.keys import NetworkKeys
from tilenet.training.setup.architecture import Architecture


def halo(
    net: nn.Module | Adopted | Run | str | os.PathLike[str] | Mapping[str, Any],
    bands: int | None = None,
) -> Context:
    """The halo with which tiles of a network are exact. Not collective.

        tilenet.halo(net).px

    Args:
        net: A module; the result of `tilenet.adopt`; the name of a U-Net such as `unet-small`, or
            keys of the run file's group `network`; a run, or the folder of a run or a checkpoint.
        bands: Number of bands of the module's images; None: as many as its first convolution takes.

    Returns:
        `px`, the halo; `alignment_px`, which divides the sizes of tiles; and more, all in pixels.

    Raises:
        TilenetError: The network cannot be cut into tiles exactly; the error names the submodule.
    """
    if isinstance(net, Adopted):
        return net.context
    if isinstance(net, nn.Module):
        return adopt(net, first_bands(net) if bands is None else bands).context
    if isinstance(net, Mapping) or (isinstance(net, str) and not os.path.exists(net)):
        keys = NetworkKeys(**network_keys(net, {}))
        return context_of(Architecture.of(keys, bands or 4, 2, 0).layers)
    folder = find_checkpoint(Path(os.fspath(net)))
    return NetworkRecord.from_json(load_json(folder / "network.json")).context()
