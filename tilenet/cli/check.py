"""`tilenet check`: whether somebody's network can be cut into tiles, and what its halo is."""

import json
import sys
from collections import Counter
from typing import Any

from tilenet.adoption.adopt import Adopted, adopt
from tilenet.adoption.source import check_name, made
from tilenet.cli.options import Arguments
from tilenet.errors import TilenetError, UsageError

__all__ = ["main"]


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    try:
        given = _parser().parse_args(arguments)
        options = dict(_option(one) for one in given.options)
        try:
            check_name(given.network)
        except TilenetError as error:
            raise UsageError(str(error)) from error
        adopted = adopt(made(given.network, options), given.bands, given.batch_norm)
    except UsageError as error:
        print(f"tilenet check: {error}", file=sys.stderr)
        return 2
    except TilenetError as error:
        print(f"tilenet: {error}", file=sys.stderr)
        return 1
    facts = _facts(adopted)
    print(json.dumps(facts) if given.json else _table(facts))
    return 0


def _option(text: str) -> tuple[str, Any]:
    name, sign, value = text.partition("=")
    if not sign:
        raise UsageError(f"an option is name=value (--options: {text})")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _facts(adopted: Adopted) -> dict[str, Any]:
    context = adopted.context
    return {
        "network": adopted.name,
        "bands": adopted.bands,
        "classes": adopted.classes,
        "num_layers": len(adopted.layers),
        "num_parameters": sum(layer.num_parameters for layer in adopted.layers),
        "kinds": dict(Counter(layer.kind for layer in adopted.layers).most_common()),
        "alignment_px": context.alignment_px,
        "context_aligned_px": context.context_aligned_px,
        "context_any_pixel_px": context.context_any_pixel_px,
        "halo_px": context.halo_px,
        "looks_at_whole_image": adopted.looks_at_all,
    }


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
        lines.append(
            "It takes averages or statistics of the whole image, which no halo covers: they are "
            "summed over ranks."
        )
    return "\n".join(lines)


def _parser() -> Arguments:
    parser = Arguments(
        prog="tilenet check",
        description="Say whether a network can be cut into tiles, and how wide a halo these need.",
    )
    parser.add_argument("network", metavar="PACKAGE:NAME", help="a function or class that makes it")
    parser.add_argument(
        "--options", nargs="*", default=[], metavar="NAME=VALUE", help="what it is called with"
    )
    parser.add_argument("--bands", type=int, default=3, help="channels of the image (default: 3)")
    parser.add_argument(
        "--batch-norm",
        choices=("frozen", "step"),
        default="frozen",
        help="keep running statistics, or take those of a step's images (default: frozen)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser
