"""`tilenet predict`: make a map of a raster with a trained network."""

import json
import sys
from pathlib import Path
from typing import Any, get_args

from torch import nn

from tilenet.choices import Device
from tilenet.cli.options.arguments import Arguments
from tilenet.cli.options.data import WINDOW, band_names, nodata_value, numbers, with_values
from tilenet.cli.own_network import add_code, module_named
from tilenet.errors import TilenetError, UsageError
from tilenet.library.predict import given_network
from tilenet.mapping.predict import predict
from tilenet.mapping.prediction import Prediction
from tilenet.parallel.ranks.abort import run_as_rank
from tilenet.parallel.ranks.comm import agreed, world
from tilenet.parallel.ranks.together import together
from tilenet.planning.machines.values import PRECISIONS
from tilenet.planning.plan import read_plan

BBOX = "XMIN,YMIN,XMAX,YMAX"


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    return run_as_rank(lambda: _predict(arguments))


def _predict(arguments: list[str]) -> int:
    first = {"-h", "--help"} & set(arguments) or world().rank == 0
    try:
        values = vars(_parser().parse_args(with_values(arguments)))
    except UsageError as error:
        if first:
            print(f"tilenet predict: {error}", file=sys.stderr)
        return 2
    wants_json, plan = values.pop("json"), values.pop("plan")
    names = ("code", "options", "weights", "window_px")
    values |= _network(values, *(values.pop(name) for name in names))
    if plan is not None:
        with agreed(world()):
            keys = read_plan(Path(plan)).keys
        values |= {"partitions": keys["partitions"], "balance": tuple(keys["balance"])}
    done = predict(Prediction(**values))
    if done["stopped"]:
        if world().rank == 0:
            print("tilenet: stopped before the map was done: run again to go on", file=sys.stderr)
        return 75
    if wants_json and world().rank == 0:
        print(json.dumps(done))
    return 0


def _network(
    values: dict[str, Any],
    code: str | None,
    options: list[str] | None,
    weights: str | None,
    window_px: int | None,
) -> dict[str, Any]:
    """The network, where it is not a checkpoint alone: `network` or `module` of a prediction.

    Collective where code is named.
    """
    network, comm = values["network"], world()
    is_module = ":" in network and not Path(network).exists()
    with agreed(comm):
        clashing = [code] if is_module else [weights, window_px, options if code is None else None]
        if any(value is not None for value in clashing):
            raise TilenetError(
                f"a module is named alone, with --options, --weights and --window-px, or that of a "
                f"checkpoint by --network and --options (network: {network}, --network: {code}); "
                "leave the others out"
            )
    if not is_module and code is None:
        return {}
    module: nn.Module | None = None
    with together(comm):  # ranks that wait leave the cores to rank 0
        if comm.rank == 0 or window_px is not None or not is_module:
            module = module_named(network if is_module else str(code), options, weights)
    if not is_module:
        return {"module": module}
    image, bands = values["image"], values["bands"]
    return {"network": given_network(module, image, None, (None, None), bands, window_px, comm)}


def _parser() -> Arguments:
    parser = Arguments(
        prog="tilenet predict",
        description="Make a georeferenced map of a raster, over all MPI ranks.",
    )
    parser.add_argument(
        "network",
        metavar="checkpoint",
        help="folder of a training run, or of one checkpoint; or package:name of a function or a "
        "class that makes a module",
    )
    parser.add_argument(
        "image",
        help="raster with the bands that the network reads; files that plus signs join are "
        "stacked on the grid of the first: R.tif+G.tif+B.tif",
    )
    parser.add_argument("out", help="map to write: a cloud-optimised GeoTIFF")
    parser.add_argument(
        "--output",
        choices=["classes", "logits", "probabilities", "values"],
        help="what the map holds (default: classes; of a regression values)",
    )
    parser.add_argument(
        "--scaled",
        action="store_true",
        help="probabilities as bytes: 0 to 250, which GDAL and QGIS show as 0 to 1; 255: no data",
    )
    parser.add_argument(
        "--tta",
        choices=["flips", "all"],
        help="test-time augmentation: the mean over the image flipped (4), or turned too (8), of "
        "probabilities or numbers",
    )
    part = parser.add_mutually_exclusive_group()
    part.add_argument(
        "--bbox",
        type=numbers(float, BBOX),
        metavar=BBOX,
        help="map the pixels under this box in the image's CRS, as they are in the whole map",
    )
    part.add_argument(
        "--window",
        type=numbers(int, WINDOW),
        metavar=WINDOW,
        help="map these pixels, counted from 0",
    )
    _add_module(parser)
    _add_ways(parser)
    _add_whole_job(parser)
    return parser


def _add_whole_job(parser: Arguments) -> None:
    """Add the options on how the job begins, ends and reports."""
    parser.add_argument(
        "--hang-seconds",
        type=float,
        default=1800.0,
        metavar="S",
        help="end the job, with each rank's stacks, when a round of tiles takes longer; 0: never",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with what an interrupted map left, and leave what is done when interrupted; "
        "SIGTERM and SIGUSR1 then end it with exit code 75",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing map")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object: passes, tiles, peak bytes of each rank",
    )


def _add_module(parser: Arguments) -> None:
    """A module that is named in place of a checkpoint, or for one of windows."""
    own = add_code(parser)
    own.add_argument(
        "--weights", metavar="FILE", help="weights of a module that is mapped without a checkpoint"
    )
    own.add_argument(
        "--window-px",
        type=int,
        metavar="PX",
        help="map windows of this side that overlap, blended, by a module that cannot be cut into "
        "tiles exactly: approximate",
    )


def _add_ways(parser: Arguments) -> None:
    """Add the options on how the image is read and computed."""
    parser.add_argument(
        "--tile",
        dest="tile_px",
        type=int,
        metavar="PX",
        help="largest own size of a tile (default: as much as memory allows); with norms over the "
        "whole image it means one pass over the tiles per norm",
    )
    parser.add_argument(
        "--halo",
        type=lambda text: int(text) if text.isdigit() else text,
        default="exact",
        metavar="exact|epsilon|PX",
        help="pixels read around own windows (default: %(default)s)",
    )
    parser.add_argument(
        "--precision",
        choices=list(PRECISIONS),
        help="default: that of the training run",
    )
    parser.add_argument("--device", choices=list(get_args(Device)), default="auto")
    parser.add_argument(
        "--partitions", type=int, default=1, metavar="N", help="devices per rank (%(default)s)"
    )
    parser.add_argument(
        "--plan", metavar="plan.json", help="take partitions and balance from tilenet plan"
    )
    parser.add_argument(
        "--nodata",
        type=nodata_value,
        help="value without data, none, or collar (default: as in training)",
    )
    parser.add_argument(
        "--bands",
        type=band_names,
        metavar="BAND,…",
        help="names or numbers of the bands that the network reads (default: as in training)",
    )
    parser.add_argument(
        "--no-prove",
        dest="prove",
        action="store_false",
        help="do not compare a small image over these ranks and tiles with the whole one first, "
        "which is done for networks that are modules",
    )
