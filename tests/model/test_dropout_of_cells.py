"""Dropout of single cells and of whole samples: masks belong to places of the whole image."""

from collections.abc import Callable
from itertools import combinations

import pytest
import torch
from torch import Tensor
from torchgpipe.skip.layout import inspect_skip_layout
from torchgpipe.skip.tracker import use_skip_tracker

from tilenet.geometry.layers import Dropout
from tilenet.model.dropout import KeyedDropout, MaskKey
from tilenet.model.origin import Origin, OriginTracker
from tilenet.random_keys import uniform

ROWS, COLS, CHANNELS = 19, 26, 5  # of the whole map
KINDS = "cells", "channels", "samples"
SIGMAS = 5  # one draw in two million lies further from the mean


def maps(*shape: int, seed: int = 1) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values + values.sign()  # nowhere near 0


def at(row: int, col: int) -> Callable[[int], tuple[int, int]]:
    """All samples stand at one place."""
    return lambda sample: (row, col)


def kept(
    shape: tuple[int, ...], p: float = 0.4, drops: str = "cells", *, seed: int = 1, step: int = 2,
    layer: int = 3, images: tuple[int, ...] | None = None, place: tuple[int, int] = (0, 0),
) -> Tensor:  # fmt: skip
    """Which values of a map one pass through a fresh layer keeps; the values are checked."""
    x = maps(*shape, seed=place[0] + 100 * place[1] + 7)
    numbers = tuple(range(20, 20 + shape[0])) if images is None else images
    dropout = KeyedDropout(
        Dropout(shape[1], shape[1], p, drops),  # type: ignore[arg-type]
        layer,
        MaskKey(seed, step, numbers),
    )
    dropout.place = at(*place)
    out: Tensor = dropout(x)
    mask = out != 0
    assert torch.equal(out, x * (mask.double() / (1 - p)))
    return mask


# --- single cells


@pytest.mark.parametrize("place", [(0, 0), (3, 0), (0, 1), (4, 7), (18, 25), (11, 13)])
@pytest.mark.parametrize("size", [(1, 1), (2, 5), (8, 9)])
def test_a_windows_mask_is_the_whole_maps_mask_cut_there(
    place: tuple[int, int], size: tuple[int, int]
) -> None:
    whole = kept((2, CHANNELS, ROWS + 8, COLS + 8))
    found = kept((2, CHANNELS, *size), place=place)
    (row, col), (rows, cols) = place, size
    assert torch.equal(found, whole[:, :, row : row + rows, col : col + cols])


def test_each_sample_has_a_place_of_its_own() -> None:
    """As tiles of an image that are computed in one batch have."""
    whole = kept((1, CHANNELS, ROWS, COLS), images=(9,))
    places = [(0, 0), (7, 3), (2, 20), (7, 3)]
    dropout = KeyedDropout(Dropout(CHANNELS, CHANNELS, 0.4, "cells"), 3, MaskKey(1, 2, (9,) * 4))
    dropout.place = places.__getitem__
    out = dropout(maps(4, CHANNELS, 6, 5))
    for found, (row, col) in zip(out != 0, places, strict=True):
        assert torch.equal(found, whole[0, :, row : row + 6, col : col + 5])


def test_tiles_put_together_are_the_whole_image() -> None:
    """Uneven ones, whose halos overlap, each computed in a pass of its own."""
    x, seen = maps(1, CHANNELS, ROWS, COLS), torch.zeros(ROWS, COLS, dtype=torch.int64)
    dropout = KeyedDropout(Dropout(CHANNELS, CHANNELS, 0.3, "cells"), 6, MaskKey(4, 1, (9,)))
    wanted = dropout(x)
    for top, bottom in ((0, 6), (3, 14), (13, ROWS)):
        for left, right in ((0, 11), (9, 10), (10, COLS)):
            dropout.place = at(top, left)
            part = dropout(x[:, :, top:bottom, left:right])
            assert torch.equal(part, wanted[:, :, top:bottom, left:right])
            seen[top:bottom, left:right] += 1
    assert seen.min() == 1 < seen.max()


@pytest.mark.parametrize("channels", [1, 2, 3, 5, 8])
def test_masks_of_cells_are_the_documented_function(channels: int) -> None:
    """A row's cells and their channels are counted through; the row stands behind the layer."""
    found = kept((2, channels, 4, 6), 0.35, images=(12, 5), place=(30, 17))
    for sample, image in enumerate((12, 5)):
        for row in range(4):
            numbers = uniform((17 + 6) * channels, 1, "dropout", 2, image, 3, 30 + row)
            wanted = (numbers >= 0.35).reshape(-1, channels)[17:]
            assert found[sample, :, row].T.tolist() == wanted.tolist()


def test_places_far_away_cost_no_more_than_near_ones() -> None:
    """The numbers before are counted, not drawn: these would be 10¹²."""
    found = kept((1, 2, 3, 4), 0.5, place=(2**31, 2**39))
    assert 0 < int(found.sum()) < found.numel()


@pytest.mark.parametrize("p", [0.02, 0.3, 0.5, 0.9])
def test_the_share_of_dropped_cells_is_the_probability(p: float) -> None:
    mask = kept((3, 4, 60, 70), p)
    number = mask.numel()
    bound = SIGMAS * (p * (1 - p) / number) ** 0.5
    assert abs(1 - float(mask.double().mean()) - p) <= bound
    # And so in each channel, row and column.
    for dims in ((0, 2, 3), (0, 1, 3), (0, 1, 2)):
        shares = 1 - mask.double().mean(dims)
        most = SIGMAS * (p * (1 - p) * len(shares) / number) ** 0.5
        assert float((shares - p).abs().max()) <= most


def agree(one: Tensor, other: Tensor) -> float:
    return float((one == other).double().mean())


@pytest.mark.parametrize("drops", KINDS)
def test_other_keys_give_other_masks(drops: str) -> None:
    """Masks agree as far as chance has it, and no further."""
    p, rows = 0.4, (30 if drops == "cells" else 1)
    wide = 1 if drops == "samples" else 60
    batch = 1000 if drops == "samples" else 20
    images = tuple(range(batch))

    def mask(seed: int = 1, step: int = 2, layer: int = 3, first: int = 0) -> Tensor:
        numbers = tuple(first + image for image in images)
        return kept(
            (batch, wide, rows, rows), p, drops, seed=seed, step=step, layer=layer, images=numbers
        )

    masks = {
        "as it was": mask(),
        "seed": mask(seed=2),
        "step": mask(step=3),
        "layer": mask(layer=4),
        "images": mask(first=batch),
    }
    number = next(iter(masks.values())).numel()
    chance = p**2 + (1 - p) ** 2
    bound = SIGMAS * (chance * (1 - chance) / number) ** 0.5
    for one, other in combinations(masks, 2):
        assert abs(agree(masks[one], masks[other]) - chance) <= bound, (one, other)
    assert torch.equal(masks["as it was"], mask())


def test_neighbouring_rows_columns_and_channels_do_not_agree_beyond_chance() -> None:
    p = 0.4
    mask = kept((2, 16, 50, 50), p)
    chance = p**2 + (1 - p) ** 2
    bound = SIGMAS * (chance / mask.numel()) ** 0.5
    for dim in (0, 1, 2, 3):
        size = mask.shape[dim]
        pair = mask.narrow(dim, 0, size - 1), mask.narrow(dim, 1, size - 1)
        more = (size / (size - 1)) ** 0.5
        assert abs(agree(*pair) - chance) <= bound * more


# --- whole samples


def test_samples_are_dropped_as_a_whole() -> None:
    mask = kept((200, 3, 4, 5), 0.4, "samples")
    first = mask[:, :1, :1, :1]
    assert torch.equal(mask, first.expand_as(mask))
    assert 0 < int(first.sum()) < 200


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_masks_of_samples_are_the_documented_function(p: float) -> None:
    images = (7, 0, 7, 123, 4, 5, 6)
    found = kept((7, 2, 2, 2), p, "samples", images=images)[:, 0, 0, 0]
    wanted = [bool(uniform(1, 1, "dropout", 2, image, 3)[0] >= p) for image in images]
    assert found.tolist() == wanted


def test_tiles_of_an_image_share_its_fate_wherever_they_lie() -> None:
    images = tuple(range(100))
    here, there = (
        kept((100, wide, size, 3), 0.5, "samples", images=images, place=place)[:, 0, 0, 0]
        for wide, size, place in ((2, 4, (0, 0)), (5, 1, (13, 400)))
    )
    assert torch.equal(here, there)
    assert 0 < int(here.sum()) < 100


@pytest.mark.parametrize("p", [0.1, 0.4, 0.85])
def test_the_share_of_dropped_samples_is_the_probability(p: float) -> None:
    number = 3000
    share = 1 - float(kept((number, 1, 1, 1), p, "samples").double().mean())
    assert abs(share - p) <= SIGMAS * (p * (1 - p) / number) ** 0.5


# --- these and whole channels


@pytest.mark.parametrize("drops", KINDS)
def test_gradients_pass_where_values_do(drops: str) -> None:
    dropout = KeyedDropout(Dropout(4, 4, 0.4, drops), 3, MaskKey(1, 2, (0, 1, 2, 3)))  # type: ignore[arg-type]
    x, weights = maps(4, 4, 5, 6).requires_grad_(), maps(4, 4, 5, 6, seed=2)
    out = dropout(x)
    (gradient,) = torch.autograd.grad(out, x, weights)
    assert torch.equal(gradient, weights * ((out != 0).double() / 0.6))
    assert 0 < int((out != 0).sum()) < out.numel()


@pytest.mark.parametrize("drops", KINDS)
def test_nothing_happens_outside_of_training_or_with_probability_0(drops: str) -> None:
    x = maps(30, 4, 5, 6)
    for p, training in ((0.9, False), (0.0, True)):
        dropout = KeyedDropout(Dropout(4, 4, p, drops), 3, MaskKey())  # type: ignore[arg-type]
        assert torch.equal(dropout.train(training)(x), x)
    dropout = KeyedDropout(Dropout(4, 4, 0.9, drops), 3, MaskKey(images=tuple(range(30))))  # type: ignore[arg-type]
    assert not torch.equal(dropout.train()(x), x)


@pytest.mark.parametrize("drops", KINDS)
def test_a_pipelines_micro_batch_brings_its_own_images(drops: str) -> None:
    key = MaskKey(1, 2, (0, 1, 2, 3))
    dropout = KeyedDropout(Dropout(4, 4, 0.5, drops), 3, key)  # type: ignore[arg-type]
    x, numbers = maps(8, 4, 5, 6), (31, 2, 31, 5, 0, 8, 77, 1)
    layout = inspect_skip_layout([])
    with use_skip_tracker(OriginTracker(layout, Origin(numbers))):
        found = dropout(x)
    assert torch.equal(found != 0, kept((8, 4, 5, 6), 0.5, drops, images=numbers))
    with pytest.raises(ValueError, match="batch: 8, images: 4"):
        dropout(x)


@pytest.mark.parametrize("drops", KINDS)
def test_masks_do_not_touch_torchs_generator(drops: str) -> None:
    torch.manual_seed(4)
    before = torch.get_rng_state()
    first = kept((6, 4, 5, 6), 0.4, drops)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    assert torch.equal(kept((6, 4, 5, 6), 0.4, drops), first)
