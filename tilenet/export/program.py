"""A network as a graph of torch's operators, and the files that hold one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.export import Dim, ExportedProgram

from tilenet.errors import TilenetError, one_line
from tilenet.export.pixels import FromPixels

__all__ = ["Traced", "trace"]

MOST_SAID = 200


@dataclass(frozen=True)
class Traced:
    """A network's graph.

    Attributes:
        program: As torch.export made it.
        any_size: Whether it takes any number of images of any aligned size; else one of one size.
    """

    program: ExportedProgram
    any_size: bool

    def write(self, path: Path) -> None:
        """Write a .pt2 file.

        Raises:
            OSError: The disk does not take it.
        """
        self.program.example_inputs = None  # as large as a window
        torch.export.save(self.program, path)


def trace(network: FromPixels, tile_px: int, alignment_px: int, *, any_size: bool) -> Traced:
    """Record the operators of a network.

    Args:
        tile_px: Height and width, where it takes one size.
        any_size: Whether it is to take others, multiples of the alignment larger or smaller. Where
            torch cannot leave sizes open, it takes one all the same.

    Raises:
        TilenetError: torch's exporter does not take the network; with its reason.
    """
    if any_size:
        blocks, rest = divmod(tile_px, alignment_px)
        least = min(2, blocks)
        rows, cols = (alignment_px * Dim(name, min=least) + rest for name in ("rows", "cols"))
        sizes = 2, tile_px, tile_px + alignment_px  # unlike each other, or torch takes them for one
        try:
            open_sizes = {0: Dim("batch"), 2: rows, 3: cols}
            return Traced(_recorded(network, *sizes, open_sizes), any_size=True)
        except Exception:  # whatever torch says of sizes
            pass
    try:
        return Traced(_recorded(network, 1, tile_px, tile_px, None), any_size=False)
    except Exception as error:  # whatever it says of a stranger's module
        raise TilenetError(
            "a network is exported where torch.export takes all of its operators "
            f"({type(error).__name__}: {one_line(str(error))[:MOST_SAID]}); map with tilenet "
            "predict instead"
        ) from error


def _recorded(
    network: FromPixels, images: int, rows: int, cols: int, sizes: Any
) -> ExportedProgram:
    pixels = network.shift.new_zeros(images, len(network.shift), rows, cols)
    with torch.no_grad():
        return torch.export.export(
            network, (pixels,), dynamic_shapes=None if sizes is None else {"pixels": sizes}
        )
