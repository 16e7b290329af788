"""`tilenet check`: say whether a user module can be cut into tiles, and the halo that it needs.

With `--save` it also writes the module as a checkpoint, which `predict` makes maps with.
"""

import json
from dataclasses import asdict
from itertools import starmap
from pathlib import Path
from typing import Any

from torch import nn

from tilenet.adoption.adopt import Adopted
from tilenet.choices import HaloMode
from tilenet.cli.halo import MEANINGS
from tilenet.cli.options.arguments import Arguments, command
from tilenet.cli.options.network import add_making
from tilenet.cli.options.tiles import pair
from tilenet.cli.own_network import WHOLE_IMAGE, adopt_named, facts_of
from tilenet.cli.rank_memory import memory_line, rank_memory
from tilenet.errors import UsageError
from tilenet.library.untrained import save_untrained
from tilenet.parallel.ranks.comm import world
from tilenet.training.proof.alone import TilesProof, prove_over_tiles

MODES: tuple[HaloMode, ...] = ("overlap", "exchange")
IMAGE = 10_000, 10_000  # rows and columns, without --image


@command("check")
def main(arguments: list[str]) -> None:
    """Run the command."""
    options = _parser().parse_args(arguments)
    if options.ranks is None and (options.halo_mode or options.image):
        raise UsageError("memory is that of a rank (--halo-mode, --image); give --ranks")
    module, adopted = adopt_named(options)
    proofs = _proofs(module, adopted, options.batch_norm or "frozen") if options.prove else []
    if options.save is not None:
        statistics = options.mean, options.std
        save_untrained(adopted, Path(options.save), options.classes, statistics)
    memory = {}
    if options.ranks is not None:
        if options.ranks < 1:
            raise UsageError(f"there is at least one rank (--ranks: {options.ranks})")
        size = options.image or IMAGE
        for mode in MODES if options.halo_mode is None else [options.halo_mode]:
            memory[mode] = rank_memory(adopted.layers, size, options.ranks, mode)
    facts = facts_of(adopted)
    if options.json:
        facts["over"] = {p.tiles: {d.what: d.apart for d in p.differences} for p in proofs}
        if memory:
            facts["memory"] = {
                m: asdict(part) | {"total": part.total} for m, part in memory.items()
            }
        print(json.dumps(facts))
    else:
        print(_table(facts), *map(_line, proofs), *starmap(memory_line, memory.items()), sep="\n")


def _proofs(module: nn.Module, adopted: Adopted, batch_norm: str) -> list[TilesProof]:
    """Compare tiles with the whole image, in this process alone."""
    world()  # starts MPI, without which the code over tiles does not run
    from mpi4py import MPI

    return prove_over_tiles(module, adopted, batch_norm, MPI.COMM_SELF)


def _line(proof: TilesProof) -> str:
    differences = ", ".join(f"{d.what} {d.apart:.0e}" for d in proof.differences)
    details = "; ".join(filter(None, [differences, proof.note]))
    return f"over {proof.tiles:<17} {'exact' if differences else 'not compared'}: {details}"


SHOWN: tuple[str, ...] = ("bands", "classes", "num_layers", "num_parameters", "alignment_px")
SHOWN += ("context_aligned_px", "context_any_pixel_px", "halo_px")


def _table(facts: dict[str, Any]) -> str:
    lines = [f"{facts['network']} is the same network as its list of layers."]
    lines += [f"{name:<22} {facts[name]:>14,}  {MEANINGS[name]}" for name in SHOWN]
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
    parser.add_argument(
        "--mean", nargs="+", type=float, help="value that is subtracted from a band's pixels"
    )
    parser.add_argument("--std", nargs="+", type=float, help="value that then divides them")
    parser.add_argument(
        "--no-prove",
        dest="prove",
        action="store_false",
        help="do not compare tiles of a small random image with the whole one",
    )
    parser.add_argument("--ranks", type=int, metavar="N", help="say the memory of each of N ranks")
    parser.add_argument(
        "--halo-mode", choices=MODES, help="with --ranks: how halos are read (default: both)"
    )
    parser.add_argument(
        "--image",
        type=pair,
        metavar="N|ROWSxCOLUMNS",
        help="with --ranks: size of the image that they share (10000x10000)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser
