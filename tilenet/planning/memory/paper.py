"""The paper's quick memory profile of a U-Net: elements per level, from two formulas.

With n_f base channels, n_c convolutions per level and d cells lost per convolution,

    E_l  = I_l² + 2^l n_f Σ_{i=1..n_c} (I_l − i·d)²
    D_l′ = 2^l′ n_f (2 I_l′² + Σ_{i=1..n_c} (I_l′ − i·d)²),   l′ = L − l

are the elements of the encoder's level l and of the decoder's part next to it. They give a first
look, and the paper's figures; `layer_bytes` knows the network that really runs.
"""

from dataclasses import dataclass

from tilenet.errors import TilenetError
from tilenet.geometry.unet import UNetOptions


@dataclass(frozen=True)
class LevelBytes:
    """Bytes of the feature maps by level; level 0 has full resolution.

    Attributes:
        encoder: E of the levels 0 to P; the last is the bottleneck.
        decoder: D of the levels 0 to P − 1.
    """

    encoder: tuple[int, ...]
    decoder: tuple[int, ...]


def level_bytes(options: UNetOptions, size_px: int, item_bytes: int = 4) -> LevelBytes:
    """Bytes per level for a square input of `size_px`.

    Widths follow from one another: one convolution takes d off, 0 with `same` padding and K − 1
    with `valid`. I_0 is the input's width. A level hands its pooling I_l − n_c·d, which halves it,
    rounded down: I_{l+1} = ⌊(I_l − n_c·d) / 2⌋. The decoder begins below, with the bottleneck's
    output: its level l has the doubled width, I_l′ = 2·(I_{l+1}′ − n_c·d), where the
    bottleneck's I is the encoder's I_P; with `same` padding it is padded to the skip's width, which
    may be one cell more, and is I_l again. So I stands for the encoder's width in E and for the
    decoder's in D. The bottleneck counts as E_P.

    Raises:
        TilenetError: The input is too small for the network.
    """
    lost = 0 if options.padding == "same" else options.kernel - 1
    count = options.convolutions
    widths = [size_px]
    for _ in range(options.poolings):
        widths.append((widths[-1] - count * lost) // 2)
    if widths[-1] - count * lost < 1:
        raise TilenetError(
            f"each level must keep at least one cell (size: {size_px} px, poolings: "
            f"{options.poolings}, cells lost per level: {count * lost}); use a larger tile or "
            "fewer poolings"
        )
    encoder = [
        width**2 + 2**level * options.base * _convolved(width, count, lost)
        for level, width in enumerate(widths)
    ]
    decoder = []
    width = widths[-1]
    for level in reversed(range(options.poolings)):
        width = widths[level] if lost == 0 else 2 * (width - count * lost)
        cells = 2 * width**2 + _convolved(width, count, lost)
        decoder.append(2**level * options.base * cells)
    return LevelBytes(
        tuple(elements * item_bytes for elements in encoder),
        tuple(elements * item_bytes for elements in reversed(decoder)),
    )


def _convolved(width: int, count: int, lost: int) -> int:
    """Cells of a channel, summed over a level's convolutions."""
    return sum((width - i * lost) ** 2 for i in range(1, count + 1))
