"""The network of a run on all ranks: a user module is imported and made by rank 0 alone.

Each rank's own module could have other weights: drawn from entropy, or from a file that changed.
"""

import json
from dataclasses import fields

from torch import nn

from tilenet.adoption.adopt import Adopted
from tilenet.mpi import Comm
from tilenet.parallel.health.watchdog import SLOW
from tilenet.parallel.ranks.comm import agreed
from tilenet.parallel.ranks.share import share_tensors
from tilenet.parallel.ranks.together import RankControl, together
from tilenet.storage.layer_json import layer_from_json, layer_to_json
from tilenet.training.config.keys import NetworkKeys
from tilenet.training.setup.architecture import Architecture


def share_architecture(
    keys: NetworkKeys,
    bands: int,
    classes: int,
    seed: int,
    control: RankControl,
    module: nn.Module | None = None,
    window_px: int | None = None,
) -> Architecture:
    """The network that a run file names, the same on all ranks; rank 0 has the module. Collective.

    Args:
        module: The module, if a program made it; rank 0's is used.
        window_px: See `Architecture.of`; if set, all ranks have the module, with rank 0's weights.

    Raises:
        AgreedError: The network cannot be made, or is for other bands or classes.
        StopAgreed: A rank was asked to stop.
    """
    comm = control.comm
    if keys.module is None:
        with agreed(comm):
            return Architecture.of(keys, bands, classes, seed)
    control.watchdog.arm("the adoption of the module", SLOW)
    own: Architecture | None = None
    with together(comm, control.stop):  # ranks that wait leave the cores to rank 0
        if comm.rank == 0 or window_px is not None:
            own = Architecture.of(keys, bands, classes, seed, module, window_px)
    adopted = share_adopted(own.adopted if own is not None and comm.rank == 0 else None, comm)
    note = comm.bcast("" if own is None else own.note)
    module = None if own is None else own.module
    return Architecture(adopted.layers, adopted=adopted, note=note, module=module)


def share_adopted(adopted: Adopted | None, comm: Comm) -> Adopted:
    """Rank 0's adopted network, on all ranks. Collective."""
    text = comm.bcast("" if adopted is None else _to_json(adopted))
    values = json.loads(text)
    values["layers"] = tuple(layer_from_json(layer) for layer in values["layers"])
    values["fixed"] = frozenset(values["fixed"])
    return Adopted(**values, state=share_tensors({} if adopted is None else adopted.state, comm))


def _to_json(adopted: Adopted) -> str:
    """All of an adopted network but its tensors."""
    values = {part.name: getattr(adopted, part.name) for part in fields(adopted)}
    del values["state"]
    values["layers"] = [layer_to_json(layer) for layer in adopted.layers]
    return json.dumps(values, default=sorted)  # sets have no order
