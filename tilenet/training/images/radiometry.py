"""Radiometric augmentation: brightness, contrast and noise, keyed by step, image and pixel.

It works on standardised pixels, so amounts are in standard deviations of a band, not in the
file's units; and contrast is about the band's mean over all training images, so no tile
needs to know the others. Two tiles that read the same pixel give it the same noise.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tilenet.geometry.windows import Window, reflected
from tilenet.random_keys import sixteen_bits, uniform


@dataclass(frozen=True)
class Radiometry:
    """x becomes g·x + o + noise·ε, with a gain g and an offset o for each band of a sample.

    Attributes:
        brightness: o is uniform in ± this, in standard deviations of the band.
        contrast: g is uniform in 1 ± this.
        noise: Standard deviation of the noise, in those of the band; ε is normal.
    """

    brightness: float = 0.0
    contrast: float = 0.0
    noise: float = 0.0

    def alter(
        self,
        image: Tensor,
        valid: NDArray[np.bool_],
        window: Window,
        size: tuple[int, int],
        *key: int,
    ) -> None:
        """Alter a window of a sample, in place; pixels without data stay 0.

        Args:
            image: (1, C, H, W), standardised.
            valid: (H, W).
            window: Window of the sample; beyond its edges the altered sample is reflected.
            size: Height and width of the sample.
            key: Seed, step and number of the sample.
        """
        if not (self.brightness or self.contrast or self.noise):
            return
        bands = image.shape[1]
        # numpy, whose sums are torch's to the bit: torch would start threads of its own for a
        # thread that reads ahead, and they would take cores from those that compute.
        values = image.numpy()
        if self.brightness or self.contrast:
            # Those of all bands are drawn at once, gains first.
            drawn = 2 * uniform(2 * bands, *key, "radiometry")[:, None, None] - 1
            values *= (1 + self.contrast * drawn[:bands]).astype(values.dtype)
            values += (self.brightness * drawn[bands:]).astype(values.dtype)
        if self.noise:
            self._add_noise(image[0], window, size, *key)
        if not valid.all():
            values *= valid

    def _add_noise(self, image: Tensor, window: Window, size: tuple[int, int], *key: int) -> None:
        """Row by row, so that it takes no memory; a row's key makes its pixels, band by band."""
        bands, levels = image.shape[0], (self.noise * _quantiles()).to(image.dtype).numpy()
        values = image.numpy()
        cols = reflected(window.col, window.width, size[1])
        left = min(cols)
        places = slice(None) if cols == [*range(left, left + len(cols))] else np.array(cols) - left
        count = (max(cols) - left + 1) * bands
        for at, row in enumerate(reflected(window.row, window.height, size[0])):
            drawn = sixteen_bits(count, *key, "noise", row, first=left * bands).reshape(-1, bands)
            values[:, at] += levels.take(drawn[places].T, mode="clip")  # clips nothing: faster


@cache
def _quantiles() -> Tensor:
    """The normal quantiles of the middles of 2¹⁶ equal parts of [0, 1], in float64."""
    parts = 1 << 16
    quantiles: Tensor = torch.special.ndtri(
        (torch.arange(parts, dtype=torch.float64) + 0.5) / parts
    )
    return quantiles
