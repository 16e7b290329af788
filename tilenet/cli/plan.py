"""`tilenet plan`: from image, network and machine to tiles, ranks, partitions and micro-batches."""

import json
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from tilenet.cli.options.arguments import Arguments, command
from tilenet.cli.options.data import numbers
from tilenet.cli.options.network import add_network, add_own_network, check_own_network, network_of
from tilenet.cli.options.tiles import add_tiles, image_of
from tilenet.cli.own_network import adopt_named
from tilenet.cli.plan_plot import plot_plan
from tilenet.errors import UsageError
from tilenet.geometry.halo import epsilon_px
from tilenet.geometry.unet import UNetOptions
from tilenet.planning.explain import GIB, answer, explain
from tilenet.planning.machines.read import known_machines, machine
from tilenet.planning.memory.states import OPTIMIZER_STATES
from tilenet.planning.plan import MODES, OwnNetwork, Question, write_plan
from tilenet.planning.replan import replan
from tilenet.planning.time.profile import Profile, read_profile
from tilenet.planning.time.roofline import ITEM_BYTES


@command("plan")
def main(arguments: list[str]) -> None:
    """Run the command."""
    options = _parser().parse_args(arguments)
    question = _question(options, arguments)
    plans = answer(question, alone=options.json)
    for path in options.plot or []:
        plot_plan(plans[0], Path(path))
    if options.out:
        write_plan(plans[0], Path(options.out))
    print(json.dumps(plans[0].to_json()) if options.json else explain(plans))


def _question(options: Namespace, arguments: Sequence[str]) -> Question:
    if options.replan is not None:
        _check_alone(arguments)
        again = replan(Path(options.replan), options.nodes)
        return replace(again, profile=_profile(options))
    own = check_own_network(options)
    image, tiles = image_of(options)
    if image is None:
        raise UsageError("a plan needs --image")
    network, epsilon = _own(options) if own else _unet(options)
    facts = machine(options.machine)
    if options.devices_per_node is not None:
        count = _positive("--devices-per-node", options.devices_per_node)
        facts = replace(facts, devices_per_node=count)
    if options.device_gib is not None:
        memory = int(_positive("--device-gib", options.device_gib) * GIB)
        facts = replace(facts, memory_bytes=memory)
    names = {part.name for part in fields(Question)}
    same = {name: value for name, value in vars(options).items() if name in names}
    same |= {"options": network, "epsilon_px": epsilon, "image": image, "machine": facts}
    same |= {"grid": tiles.grid, "tile_px": tiles.size_px}
    same["profile"] = _profile(options)
    return Question(**same)


def _profile(options: Namespace) -> Profile | None:
    return read_profile(Path(options.profile)) if options.profile else None


def _unet(options: Namespace) -> tuple[UNetOptions, int]:
    """A U-Net of ours, and the paper's halo for it."""
    unet, levels = network_of(options)
    return unet, epsilon_px(levels, unet.convolutions, unet.kernel)


def _own(options: Namespace) -> tuple[OwnNetwork, int]:
    """A user module, for which the paper has no halo."""
    _, adopted = adopt_named(options)
    return OwnNetwork(adopted.name, adopted.layers, adopted.together), 0


def _check_alone(arguments: Sequence[str]) -> None:
    """Refuse options that the plan that is made again already holds."""
    more = "--replan", "--nodes", "--profile", "--out", "--json"
    for word in arguments:
        name = word.partition("=")[0]
        if name.startswith("--") and name not in more:
            raise UsageError(
                f"with --replan only --nodes, --profile, -o and --json may be given, not {name}"
            )


def _positive(name: str, value: float) -> Any:
    if not 0 < value < 2**40:
        raise UsageError(f"{name} must be above 0 ({name}: {value})")
    return value


def _parser() -> Arguments:
    parser = Arguments(
        prog="tilenet plan",
        description="Choose tiles, ranks, partitions and micro-batches; predict bytes and seconds.",
    )
    add_network(parser)
    add_own_network(parser)
    add_tiles(parser)
    where = parser.add_argument_group("machine")
    where.add_argument("--machine", default="local", metavar="|".join(known_machines()))
    where.add_argument("--nodes", type=int, default=1, metavar="N")
    where.add_argument("--devices-per-node", type=int, metavar="N")
    where.add_argument("--device-gib", type=float, metavar="GIB", help="memory of one device")
    where.add_argument(
        "--reserve", type=float, default=0.1, help="share of it kept free (%(default)s)"
    )
    where.add_argument("--profile", metavar="FILE", help="layer times from tilenet profile")
    run = parser.add_argument_group("run")
    run.add_argument(
        "--images", dest="num_images", type=int, default=1, metavar="N", help="of an epoch"
    )
    run.add_argument("--batch-size", type=int, default=1, metavar="N", help="images of a step")
    run.add_argument("--precision", choices=list(ITEM_BYTES), default="float32")
    run.add_argument("--optimizer", choices=list(OPTIMIZER_STATES), default="adamw")
    run.add_argument(
        "--halo-mode",
        choices=["auto", *MODES],
        default="auto",
        help="tiles that read halos, ranks that exchange them, strips; auto: the fastest that fits",
    )
    run.add_argument("--partitions", type=int, metavar="N", help="devices per rank")
    run.add_argument(
        "--balance", type=numbers(int, "L,L,…"), metavar="L,L,…", help="layers per partition"
    )
    run.add_argument("--micro-batches", type=int, metavar="N", help="tiles at once, in all")
    run.add_argument("--checkpointing", choices=["always", "except_last", "never"])
    run.add_argument("--pipeline", choices=["gpipe", "1f1b"], default="gpipe", help="schedule")
    run.add_argument(
        "--swap",
        choices=["off", "auto", "all"],
        default="off",
        help="tensors that wait on the host: none, what must, what can",
    )
    parser.add_argument(
        "--replan",
        metavar="PLAN",
        help="that plan for another number of --nodes: the same tiles, other ranks",
    )
    parser.add_argument(
        "--plot",
        action="append",
        metavar="FILE",
        help="draw the timeline, or, where the name contains memory, the levels' bytes",
    )
    parser.add_argument("-o", "--out", metavar="plan.json", help="for train and predict")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser
