"""The network of a run on all ranks: a user module is imported and made by rank 0 alone.

Each rank's own module could have other weights: drawn from entropy, or from a file that changed.
"""

import json
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from torch import Tensor

from tilenet.adoption.adopt import Adopted
from tilenet.geometry.layer_json import layer_from_json, layer_to_json
from tilenet.parallel.health.signals import StopRequests
from tilenet.parallel.health.watchdog import NEVER, SLOW, Watchdog
from tilenet.parallel.ranks.comm import agreed
from tilenet.parallel.ranks.share import share_tensors
from tilenet.parallel.ranks.together import together
from tilenet.training.architecture import Architecture
from tilenet.training.config.keys import NetworkKeys

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["share_architecture"]


def share_architecture(
    keys: NetworkKeys,
    bands: int,
    classes: int,
    seed: int,
    comm: "MPI.Comm",
    watchdog: Watchdog = NEVER,
    stop: StopRequests | None = None,
) -> Architecture:
    """The network that a run file names, the same on all ranks; rank 0 has the module. Collective.

    Raises:
        AgreedError: It cannot be made, or is for other bands or classes.
        StopAgreed: A rank was asked to stop.
    """
    if keys.module is None:
        with agreed(comm):
            return Architecture.of(keys, bands, classes, seed)
    watchdog.arm("the adoption of the module", SLOW)
    text, state, module = "", {}, None
    with together(comm, stop):  # ranks that wait leave the cores to rank 0
        if comm.rank == 0:
            made = Architecture.of(keys, bands, classes, seed)
            assert made.adopted is not None
            text, state = _to_json(made.adopted, made.note), made.adopted.state
            module = made.module
    text = comm.bcast(text)
    return replace(_from_json(text, share_tensors(state, comm)), module=module)


def _to_json(adopted: Adopted, note: str) -> str:
    """All of an adopted network but its tensors."""
    values = {part.name: getattr(adopted, part.name) for part in fields(adopted)}
    del values["state"]
    values["layers"] = [layer_to_json(layer) for layer in adopted.layers]
    return json.dumps({"adopted": values, "note": note}, default=sorted)  # sets have no order


def _from_json(text: str, state: dict[str, Tensor]) -> Architecture:
    entry = json.loads(text)
    values = entry["adopted"]
    values["layers"] = tuple(layer_from_json(layer) for layer in values["layers"])
    values["fixed"] = frozenset(values["fixed"])
    adopted = Adopted(**values, state=state)
    return Architecture(adopted.layers, adopted=adopted, note=entry["note"])
