"""Places of crops are those that a list of them would hold, in memory that has a bound."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilenet.data import crop_places as module
from tilenet.data.crop_places import crop_places
from tilenet.data.crops import MOST_CELL_BYTES, cell_side
from tilenet.data.schedule import CropSchedule
from tilenet.errors import TilenetError


def random_cells(planes: int, rows: int, cols: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    shape = planes, rows, cols
    bits = rng.integers(1, 256, shape) * (rng.random(shape) < rng.choice([0.02, 0.2]))
    return bits.astype(np.uint8)


@settings(max_examples=200)
@given(
    st.integers(1, 2),
    st.integers(1, 23),
    st.integers(1, 23),
    st.integers(1, 9),
    st.sampled_from([1, 7, 1 << 22]),
    st.integers(0, 9999),
)
def test_places_classes_and_reach_are_those_of_a_plain_count(
    planes: int, rows: int, cols: int, side: int, memory: int, seed: int
) -> None:
    cells = random_cells(planes, rows, cols, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK", min(memory, 1 << 14))
        patch.setattr(module, "STRIP_CELLS", memory)
        found = crop_places(cells, side * 3, 3, by_class=True)
        plain = crop_places(cells, side * 3, 3)
        every = [plain[number] for number in range(len(plain))]
        reach_px = plain.reach_px()
        assert [found[number] for number in range(len(found))] == every
        assert found.reach_px() == reach_px
        of_class = {
            label: [found.of_class(label, number) for number in range(count)]
            for label, count in found.classes.items()
        }
    wanted, covered = {}, set()
    for row in range(max(1, rows - side + 1)):
        for col in range(max(1, cols - side + 1)):
            inside = np.bitwise_or.reduce(cells[:, row : row + side, col : col + side], (1, 2))
            if inside.any():
                bits = np.unpackbits(inside, bitorder="little")
                wanted[row * 3, col * 3] = set(np.flatnonzero(bits).tolist())
                covered |= {(row + r, col + c) for r in range(side) for c in range(side)}
    assert every == list(wanted)
    assert reach_px == 9 * len(covered)
    for label in range(8 * planes):
        assert of_class.get(label, []) == [place for place in wanted if label in wanted[place]]
    for number in (-1, len(wanted)):
        with pytest.raises(IndexError):
            plain[number]


@pytest.mark.parametrize("by_class", [False, True])
def test_places_of_a_huge_image_take_hardly_more_than_its_cells(by_class: bool) -> None:
    """A list of them took 16 bytes of each, and the sums that it was made of 40 of each cell."""
    cells = np.full((1, 5003, 4001), 3, np.uint8)
    tracemalloc.start()
    try:
        places = crop_places(cells, 24, 2, by_class=by_class)
        schedule = CropSchedule(1, 4, 24, ((10005, 8001),), (places,), (), float(by_class))
        assert schedule.steps_per_epoch == 10006 * 8002 // (24 * 24 * 4) + 1
        row, col = places[len(places) - 1]
        assert (row, col) == (10006 - 24, 8002 - 24)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 4 * cells.nbytes


# --- the side of cells


@pytest.mark.parametrize("crop_px", [None, 128, 256])
@pytest.mark.parametrize("alignment_px", [1, 16, 64])
@pytest.mark.parametrize("sizes", [[(10**6, 10**6)], [(3 * 10**5,) * 2] * 11, [(1, 2**31 - 1)]])
def test_cells_of_any_images_stay_below_their_bound(
    sizes: list[tuple[int, int]], alignment_px: int, crop_px: int | None
) -> None:
    side = cell_side(sizes, 3, alignment_px, crop_px)
    cells = sum(-(-height // side) * -(-width // side) for height, width in sizes)
    assert cells <= MOST_CELL_BYTES
    assert side % alignment_px == 0
    if crop_px is not None:
        assert crop_px % side == 0


@pytest.mark.parametrize(
    ("size", "alignment_px", "num_classes"),
    [((40_000, 40_000), 16, 21), ((185_000, 185_000), 16, 8), ((11_000, 11_000), 1, 8)],
)
def test_images_of_ordinary_size_have_the_cells_of_the_network(
    size: tuple[int, int], alignment_px: int, num_classes: int
) -> None:
    assert cell_side([size], num_classes, alignment_px, 512) == alignment_px
    assert cell_side([size], num_classes, alignment_px, None) == alignment_px


def test_a_cell_is_the_smallest_that_fits_the_crop() -> None:
    assert cell_side([(300_000, 300_000)], 3, 16, 16 * 9) == 16 * 3
    assert cell_side([(300_000, 300_000)], 3, 16, 16 * 7) == 16 * 7


@pytest.mark.parametrize(("crop_px", "num_classes"), [(64, 3), (128, 99), (16 * 101, 4096)])
def test_images_too_large_for_their_crops_are_refused(crop_px: int, num_classes: int) -> None:
    with pytest.raises(TilenetError, match=r"where crops may lie is kept in at most 128 MiB"):
        cell_side([(10**6, 10**6)], num_classes, 16, crop_px)
