"""`tilenet info`: say what images and their labels are, before anything is trained on them."""

import json
import sys
from math import isfinite
from typing import Any

from tilenet.commands.command_line import Arguments
from tilenet.commands.info_text import block_of
from tilenet.commands.label_arguments import add_labels, vectors_of
from tilenet.commands.raster_arguments import band_names, nodata_value
from tilenet.errors import UsageError
from tilenet.info import Asked, describe
from tilenet.parallel.mesh import launched, run_as_rank, world

__all__ = ["main"]


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    return run_as_rank(lambda: _info(arguments))


def _info(arguments: list[str]) -> int:
    # A header is read on login nodes too, where MPI may not start. Who exits after its help while
    # MPI runs would end the job.
    alone = {"-h", "--help"} & set(arguments) or not (launched() or "--pixels" in arguments)
    comm = None if alone else world()
    first = comm is None or comm.rank == 0
    try:
        given = _parser().parse_args(arguments)
        labels = given.labels or [None] * len(given.images)
        if len(labels) != len(given.images):
            raise UsageError(
                f"each image needs one label file (images: {len(given.images)}, --labels: "
                f"{len(labels)}); list them in the same order"
            )
        asked = Asked(
            bands=given.bands,
            nodata=given.nodata,
            resolution=given.resolution,
            ignore_index=given.ignore_index,
            vectors=vectors_of(given),
            pixels=given.pixels,
        )
    except UsageError as error:
        if first:
            print(f"tilenet info: {error}", file=sys.stderr)
        return 2
    everything = []
    for path, labels_path in zip(given.images, labels, strict=True):
        found = describe(path, labels_path, asked, comm)
        everything.append(found)
        if first and not given.json:
            if len(found) > 2:  # more than its path and why it was refused
                print(block_of(found), end="\n\n", flush=True)
            if "refused" in found:
                print(f"tilenet: {found['refused']}", file=sys.stderr, flush=True)
    if first and given.json:
        print(json.dumps({"images": _plain(everything)}))
    return int(any("refused" in found for found in everything))


def _plain(value: Any) -> Any:
    """Without numbers that JSON does not know."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return str(value) if isinstance(value, float) and not isfinite(value) else value


def _parser() -> Arguments:
    parser = Arguments(
        prog="tilenet info",
        allow_abbrev=False,  # whether MPI is started is seen before
        description="Say what images and their labels are: grid, bands, nodata, how labels lie; "
        "with --pixels also statistics and classes, over all MPI ranks.",
    )
    parser.add_argument(
        "images",
        nargs="+",
        metavar="IMAGE",
        help="raster; files on one grid are stacked where plus signs join them: R.tif+G.tif+B.tif",
    )
    parser.add_argument(
        "--labels",
        nargs="+",
        metavar="LABELS",
        help="label raster or file of polygons of each image, in the same order",
    )
    parser.add_argument(
        "--bands",
        type=band_names,
        metavar="BAND,…",
        help="names or numbers of the bands to read (all but alpha)",
    )
    parser.add_argument(
        "--nodata",
        type=nodata_value,
        help="value without data, none, or collar (default: what the file says)",
    )
    parser.add_argument(
        "--resolution", type=float, help="pixel size to read at (default: the file's)"
    )
    add_labels(parser)
    parser.add_argument(
        "--pixels", action="store_true", help="read all pixels: statistics, classes, weights"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser
