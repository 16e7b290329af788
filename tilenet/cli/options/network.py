"""Options that describe a network: a U-Net, or a user module."""

import argparse
from dataclasses import replace

from tilenet.errors import UsageError
from tilenet.geometry.unet import PAPER_LEVELS, PRESETS, UNetOptions

OF_MODULES = ("options", "batch_norm", "weights")
OF_LAYERS = (
    *("kernel", "padding", "upsampling", "norm", "norm_scope", "groups", "dropout", "bias"),
    *("base", "classes"),
)
OF_UNETS = ("preset", "levels", "poolings", "convs", *OF_LAYERS)


def add_network(parser: argparse.ArgumentParser) -> None:
    """Add the options that `network_of` reads."""
    network = parser.add_argument_group("network")
    network.add_argument("--preset", choices=list(PRESETS), help="one of the paper's models")
    network.add_argument(
        "--levels", type=int, metavar="L", help="as the paper counts: poolings + 1"
    )
    network.add_argument("--poolings", type=int, metavar="P")
    network.add_argument("--convs", type=int, metavar="N", help="convolutions per level (2)")
    network.add_argument("--kernel", type=int, metavar="K", help="width of the convolutions (3)")
    network.add_argument("--padding", choices=["same", "valid"])
    network.add_argument("--upsampling", choices=["nearest", "bilinear", "transposed"])
    network.add_argument("--norm", choices=["none", "instance", "group", "batch"])
    network.add_argument("--norm-scope", choices=["image", "tile"])
    network.add_argument("--groups", type=int, help="groups of a group norm (8)")
    network.add_argument("--dropout", type=float, help="probability of dropping a channel (0)")
    network.add_argument("--bias", action=argparse.BooleanOptionalAction, default=None)
    network.add_argument("--base", type=int, help="channels of the first level (64)")
    network.add_argument("--bands", type=int, help="input channels (4; with --network 3)")
    network.add_argument("--classes", type=int, help="output channels (1)")


def add_own_network(parser: argparse.ArgumentParser) -> None:
    """Add the options that name a user module in place of a U-Net; see `check_own_network`."""
    own = parser.add_argument_group("your own network")
    own.add_argument("--network", metavar="PACKAGE:NAME", help="a function or class that makes it")
    add_making(own)


def add_making(parser: argparse._ActionsContainer) -> None:
    """Add the options that say how a module is made and adopted."""
    parser.add_argument("--options", nargs="*", metavar="NAME=VALUE", help="arguments of the call")
    parser.add_argument(
        "--batch-norm",
        choices=("frozen", "step"),
        help="keep running statistics, or take those of a step's images (default: frozen)",
    )
    parser.add_argument(
        "--weights", metavar="FILE", help="its weights or a part's (.safetensors, .pth, .ckpt)"
    )


def check_own_network(options: argparse.Namespace) -> bool:
    """Whether a user module is named.

    Raises:
        UsageError: Options of U-Nets are given with it, or its options without it.
    """
    own = options.network is not None
    for name in OF_UNETS if own else OF_MODULES:
        if getattr(options, name) is not None:
            option = f"--{name.replace('_', '-')}"
            if own:
                raise UsageError(f"{option} describes a U-Net; leave it out, or --network")
            raise UsageError(f"{option} goes with --network; name the module, or leave it out")
    return own


def network_of(options: argparse.Namespace) -> tuple[UNetOptions, int]:
    """The network, and its number of levels as the paper counts them.

    Raises:
        UsageError: Options contradict each other.
        TilenetError: A rule of networks is broken.
    """
    ways = [options.preset, options.levels, options.poolings]
    if sum(way is not None for way in ways) != 1:
        own = ", or by --network" if hasattr(options, "network") else ""
        raise UsageError(f"a network is given by one of --preset, --levels or --poolings{own}")
    if options.preset:
        start, levels = PRESETS[options.preset], PAPER_LEVELS[options.preset]
        if options.convs is not None:
            raise UsageError("--convs belongs to --levels and --poolings; a preset has its own")
    else:
        levels = options.levels if options.levels is not None else options.poolings + 1
        start = replace(
            UNetOptions(),
            poolings=levels - 1,
            convolutions=2 if options.convs is None else options.convs,
        )
    names = *OF_LAYERS, "bands"
    values = {name: value for name in names if (value := getattr(options, name)) is not None}
    return replace(start, **values), levels
