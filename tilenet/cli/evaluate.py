"""tilenet evaluate: scores of a class map."""

import json
import sys
from collections.abc import Sequence
from typing import Any

from tilenet.cli.data_options import add_labels, vectors_of
from tilenet.cli.options import Arguments
from tilenet.errors import TilenetError, UsageError, printable
from tilenet.mapping.evaluate import class_names, confusion_matrix
from tilenet.parallel.health.watchdog import Watchdog
from tilenet.scores import scores

__all__ = ["main"]

MOST_LETTERS = 40  # of a name, in the table


def main(arguments: list[str]) -> int:
    """Run `tilenet evaluate`; returns its exit code."""
    parser = Arguments(
        prog="tilenet evaluate",
        description="Compare a class map with labels: a raster or polygons.",
    )
    parser.add_argument("map", help="class map made by tilenet predict")
    parser.add_argument("labels", help="label raster, or a file of polygons")
    add_labels(parser)
    parser.add_argument(
        "--hang-seconds",
        type=float,
        default=1800.0,
        metavar="S",
        help="end, with stacks, when a block of pixels takes four times as long; 0: never",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    try:
        given = parser.parse_args(arguments)
        vectors = vectors_of(given)
        with Watchdog(given.hang_seconds, "tilenet evaluate") as dog:
            asked = given.map, given.labels, given.ignore_index, vectors
            found = scores(confusion_matrix(*asked, dog)) | {"classes": class_names(given.map)}
    except UsageError as error:
        print(f"tilenet evaluate: {error}", file=sys.stderr)
        return 2
    except TilenetError as error:
        print(f"tilenet: {error}", file=sys.stderr)
        return 1
    print(json.dumps(found) if given.json else _table(found))
    return 0


def _table(found: dict[str, Any]) -> str:
    names = [_name(index, found["classes"]) for index in range(len(found["iou"]))]
    wide = max(5, *map(len, names))
    lines = [f"{'class':<{wide}}      IoU       F1    labelled      mapped"]
    for index, (iou, f1) in enumerate(zip(found["iou"], found["f1"], strict=True)):
        score = f"{iou:8.4f} {f1:8.4f}" if iou is not None else f"{'–':>8} {'–':>8}"
        labelled, mapped = found["label_pixels"][index], found["map_pixels"][index]
        lines.append(f"{names[index]:<{wide}} {score} {labelled:11,} {mapped:11,}")
    lines.append(f"{'mean':<{wide}} {found['mean_iou']:8.4f} {found['mean_f1']:8.4f}")
    lines.append(f"accuracy {found['accuracy']:.4f} of {found['num_pixels']:,} labelled pixels")
    if found["num_unmapped"]:
        lines.append(
            f"{found['num_unmapped']:,} labelled pixels are nodata in the map and do not count"
        )
    return "\n".join(lines)


def _name(index: int, names: Sequence[str]) -> str:
    """A class's number and, where the map says it, its name."""
    name = names[index] if index < len(names) else ""
    if name in ("", str(index)):
        return str(index)
    return printable(f"{index} {name if len(name) <= MOST_LETTERS else f'{name[:MOST_LETTERS]}…'}")
