"""`tilenet profile`: measure a network's layers on the device at hand, for `tilenet plan`."""

import json
import os
from argparse import Namespace
from pathlib import Path
from typing import get_args

import torch

from tilenet.choices import Device, Precision
from tilenet.cli.options.arguments import Arguments, command
from tilenet.cli.options.network import add_network, add_own_network, check_own_network, network_of
from tilenet.cli.options.tiles import pair
from tilenet.cli.own_network import adopt_named
from tilenet.errors import TilenetError
from tilenet.geometry.halo import context_of
from tilenet.geometry.maps import check_cells
from tilenet.geometry.unet import unet_layers
from tilenet.geometry.windows import Window
from tilenet.model.dtypes import parameter_dtype
from tilenet.model.network import build_network
from tilenet.parallel.ranks.devices import NodePlace, choose_devices
from tilenet.parallel.ranks.tf32 import has_tf32, tf32_if_asked
from tilenet.planning.time.measured import measure_layers
from tilenet.planning.time.profile import Profile, ProfiledLayer
from tilenet.storage.atomic import write_aside


@command("profile")
def main(arguments: list[str]) -> None:
    """Run the command."""
    options = _parser().parse_args(arguments)
    measured = profile(options)
    text = json.dumps(measured.to_json())
    if options.out:
        write_aside(text, Path(options.out), "a profile")
    print(text if options.json else _table(measured))


def profile(options: Namespace) -> Profile:
    """Measure the layers of the network that the arguments name.

    Raises:
        TilenetError: A rule of networks is broken, or the tile does not fit the device.
    """
    dtype = parameter_dtype(options.precision)
    if check_own_network(options):
        _, adopted = adopt_named(options)
        layers, network = adopted.layers, adopted.network(dtype)
    else:
        layers = unet_layers(network_of(options)[0])
        network = build_network(layers, dtype=dtype)
    height, width = options.tile
    context = context_of(layers)
    unit = context.alignment_px
    if not context.valid and (height % unit or width % unit or not height * width):
        raise TilenetError(
            f"a measured tile is a multiple of the network's total stride (tile: {height} × "
            f"{width} px, stride: {unit} px); nearest: {max(unit, round(height / unit) * unit)} × "
            f"{max(unit, round(width / unit) * unit)}"
        )
    check_cells(layers, Window(0, 0, height, width))
    if options.repeats < 1:
        raise TilenetError(f"repeats must be at least 1 (repeats: {options.repeats}); 5 is usual")
    (device,) = choose_devices(options.device, NodePlace(0, 1, len(os.sched_getaffinity(0))))
    if options.precision == "tf32" and not has_tf32(device):
        raise TilenetError(
            f"tf32 is measured where there is TF32, on CUDA devices of compute capability 8 and "
            f"later (device: {device}); measure float32"
        )
    try:
        image = torch.randn(1, layers[0].in_channels, height, width, dtype=dtype, device=device)
        with tf32_if_asked(options.precision):
            seconds = measure_layers(network.train(), image, options.precision, options.repeats)
    except RuntimeError as error:  # torch's OutOfMemoryError is one, an illegal size another
        raise TilenetError(
            f"the tile must run on the device, one layer at a time (tile: {height} × {width} px on "
            f"{device}: {str(error).splitlines()[0]}); measure a smaller tile, or a larger one for "
            "an unpadded network"
        ) from error
    return Profile(
        device=_name(device),
        precision=options.precision,
        height=height,
        width=width,
        layers=tuple(
            ProfiledLayer(layer, times.forward_s, times.backward_s)
            for layer, times in zip(layers, seconds, strict=True)
        ),
    )


def _name(device: torch.device) -> str:
    if device.type == "cpu":
        return f"cpu, {torch.get_num_threads()} of {os.cpu_count()} threads"
    return str(torch.get_device_module(device).get_device_name(device))


def _table(measured: Profile) -> str:
    kinds = sorted({layer.layer.kind for layer in measured.layers})
    total = sum(layer.forward_s + layer.backward_s for layer in measured.layers)
    lines = [
        f"{measured.height} × {measured.width} px, {measured.precision}, {measured.device}: "
        f"{total:.4g} s",
        f"{'kind':<12} {'layers':>6} {'forward':>10} {'backward':>10} {'share':>6}",
    ]
    for kind in kinds:
        layers = [layer for layer in measured.layers if layer.layer.kind == kind]
        forward, backward = sum(x.forward_s for x in layers), sum(x.backward_s for x in layers)
        share = (forward + backward) / total
        lines.append(
            f"{kind:<12} {len(layers):>6} {forward:>8.4g} s {backward:>8.4g} s {share:>6.0%}"
        )
    return "\n".join(lines)


def _parser() -> Arguments:
    parser = Arguments(
        prog="tilenet profile",
        description="Measure how long each layer of a network takes on this machine's device.",
    )
    add_network(parser)
    add_own_network(parser)
    parser.add_argument("--tile", type=pair, default=(512, 512), metavar="N|ROWSxCOLUMNS")
    parser.add_argument("--precision", choices=list(get_args(Precision)), default="float32")
    parser.add_argument("--device", choices=list(get_args(Device)), default="auto")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="runs of each layer")
    parser.add_argument("-o", "--out", metavar="FILE", help="for tilenet plan --profile")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser
