"""`tilenet check`: whether somebody's network can be cut into tiles, and what its halo is.

With `--save` it becomes a checkpoint, of which maps are made.
"""

import json
import os
import sys
from argparse import Namespace
from math import isfinite
from pathlib import Path
from typing import Any

from torch import nn

from tilenet.adoption.adopt import Adopted
from tilenet.cli.options import Arguments, add_making
from tilenet.cli.own_network import WHOLE_IMAGE, adopt_named, facts_of
from tilenet.errors import TilenetError, UsageError
from tilenet.parallel.ranks.comm import world
from tilenet.storage.checkpoints import save_checkpoint
from tilenet.storage.network_json import NetworkRecord, check_class_names
from tilenet.training.proof.alone import TilesProof, prove_over_tiles

__all__ = ["main"]

IGNORED = 255  # the value of nodata in maps


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    try:
        given = _parser().parse_args(arguments)
        module, adopted = adopt_named(given)
        proofs = _proofs(module, adopted, given.batch_norm or "frozen") if given.prove else []
        if given.save is not None:
            _save(adopted, given)
    except UsageError as error:
        print(f"tilenet check: {error}", file=sys.stderr)
        return 2
    except TilenetError as error:
        print(f"tilenet: {error}", file=sys.stderr)
        return 1
    facts = facts_of(adopted)
    if given.json:
        over = {one.tiles: {each.what: each.apart for each in one.differences} for one in proofs}
        print(json.dumps(facts | {"over": over}))
    else:
        print("\n".join([_table(facts), *map(_line, proofs)]))
    return 0


def _proofs(module: nn.Module, adopted: Adopted, batch_norm: str) -> list[TilesProof]:
    """How far tiles are from the whole image, in this process."""
    world()  # starts MPI, without which the code over tiles does not run
    from mpi4py import MPI

    return prove_over_tiles(module, adopted, batch_norm, MPI.COMM_SELF)


def _line(proof: TilesProof) -> str:
    found = ", ".join(f"{one.what} {one.apart:.0e}" for one in proof.differences)
    said = "; ".join(filter(None, [found, proof.note]))
    return f"over {proof.tiles:<17} {'exact' if found else 'not compared'}: {said}"


def _save(adopted: Adopted, given: Namespace) -> None:
    """Write a checkpoint of the network, as of a run that made no step.

    Raises:
        TilenetError: The folder holds a run, or cannot be written; names or statistics are other
            than the network's channels.
    """
    folder, count, bands = Path(given.save), adopted.classes, adopted.bands
    classes = tuple(given.classes or map(str, range(count)))
    mean, std = given.mean or [0.0] * bands, given.std or [1.0] * bands
    if (len(classes), len(mean), len(std)) != (count, bands, bands):
        raise TilenetError(
            f"a network has a name for each class, a mean and a std for each band (classes: "
            f"{len(classes)} of {count}, mean: {len(mean)}, std: {len(std)}, bands: {bands}); give "
            "as many"
        )
    check_class_names(classes, "--classes")
    if not all(map(isfinite, (*mean, *std))) or min(std) <= 0:
        raise TilenetError(
            f"pixels less their mean are divided by the std, which is above 0 (mean: {mean}, std: "
            f"{std}); give what the weights were trained with"
        )
    if os.path.lexists(folder / "last"):
        raise TilenetError(f"a run is not overwritten ({folder} holds one); name another folder")
    record = NetworkRecord(
        adopted.layers,
        tuple(range(1, bands + 1)),
        classes,
        IGNORED,
        tuple(mean),
        tuple(std),
        resolution=None,
        nodata=None,
        precision="float32",
        epsilon_px=0,
        names=adopted.names,
    )
    weights = adopted.module_state(adopted.network().state_dict())
    save_checkpoint(folder, 0, weights, record.to_json(), {}, {"step": 0})


MEANINGS = {
    "bands": "channels of the image",
    "classes": "channels of the map",
    "num_layers": "single layers",
    "num_parameters": "trained values",
    "alignment_px": "tile origins and sizes are multiples of it",
    "context_aligned_px": "what an aligned tile needs to be exact",
    "context_any_pixel_px": "what the worst single pixel looks at",
    "halo_px": "halo that makes tiles exact",
}


def _table(facts: dict[str, Any]) -> str:
    lines = [f"{facts['network']} is the same network as its list of layers."]
    lines += [f"{name:<22} {facts[name]:>14,}  {says}" for name, says in MEANINGS.items()]
    kinds = ", ".join(f"{number} {kind}" for kind, number in facts["kinds"].items())
    lines.append(f"layers: {kinds}")
    if facts["looks_at_whole_image"]:
        lines.append(WHOLE_IMAGE)
    return "\n".join(lines)


def _parser() -> Arguments:
    parser = Arguments(
        prog="tilenet check",
        description="Say whether a network can be cut into tiles, and how wide a halo these need.",
    )
    parser.add_argument("network", metavar="PACKAGE:NAME", help="a function or class that makes it")
    parser.add_argument("--bands", type=int, help="channels of the image (default: 3)")
    add_making(parser)
    parser.add_argument(
        "--save", metavar="FOLDER", help="write a checkpoint, for predict, evaluate and init"
    )
    parser.add_argument("--classes", nargs="+", metavar="NAME", help="names of the classes")
    for name, what in (("mean", "less"), ("std", "divided by")):
        parser.add_argument(
            f"--{name}", nargs="+", type=float, help=f"{what} which the network gets pixels"
        )
    parser.add_argument(
        "--no-prove",
        dest="prove",
        action="store_false",
        help="do not compare tiles of a small random image with the whole one",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser
