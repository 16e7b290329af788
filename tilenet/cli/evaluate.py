"""tilenet evaluate: scores of a class map."""

import json

from tilenet.cli.options.arguments import Arguments, command
from tilenet.cli.options.data import WINDOW, numbers, with_values
from tilenet.cli.options.labels import add_labels, vectors_of
from tilenet.library.evaluate import evaluate
from tilenet.parallel.health.watchdog import Watchdog


@command("evaluate")
def main(arguments: list[str]) -> None:
    """Run `tilenet evaluate`."""
    parser = Arguments(
        prog="tilenet evaluate",
        description="Compare a class map with labels: a raster or polygons.",
    )
    parser.add_argument("map", help="class map made by tilenet predict")
    parser.add_argument("labels", help="label raster, or a file of polygons")
    add_labels(parser)
    parser.add_argument(
        "--window",
        type=numbers(int, WINDOW),
        metavar=WINDOW,
        help="score these pixels of the map, counted from 0 (default: all)",
    )
    parser.add_argument(
        "--hang-seconds",
        type=float,
        default=1800.0,
        metavar="S",
        help="end, with stacks, when a block of pixels takes four times as long; 0: never",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(with_values(arguments))
    vectors = vectors_of(options)
    with Watchdog(options.hang_seconds, "tilenet evaluate") as dog:
        keys = {"ignore_index": options.ignore_index, "vectors": vectors, "window": options.window}
        scores = evaluate(options.map, options.labels, **keys, watchdog=dog)
    print(json.dumps(vars(scores)) if options.json else scores)
