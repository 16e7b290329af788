"""Turn pixels into the network's input."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tilenet.errors import TilenetError

BLOCK = 1 << 15  # pixels that are standardised at once


def standardise(
    values: NDArray[Any],
    valid: NDArray[np.bool_],
    mean: tuple[float, ...],
    std: tuple[float, ...],
    dtype: torch.dtype,
) -> Tensor:
    """(value − mean) / std per band, 0 where there is no data; a constant band becomes 0.

    Args:
        values: (C, H, W), any dtype.
        valid: (H, W).
        mean: Mean of each band over the valid pixels of the training images.
        std: Standard deviation of each band.

    Returns:
        (1, C, H, W), float64 for float64, else float32.

    Raises:
        TilenetError: A pixel with data becomes so large that the network's numbers cannot hold it.
    """
    work = np.float64 if dtype == torch.float64 else np.float32
    scaled = np.empty((1, *values.shape), work)
    rows = max(1, BLOCK // max(1, values.shape[2]))
    missing = None if valid.all() else ~valid
    # float32 would lose small differences of large numbers before their mean is taken off.
    exact = work == np.float64 or np.can_cast(values.dtype, work)
    too_large: list[object] = []
    # Also for pixels without data, which may have any value.
    with np.errstate(over="call", invalid="ignore", call=lambda *about: too_large.append(about)):
        shift = np.array(mean, work)
        # The digits that float32 lost of a mean far from zero: a shift of all pixels, but not of
        # the zeros around.
        rest = (np.array(mean) - shift).astype(work)
        scale = _scale(std, work)
        for band in range(len(values)):
            for row in range(0, values.shape[1], rows):  # a block stays in the cache
                block = scaled[0, band, row : row + rows]
                if exact:
                    block[:] = values[band, row : row + rows]
                    block -= shift[band]
                    block -= rest[band]
                else:
                    block[:] = values[band, row : row + rows] - np.float64(mean[band])
                block /= scale[band]
                if missing is not None:
                    block[missing[row : row + rows]] = 0
    if too_large and not np.isfinite(scaled).all():
        _, _, row, col = np.argwhere(~np.isfinite(scaled))[0]
        pixel = ", ".join(f"{value:g}" for value in values[:, row, col])
        raise TilenetError(
            f"pixels must fit {np.dtype(work).name} when mean and deviation are taken off (one of "
            f"{pixel}); name a value that means no data with nodata, or scale the file"
            + ", or compute with precision float64"
            * (work == np.float32)
        )
    return torch.from_numpy(scaled)


def _scale(std: tuple[float, ...], work: type[np.floating[Any]]) -> NDArray[Any]:
    """The divisors of the bands; 1 for a constant band keeps the zeros that the mean leaves."""
    scale = np.array([s if s > 0 else 1.0 for s in std], work)
    if (scale < np.finfo(work).tiny).any():
        raise TilenetError(
            f"a band's deviation must fit {np.dtype(work).name} (std: {min(filter(None, std)):g}); "
            "scale the file" + ", or compute with precision float64" * (work == np.float32)
        )
    return scale
