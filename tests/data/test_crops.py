"""What cells say of a window is never less than what its pixels say."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tilenet.data.crops import holds_labels
from tilenet.geometry.symmetries import SYMMETRIES, Symmetry
from tilenet.geometry.windows import Window


@given(
    st.integers(5, 70),
    st.integers(5, 70),
    st.sampled_from([1, 4, 8]),
    st.sampled_from(SYMMETRIES),
    st.integers(0, 9999),
)
def test_a_window_that_holds_a_label_is_never_passed_over(
    height: int, width: int, alignment: int, symmetry: Symmetry, seed: int
) -> None:
    """And one that is passed over has none in any cell that it touches."""
    rng = np.random.default_rng(seed)
    pixels = rng.random((height, width)) < 3 / (height * width)
    rows, cols = -(-height // alignment), -(-width // alignment)
    padded = np.zeros((rows * alignment, cols * alignment), bool)
    padded[:height, :width] = pixels
    cells = padded.reshape(rows, alignment, cols, alignment).any(axis=(1, 3))
    # a region on the grid, as a crop is: cut off where the image ends
    row, col = (int(rng.integers(0, count)) * alignment for count in (rows, cols))
    region = Window(row, col, min(32, height - row), min(32, width - col))
    part = pixels[row : row + region.height, col : col + region.width]
    turned = symmetry.turn(part)
    places = np.arange(height * width).reshape(height, width)
    where = symmetry.turn(places[row : row + region.height, col : col + region.width])
    for _ in range(12):
        first = rng.integers(0, turned.shape)
        size = rng.integers(1, 20, 2)  # over the lower and right edge too
        own = Window(*first.tolist(), *size.tolist())
        inside = np.s_[own.row : own.row + own.height, own.col : own.col + own.width]
        touched = np.unravel_index(where[inside].ravel(), (height, width))
        wanted = bool(cells[touched[0] // alignment, touched[1] // alignment].any())
        found = holds_labels(own, region, symmetry, cells, alignment)
        assert found == wanted
        assert found or not turned[inside].any()
