"""Options that describe an image and its tiles."""

import argparse

from tilenet.errors import UsageError
from tilenet.geometry.tiles import Cut


def add_tiles(parser: argparse.ArgumentParser) -> None:
    """Add the options that `image_of` reads, and `--halo`."""
    tiles = parser.add_argument_group("tiles")
    tiles.add_argument("--image", type=pair, metavar="N|ROWSxCOLUMNS", help="pixels")
    tiles.add_argument("--grid", type=pair, metavar="ROWSxCOLUMNS", help="tiles, e.g. 8x8")
    tiles.add_argument("--tile", type=int, metavar="PX", help="largest own size of a tile")
    tiles.add_argument(
        "--halo",
        type=lambda text: int(text) if text.isdigit() else text,
        default="exact",
        metavar="exact|epsilon|PX",
        help="halo of the tiles (%(default)s)",
    )


def image_of(options: argparse.Namespace) -> tuple[tuple[int, int] | None, Cut]:
    """Height and width of the image, if it is named, and how the options cut it.

    Raises:
        UsageError: Options contradict each other.
    """
    if options.image is None:
        if options.grid or options.tile is not None:
            raise UsageError("--grid and --tile need --image")
        return None, Cut()
    if options.grid and options.tile is not None:
        raise UsageError("tiles are given by --grid or by --tile, not both")
    return options.image, Cut(grid=options.grid, size_px=options.tile)


def pair(text: str) -> tuple[int, int]:
    """`10000` or `10000x8000`: rows and columns."""
    parts = text.lower().replace("×", "x").split("x")
    if len(parts) > 2 or not all(part.strip().isdigit() for part in parts):
        raise argparse.ArgumentTypeError(f"expected N or ROWSxCOLUMNS, got {text!r}")
    return int(parts[0]), int(parts[-1])
