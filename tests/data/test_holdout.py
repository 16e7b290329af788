"""Which blocks are held out: as many as asked for, the same forever, and with their margins."""

from itertools import product

import numpy as np
import pytest

from tilenet.data import holdout as module
from tilenet.data.holdout import HeldOut, blocks_of, choose_held_out
from tilenet.errors import TilenetError
from tilenet.geometry.windows import Window

SIZES = ((100, 75), (33, 210), (16, 16))
RNG = np.random.default_rng(4)


def everywhere(sizes=SIZES, block_px=16):  # type: ignore[no-untyped-def]
    return np.ones(len(list(blocks_of(sizes, block_px))), np.bool_)


def flat(held: HeldOut) -> np.ndarray:  # type: ignore[type-arg]
    return np.concatenate([blocks.ravel() for blocks in held.chosen])


@pytest.mark.parametrize(
    ("share", "count"), [(0.2, 16), (0.5, 39), (0.001, 1), (0.999, 77), (0.21, 16)]
)
def test_as_many_are_held_out_as_asked_for(share: float, count: int) -> None:
    labelled = everywhere()
    assert len(labelled) == 35 + 42 + 1
    held = choose_held_out(labelled, SIZES, 16, share, 7)
    assert (held.num_chosen, held.num_blocks) == (count, 78)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("with_labels", [2, 3, 10, 76, 77])
def test_of_blocks_with_labels_the_same_share_is_held_out(share: float, with_labels: int) -> None:
    labelled = np.zeros(78, np.bool_)
    labelled[RNG.permutation(78)[:with_labels]] = True
    held = flat(choose_held_out(labelled, SIZES, 16, share, 7))
    assert held.sum() == round(share * 78)
    assert 1 <= held[labelled].sum() <= with_labels - 1
    assert abs(held[labelled].sum() - share * with_labels) <= 1


def test_the_choice_depends_on_the_seed_and_never_changes() -> None:
    seeds = [flat(choose_held_out(everywhere(), SIZES, 16, 0.2, seed)) for seed in range(40)]
    again = flat(choose_held_out(everywhere(), SIZES, 16, 0.2, 3))
    assert (again == seeds[3]).all()
    assert len({held.tobytes() for held in seeds}) == 40
    # Each block has its turn: the sum over 40 seeds is binomial, 8 ± 2.5.
    often = np.sum(seeds, axis=0)
    assert often.min() >= 1
    assert often.max() <= 19
    assert often.mean() == pytest.approx(40 * 16 / 78)


def test_an_image_draws_the_same_numbers_whatever_comes_after_it() -> None:
    alone = choose_held_out(everywhere(SIZES[:1]), SIZES[:1], 16, 0.5, 7)
    two = (SIZES[0], SIZES[0])
    both = choose_held_out(everywhere(two), two, 16, 0.5, 7)
    # of both images half, so about the same threshold, and not the same places in both
    assert (alone.chosen[0] == both.chosen[0]).mean() > 0.8
    assert (both.chosen[0] == both.chosen[1]).mean() < 0.8


@pytest.mark.parametrize("margin", [0, 1, 5, 16, 40])
def test_the_mask_is_what_lies_within_the_margin(margin: int) -> None:
    held = choose_held_out(everywhere(), SIZES, 16, 0.1, 5)
    for image, size in enumerate(SIZES):
        wanted = np.zeros(size, np.bool_)
        for row, col in product(*map(range, size)):
            if held.chosen[image][row // 16, col // 16]:
                rows = slice(max(0, row - margin), row + margin + 1)
                wanted[rows, max(0, col - margin) : col + margin + 1] = True
        found = np.zeros(size, np.bool_)
        for top, left in product(range(0, size[0], 23), range(0, size[1], 31)):
            window = Window(top, left, min(23, size[0] - top), min(31, size[1] - left))
            part = np.s_[top : top + window.height, left : left + window.width]
            found[part] = held.mask(image, window, margin)
        # a block at the edge is smaller than 16, its margin begins where the image ends
        np.testing.assert_array_equal(found, wanted)


def test_windows_are_the_pixels_of_the_mask() -> None:
    held = choose_held_out(everywhere(), SIZES, 16, 0.3, 5)
    for image, size in enumerate(SIZES):
        mask = np.zeros(size, np.bool_)
        for window in held.windows(image):
            mask[window.row :, window.col :][: window.height, : window.width] = True
        np.testing.assert_array_equal(mask, held.mask(image, Window(0, 0, *size)))


def test_a_margin_that_leaves_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    held = choose_held_out(everywhere(), SIZES, 16, 0.1, 5)
    monkeypatch.setattr(module, "PIECE_PX", 7)
    held.check_rest(210)  # of the small image no block is held out
    held = choose_held_out(everywhere(SIZES[:2]), SIZES[:2], 16, 0.1, 5)
    held.check_rest(16)
    with pytest.raises(TilenetError, match=r"no others are left .*context: 210 px.*: 8 of 77\)"):
        held.check_rest(210)


@pytest.mark.parametrize(("margin", "count"), [(0, 0), (3, 2), (7, 2), (8, 14), (12, 17), (40, 46)])
@pytest.mark.parametrize("piece_px", [5, 1024])
def test_blocks_that_a_margin_reaches_across(
    margin: int, count: int, piece_px: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a loop over pixels; blocks side by side, and at edges, look farther."""
    monkeypatch.setattr(module, "PIECE_PX", piece_px)
    held = choose_held_out(everywhere(), SIZES, 16, 0.6, 5)
    reached = 0
    for image, size in enumerate(SIZES):
        free = ~held.mask(image, Window(0, 0, *size))
        for block in held.windows(image):
            places = product(range(block.height), range(block.width))
            around = (
                free[
                    max(0, block.row + row - margin) : block.row + row + margin + 1,
                    max(0, block.col + col - margin) : block.col + col + margin + 1,
                ]
                for row, col in places
            )
            reached += all(part.any() for part in around)
    assert held.num_reached(margin) == reached == count


@pytest.mark.parametrize("with_labels", [0, 1])
def test_one_block_with_labels_cannot_be_shared_out(with_labels: int) -> None:
    labelled = np.arange(78) < with_labels
    with pytest.raises(TilenetError, match=rf"blocks: 78, with labels: {with_labels}\)"):
        choose_held_out(labelled, SIZES, 16, 0.2, 7)


def test_more_blocks_than_memory_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(list(blocks_of(SIZES, 16))) == 78
    monkeypatch.setattr(module, "MOST_BLOCKS", 77)
    with pytest.raises(TilenetError, match=r"at most 77 .*blocks: 78\)"):
        list(blocks_of(SIZES, 16))
