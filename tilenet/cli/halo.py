"""`tilenet halo`: the halo calculator. Of U-Nets it loads neither torch nor MPI."""

import json
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

from tilenet.cli.options.arguments import Arguments, command
from tilenet.cli.options.network import add_network, add_own_network, check_own_network, network_of
from tilenet.cli.options.tiles import add_tiles, image_of
from tilenet.geometry.halo import context_of, epsilon_px, norm_context
from tilenet.geometry.halo_rule import halo_rule
from tilenet.geometry.layers import Layer
from tilenet.geometry.tiles import Cut, Tiling, cut
from tilenet.geometry.unet import UNetOptions, unet_layers


@dataclass(frozen=True)
class Answer:
    """The answer that the calculator prints.

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
    tiles: Cut | None = None,
    halo: int | str = "exact",
) -> Answer:
    """Halo, context and tiles of a U-Net.

    Args:
        paper_levels: Levels as the paper's formula counts them.
        image: Height and width.
        tiles: Number or size of the image's tiles; None: one tile.

    Raises:
        TilenetError: A rule is broken; the sentence names the nearest legal value.
    """
    layers = unet_layers(options)
    context = context_of(layers)
    epsilon = epsilon_px(paper_levels, options.convolutions, options.kernel)
    formula = epsilon_px(options.poolings + 1, options.convolutions, options.kernel)
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
    return with_tiles(values, _notes(options, values), layers, epsilon, image, tiles, halo)


def with_tiles(
    values: dict[str, Any],
    notes: list[str],
    layers: tuple[Layer, ...],
    epsilon: int,
    image: tuple[int, int] | None,
    tiles: Cut | None,
    halo: int | str,
) -> Answer:
    """The answer with an image's tiles in it, where there is one.

    Args:
        epsilon: The paper's halo; 0: the network is no U-Net.

    Raises:
        TilenetError: The halo or the tiles break a rule.
    """
    rule = halo_rule(halo, layers, epsilon)
    if image is not None:
        tiling = cut(*image, tiles or Cut(), rule)
        values = values | _tiles(tiling)
        if not rule.exact:
            notes.append(f"With {rule.halo_px} px tiles depend on where they are cut: approximate.")
        if tiling.work_ratio > 4:
            notes.append(
                f"Each pixel is computed {tiling.work_ratio:.1f} times; fewer, larger tiles waste "
                "less."
            )
    return Answer(values, tuple(notes))


def _notes(options: UNetOptions, values: dict[str, Any]) -> list[str]:
    """Sentences on the network's halo."""
    epsilon, formula = values["epsilon_px"], values["context_formula_px"]
    notes = []
    if epsilon != formula:
        notes.append(
            f"Two widths: the paper's table gives {epsilon} px, because it puts the number of "
            f"poolings ({options.poolings}) where its formula counts levels "
            f"({options.poolings + 1}); the formula for {options.poolings} poolings gives "
            f"{formula} px. With {epsilon} px tiles are a good approximation (halo: epsilon); with "
            f"{values['halo_px']} px, the exact context rounded up to the alignment, they give "
            "the whole image's result."
        )
    if values["norm_context"] == "image":
        notes.append(
            f"{options.norm} norm takes statistics over whole images, which no halo covers: they "
            "are summed over ranks, and all tiles of an image run at once; norm_scope: tile "
            "approximates, without either."
        )
    if values["norm_context"] == "tile":
        notes.append(
            f"{options.norm} norm over each tile (norm_scope: tile) makes the result depend on the "
            "tiles: approximate."
        )
    return notes


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
    "bands": "channels of the image",
    "classes": "channels of the map",
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
            text = (" to " if name == "tile_own_px" else " × ").join(str(part) for part in value)
        elif isinstance(value, float):
            text = f"{value:.4f}"
        else:
            text = f"{value:,}" if isinstance(value, int) else value
        lines.append(f"{name:<22} {text:>16}  {meaning}")
    return "\n".join([*lines, *(f"\n{note}" for note in answer.notes)])


@command("halo")
def main(arguments: list[str]) -> None:
    """Run the command."""
    options = _parser().parse_args(arguments)
    own = check_own_network(options)
    image, tiles = image_of(options)
    if own:
        answer = _calculate_own(options, image, tiles)
    else:
        unet, levels = network_of(options)
        answer = calculate(unet, levels, image, tiles, options.halo)
    print(json.dumps(answer.values) if options.json else _table(answer))


def _calculate_own(options: Namespace, image: tuple[int, int] | None, tiles: Cut | None) -> Answer:
    """Halo, context and tiles of a user module.

    Raises:
        TilenetError: It cannot be made or cut into tiles, or a rule is broken.
    """
    # Not above: of U-Nets this command answers before torch is loaded.
    from tilenet.cli.own_network import WHOLE_IMAGE, adopt_named, facts_of

    _, adopted = adopt_named(options)
    notes = [WHOLE_IMAGE] if adopted.looks_at_all else []
    return with_tiles(facts_of(adopted), notes, adopted.layers, 0, image, tiles, options.halo)


def _parser() -> Arguments:
    parser = Arguments(
        prog="tilenet halo",
        description="Say how wide a halo tiles need, so that cutting an image changes nothing.",
    )
    add_network(parser)
    add_own_network(parser)
    add_tiles(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser
