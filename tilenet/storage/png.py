"""Pictures as PNG: in memory, for pages that hold them, and as files."""

import base64
import os
import warnings
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rasterio.errors import NotGeoreferencedWarning
from rasterio.io import MemoryFile

from tilenet.errors import TilenetError

__all__ = ["data_uri", "encode_png", "write_png"]


def encode_png(pixels: NDArray[np.uint8]) -> bytes:
    """A picture of (C, H, W) pixels: grey, grey and alpha, RGB or RGBA."""
    count, height, width = pixels.shape
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotGeoreferencedWarning)
        with MemoryFile() as memory:
            with memory.open(
                driver="PNG", count=count, height=height, width=width, dtype="uint8", ZLEVEL=6
            ) as file:
                file.write(pixels)
            encoded: bytes = memory.read()
    return encoded


def data_uri(pixels: NDArray[np.uint8]) -> str:
    """The picture as an address that holds all of it."""
    return "data:image/png;base64," + base64.b64encode(encode_png(pixels)).decode("ascii")


def write_png(pixels: NDArray[np.uint8], path: Path) -> None:
    """Write a picture, whole or not at all.

    Raises:
        TilenetError: It cannot be written.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_bytes(encode_png(pixels))
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise TilenetError(
            f"a picture must be written to a place that can be written ({path}: {error.strerror}); "
            "name another file"
        ) from error
