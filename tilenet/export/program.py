"""A network as a graph of torch's operators, and the files that hold one."""

import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.export import Dim, ExportedProgram

from tilenet.errors import TilenetError, one_line
from tilenet.export.pixels import FromPixels

if TYPE_CHECKING:
    from torch.onnx import ONNXProgram

FOR_ONNX = "onnx", "onnxscript"  # which torch's exporter imports

MOST_SAID = 200
MOST_ONNX_BYTES = 2**31 - 2**24  # of a file, less its graph


@dataclass(frozen=True)
class Traced:
    """A network's graph.

    Attributes:
        program: The graph of torch.export.
        least_px: Least side of the images of which it takes any number, of any aligned size; None:
            it takes one image of one size.
    """

    program: ExportedProgram
    least_px: int | None

    def write(self, path: Path, properties: Mapping[str, str]) -> None:
        """Write a .pt2 file, or an .onnx file of one size.

        Args:
            properties: Kept in an .onnx file, under their names.

        Raises:
            OSError: The disk does not take it.
            TilenetError: ONNX lacks an operator of the network.
        """
        if path.suffix == ".onnx":
            exported = _as_onnx(self.program)
            exported.model.metadata_props.update(properties)
            exported.save(path)
        else:
            self.program.example_inputs = None  # as large as a window
            # Torch ends the process where a disk is full.
            buffer = BytesIO()
            torch.export.save(self.program, buffer)
            path.write_bytes(buffer.getbuffer())


def trace(network: FromPixels, tile_px: int, alignment_px: int, least_px: int | None) -> Traced:
    """Record the operators of a network.

    Args:
        tile_px: Height and width, where it takes one size.
        least_px: The least of other sizes that it is to take, multiples of the alignment larger or
            smaller; None: it takes none. Where torch cannot leave sizes open, it takes one all the
            same.

    Raises:
        TilenetError: torch's exporter does not take the network; with its reason.
    """
    if least_px is not None:
        least, rest = divmod(least_px, alignment_px)
        rows, cols = (alignment_px * Dim(name, min=least) + rest for name in ("rows", "cols"))
        sizes = 2, tile_px, tile_px + alignment_px  # unlike each other, or torch takes them for one
        try:
            open_sizes = {0: Dim("batch"), 2: rows, 3: cols}
            return Traced(_recorded(network, *sizes, open_sizes), least_px)
        except Exception:  # whatever torch says of sizes
            pass
    try:
        return Traced(_recorded(network, 1, tile_px, tile_px, None), least_px=None)
    except Exception as error:  # whatever it says of a user module
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


def check_onnx() -> None:
    """Refuse .onnx files where packages are missing.

    Raises:
        TilenetError: Packages are missing; the error names them.
    """
    if missing := [name for name in FOR_ONNX if find_spec(name) is None]:
        raise TilenetError(
            f"an .onnx file needs the packages {' and '.join(FOR_ONNX)} (missing: "
            f"{', '.join(missing)}); pip install 'tilenet[export]', or export a .pt2 file"
        )


def _as_onnx(program: ExportedProgram) -> "ONNXProgram":
    """The same graph of ONNX's operators, from `pixels` to `scores`.

    Raises:
        TilenetError: ONNX lacks an operator, or the weights are too many bytes for a file.
    """
    num_bytes = sum(tensor.nbytes for tensor in program.state_dict.values())
    if num_bytes > MOST_ONNX_BYTES:
        raise TilenetError(
            f"an .onnx file holds weights of {MOST_ONNX_BYTES:,} bytes at most (weights: "
            f"{num_bytes:,}); export a .pt2 file"
        )
    names: dict[str, Any] = {"input_names": ["pixels"], "output_names": ["scores"]}
    remarks = logging.getLogger("torch.onnx")  # on packages that are not installed
    level = remarks.level
    remarks.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            onnx_program = torch.onnx.export(program, dynamo=True, verbose=False, **names)
    except Exception as error:  # whatever it says of operators that ONNX lacks
        raise TilenetError(
            "an .onnx file holds a network that ONNX has all operators of "
            f"({type(error).__name__}: {one_line(str(error))[:MOST_SAID]}); export a .pt2 file"
        ) from error
    finally:
        remarks.setLevel(level)
    assert onnx_program is not None
    return onnx_program
