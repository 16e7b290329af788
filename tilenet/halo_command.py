"""`tilenet halo`: the halo calculator. Numbers only: neither torch nor MPI is loaded."""

import argparse
import json
import sys
from dataclasses import dataclass, replace
from typing import Any

from tilenet.command_line import Arguments
from tilenet.errors import TilenetError, UsageError
from tilenet.geometry.halo import context_of, epsilon_px, norm_context
from tilenet.geometry.networks import PAPER_LEVELS, PRESETS, UNetOptions, unet_layers
from tilenet.geometry.tiles import Cut, Tiling, cut, halo_rule

__all__ = ["Answer", "calculate", "main"]


@dataclass(frozen=True)
class Answer:
    """What the calculator prints.

    Attributes:
        values: The JSON object.
        notes: Sentences for people.
    """

    values: dict[str, Any]
    notes: tuple[str, ...]


def calculate(
    options: UNetOptions,
    paper_levels: int,
    image: tuple[int, int] | None = None,
    asked: Cut | None = None,
    halo: int | str = "exact",
) -> Answer:
    """Halo, context and tiles of a network.

    Args:
        paper_levels: What the paper's formula calls levels.
        image: Height and width.
        asked: The tiles; None: one.

    Raises:
        TilenetError: A rule is broken; the sentence names the nearest legal value.
    """
    layers = unet_layers(options)
    context = context_of(layers)
    epsilon = epsilon_px(paper_levels, options.convolutions, options.kernel)
    formula = epsilon_px(options.poolings + 1, options.convolutions, options.kernel)
    rule = halo_rule(halo, context, layers, epsilon)
    values: dict[str, Any] = {
        "poolings": options.poolings,
        "convolutions": options.convolutions,
        "kernel": options.kernel,
        "padding": options.padding,
        "upsampling": options.upsampling,
        "epsilon_px": epsilon,
        "context_formula_px": formula,
        "context_aligned_px": context.context_aligned_px,
        "context_any_pixel_px": context.context_any_pixel_px,
        "halo_px": context.halo_px,
        "alignment_px": context.alignment_px,
        "num_layers": len(layers),
        "num_parameters": sum(layer.num_parameters for layer in layers),
        "norm_context": norm_context(layers),
    }
    notes = []
    if epsilon != formula:
        notes.append(
            f"Two widths: the paper's table gives {epsilon} px, because it puts the number of "
            f"poolings ({options.poolings}) where its formula counts levels "
            f"({options.poolings + 1}); the formula for {options.poolings} poolings gives "
            f"{formula} px. With {epsilon} px tiles are a good approximation (halo: epsilon); with "
            f"{context.halo_px} px, the exact context rounded up to the alignment, they give the "
            "whole image's result."
        )
    if values["norm_context"] == "image":
        notes.append(
            f"{options.norm} norm looks at the whole image, which no halo covers: exact tiles need "
            "norm: none or batch norm's running statistics; norm_scope: tile approximates."
        )
    if values["norm_context"] == "tile":
        notes.append(
            f"{options.norm} norm over each tile (norm_scope: tile) makes the result depend on the "
            "tiles: approximate."
        )
    if image is not None:
        tiling = cut(*image, asked or Cut(), rule)
        values.update(_tiles(tiling))
        if not rule.exact:
            notes.append(f"With {rule.halo_px} px tiles depend on where they are cut: approximate.")
        if tiling.work_ratio > 4:
            notes.append(
                f"Each pixel is computed {tiling.work_ratio:.1f} times; fewer, larger tiles waste "
                "less."
            )
    return Answer(values, tuple(notes))


def _tiles(tiling: Tiling) -> dict[str, Any]:
    own = [span.own for span in (*tiling.rows, *tiling.cols)]
    rows, cols = tiling.rows[0].read, tiling.cols[0].read
    return {
        "image": [tiling.height, tiling.width],
        "extended_px": list(tiling.extended),
        "grid": list(tiling.grid),
        "num_tiles": len(tiling.rows) * len(tiling.cols),
        "tile_own_px": [min(own), max(own)],
        "tile_read_px": rows if rows == cols else [rows, cols],
        "work_ratio": tiling.work_ratio,
        "work_ratio_tile": tiling.work_ratio_tile,
    }


MEANINGS = {
    "epsilon_px": "the paper's halo ε = (3·2^(L−2) − 1)·d·n_c",
    "context_formula_px": "the same formula with L = poolings + 1",
    "context_aligned_px": "what an aligned tile needs to be exact",
    "context_any_pixel_px": "what the worst single pixel looks at",
    "halo_px": "halo that makes tiles exact",
    "alignment_px": "tile origins and sizes are multiples of it",
    "num_layers": "single layers",
    "num_parameters": "trained values",
    "norm_context": "over what normalisation takes statistics",
    "grid": "tiles along rows, columns",
    "num_tiles": "tiles in all",
    "tile_own_px": "own size, smallest and largest",
    "tile_read_px": "read size",
    "work_ratio": "pixels read per pixel of the image",
    "work_ratio_tile": "(read / own)² of the largest tile, the paper's E",
}


def _table(answer: Answer) -> str:
    lines = []
    for name, meaning in MEANINGS.items():
        if name not in answer.values:
            continue
        value = answer.values[name]
        if isinstance(value, list):
            text = (" × " if name == "grid" else " to ").join(str(part) for part in value)
        elif isinstance(value, float):
            text = f"{value:.4f}"
        else:
            text = f"{value:,}" if isinstance(value, int) else value
        lines.append(f"{name:<22} {text:>16}  {meaning}")
    return "\n".join([*lines, *(f"\n{note}" for note in answer.notes)])


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    try:
        given = _parser().parse_args(arguments)
        options, levels = _network(given)
        image, asked = _image(given)
        answer = calculate(options, levels, image, asked, given.halo)
    except UsageError as error:
        print(f"tilenet halo: {error}", file=sys.stderr)
        return 2
    except TilenetError as error:
        print(f"tilenet: {error}", file=sys.stderr)
        return 1
    print(json.dumps(answer.values) if given.json else _table(answer))
    return 0


def _network(given: argparse.Namespace) -> tuple[UNetOptions, int]:
    ways = [given.preset, given.levels, given.poolings]
    if sum(way is not None for way in ways) != 1:
        raise UsageError("a network is given by one of --preset, --levels or --poolings")
    if given.preset:
        start, levels = PRESETS[given.preset], PAPER_LEVELS[given.preset]
        if given.convs is not None:
            raise UsageError("--convs belongs to --levels and --poolings; a preset has its own")
    else:
        levels = given.levels if given.levels is not None else given.poolings + 1
        if levels < 2:
            raise TilenetError(
                f"a U-Net has at least one pooling, two levels (levels: {levels}, poolings: "
                f"{levels - 1}); nearest: --levels 2 or --poolings 1"
            )
        start = replace(UNetOptions(), poolings=levels - 1, convolutions=given.convs or 2)
        if given.convs is not None and given.convs < 1:
            raise TilenetError(f"convolutions must be at least 1 (convs: {given.convs})")
    names = ("kernel", "padding", "upsampling", "norm", "norm_scope", "base", "bands", "classes")
    values = {name: value for name in names if (value := getattr(given, name)) is not None}
    return replace(start, **values), levels


def _image(given: argparse.Namespace) -> tuple[tuple[int, int] | None, Cut]:
    if given.image is None:
        if given.grid or given.tile is not None:
            raise UsageError("--grid and --tile need --image")
        return None, Cut()
    if given.grid and given.tile is not None:
        raise UsageError("tiles are given by --grid or by --tile, not both")
    return given.image, Cut(grid=given.grid, size_px=given.tile)


def _pair(text: str) -> tuple[int, int]:
    """`10000` or `10000x8000`: rows and columns."""
    parts = text.lower().replace("×", "x").split("x")
    if len(parts) > 2 or not all(part.strip().isdigit() for part in parts):
        raise argparse.ArgumentTypeError(f"expected N or ROWSxCOLUMNS, got {text!r}")
    return int(parts[0]), int(parts[-1])


def _parser() -> Arguments:
    parser = Arguments(
        prog="tilenet halo",
        description="Say how wide a halo tiles need, so that cutting an image changes nothing.",
    )
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
    network.add_argument("--base", type=int, help="channels of the first level (64)")
    network.add_argument("--bands", type=int, help="input channels (4)")
    network.add_argument("--classes", type=int, help="output channels (1)")
    tiles = parser.add_argument_group("tiles")
    tiles.add_argument("--image", type=_pair, metavar="N|ROWSxCOLUMNS", help="pixels")
    tiles.add_argument("--grid", type=_pair, metavar="ROWSxCOLUMNS", help="tiles, e.g. 8x8")
    tiles.add_argument("--tile", type=int, metavar="PX", help="largest own size of a tile")
    tiles.add_argument(
        "--halo",
        type=lambda text: int(text) if text.isdigit() else text,
        default="exact",
        metavar="exact|epsilon|PX",
        help="halo that the tiles are cut with (%(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser
