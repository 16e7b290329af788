"""`tilenet polygons`: the polygons of a class map."""

import argparse
import math
import sys

from tilenet.cli.options.arguments import Arguments
from tilenet.errors import UsageError
from tilenet.mapping.polygons.job import PolygonsJob, make_polygons
from tilenet.parallel.health.progress import say
from tilenet.parallel.ranks.abort import run_as_rank
from tilenet.parallel.ranks.comm import world


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    return run_as_rank(lambda: _polygons(arguments))


def _polygons(arguments: list[str]) -> int:
    first = {"-h", "--help"} & set(arguments) or world().rank == 0
    try:
        options = vars(_parser().parse_args(arguments))
    except UsageError as error:
        if first:
            print(f"tilenet polygons: {error}", file=sys.stderr)
        return 2
    classes = options.pop("classes")
    job = PolygonsJob(**options, classes=None if classes is None else tuple(classes))
    count = make_polygons(job, world())
    if world().rank == 0:
        say(f"tilenet: {count:,} polygons in {job.out}")
    return 0


def _parser() -> Arguments:
    parser = Arguments(
        prog="tilenet polygons",
        description="Write the polygons of a class map, over all MPI ranks.",
    )
    parser.add_argument("map", help="class map made by tilenet predict")
    parser.add_argument("out", help="file to write: .gpkg, .geojson or .fgb")
    parser.add_argument(
        "--classes", nargs="+", metavar="CLASS", help="names or numbers (default: all)"
    )
    parser.add_argument(
        "--min-area",
        type=_size,
        default=0.0,
        metavar="M2",
        help="leave out polygons that are smaller, in square metres: in units of the CRS squared",
    )
    parser.add_argument(
        "--simplify",
        type=_size,
        default=0.0,
        metavar="M",
        help="leave out corners that make a triangle with their neighbours that is smaller than "
        "this squared, in units of the CRS; edges that polygons share stay shared",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")
    return parser


def _size(text: str) -> float:
    try:
        size = float(text)
    except ValueError:
        size = -1.0
    if not 0 <= size < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number from 0 on, got {text!r}")
    return size
