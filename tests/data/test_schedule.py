"""What each step sees is a function of (seed, step) and nothing else."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilenet.data.crop_places import CropPlaces, crop_places
from tilenet.data.schedule import CropSchedule, ImageSchedule
from tilenet.errors import TilenetError
from tilenet.geometry.symmetries import AS_IS, SYMMETRIES
from tilenet.geometry.windows import Window
from tilenet.planning.micro_batches import mini_batch_sizes
from tilenet.random_keys import key

SIZES = tuple((100 + 7 * n, 90 + 3 * n) for n in range(11))


def order_of(schedule: ImageSchedule, epoch: int) -> list[int]:
    return [image for step in numbers(schedule, epoch) for image in step]


def numbers(schedule: ImageSchedule, epoch: int) -> list[list[int]]:
    first = epoch * schedule.steps_per_epoch
    steps = range(first, first + schedule.steps_per_epoch)
    return [[sample.image for sample in schedule.samples(step)] for step in steps]


@pytest.mark.parametrize("batch_size", [1, 2, 5, 11, 20])
def test_each_image_is_seen_once_an_epoch_as_a_whole(batch_size: int) -> None:
    schedule = ImageSchedule(3, batch_size, SIZES)
    for epoch in range(4):
        seen = numbers(schedule, epoch)
        assert sorted(order_of(schedule, epoch)) == list(range(11))
        assert [len(step) for step in seen[:-1]] == [batch_size] * (len(seen) - 1)
    for sample in schedule.samples(0):
        assert sample.region == Window(0, 0, *SIZES[sample.image])
        assert sample.number == sample.image


def test_the_order_depends_on_seed_and_epoch_and_not_on_the_batch_size() -> None:
    schedule = ImageSchedule(3, 2, SIZES)
    orders = [order_of(schedule, epoch) for epoch in range(50)]
    assert len({tuple(order) for order in orders}) == 50
    assert order_of(replace(schedule, seed=4), 0) != orders[0]
    for batch_size in (1, 3, 11):
        other = replace(schedule, batch_size=batch_size)
        assert [order_of(other, epoch) for epoch in range(50)] == orders
    firsts = Counter(order[0] for order in orders)
    assert len(firsts) > 7  # no image is the first of its own accord


# --- crops


def places_of(labelled: np.ndarray, crop_px: int, cell_px: int) -> CropPlaces:
    return crop_places(labelled[None].view(np.uint8), crop_px, cell_px)


def listed(places: CropPlaces) -> list[tuple[int, int]]:
    return [places[number] for number in range(len(places))]


@pytest.mark.parametrize(
    ("crop_px", "nearest"), [(15, 16), (1, 16), (0, 16), (50, 48), (57, 64), (-16, 16)]
)
def test_a_crop_off_the_alignment_is_refused_with_the_nearest(crop_px: int, nearest: int) -> None:
    with pytest.raises(TilenetError, match=rf"px: {crop_px}, stride: 16\); nearest: {nearest}$"):
        places_of(np.ones((9, 9), bool), crop_px, 16)


def crops(batch_size: int = 4, seed: int = 5) -> CropSchedule:
    rng = np.random.default_rng(1)
    sizes = ((100, 130), (64, 64), (31, 200))
    places = []
    for height, width in sizes:
        cells = rng.random((-(-height // 8), -(-width // 8))) < 0.2
        places.append(places_of(cells, 32, 8))
    return CropSchedule(seed, batch_size, 32, sizes, tuple(places))


def test_crops_are_windows_of_their_image_cut_off_at_its_edge() -> None:
    schedule = crops()
    places = [set(listed(found)) for found in schedule.places]
    cut_off = 0
    for step in range(300):
        samples = schedule.samples(step)
        assert [sample.number for sample in samples] == [0, 1, 2, 3]
        for sample in samples:
            window, (height, width) = sample.region, schedule.sizes[sample.image]
            assert (window.row, window.col) in places[sample.image]
            assert window.height == min(32, height - window.row) > 0
            assert window.width == min(32, width - window.col) > 0
            cut_off += window.height * window.width < 32 * 32
    assert cut_off > 20


def test_crops_depend_on_seed_and_step_and_not_on_the_batch_size() -> None:
    schedule = crops()
    steps = [schedule.samples(step) for step in range(40)]
    assert [schedule.samples(step) for step in reversed(range(40))] == steps[::-1]
    assert len(set(steps)) == 40
    assert crops(batch_size=9).samples(7)[:4] == steps[7]
    assert crops(seed=6).samples(7) != steps[7]


def test_images_without_labels_are_never_drawn() -> None:
    schedule = crops()
    none = places_of(np.zeros((13, 17), bool), 32, 8)
    places = (none, schedule.places[1], none)
    sparse = replace(schedule, places=places)
    assert {s.image for step in range(50) for s in sparse.samples(step)} == {1}


def test_an_epoch_of_crops_draws_about_as_many_pixels_as_there_are_in_reach() -> None:
    places = places_of(np.ones((64, 64), bool), 256, 16)  # an image of 1024 × 1024 px
    schedule = CropSchedule(1, 4, 256, ((1024, 1024),), (places,))
    drawn = schedule.steps_per_epoch * 4 * 256**2
    assert 0.5 < drawn / 1024**2 < 2


def test_an_epoch_of_crops_is_at_least_a_step() -> None:
    schedule = CropSchedule(1, 400, 32, ((32, 32),), (places_of(np.ones((4, 4), bool), 32, 8),))
    assert schedule.steps_per_epoch == 1


# --- crops drawn by class


def by_class(oversample: float, batch_size: int = 8) -> tuple[CropSchedule, list[np.ndarray]]:
    """Crops of three images, and which cells hold which of eleven classes: class 9 is rare."""
    rng = np.random.default_rng(7)
    sizes = ((230, 310), (64, 64), (140, 90))
    held, places = [], []
    for number, (height, width) in enumerate(sizes):
        cells = rng.random((11, -(-height // 8), -(-width // 8))) < 0.15
        cells[[3, 10]] = False  # these do not occur
        cells[9] = False
        if number == 0:
            cells[9, 4, 5] = cells[9, 20, 30] = True
        held.append(cells)
        planes = np.packbits(cells, axis=0, bitorder="little")
        places.append(crop_places(planes, 32, 8, by_class=True))
    schedule = CropSchedule(3, batch_size, 32, sizes, tuple(places), (AS_IS,), oversample)
    return schedule, held


def holds(held: list[np.ndarray], image: int, row: int, col: int) -> frozenset[int]:
    part = held[image][:, row // 8 : row // 8 + 4, col // 8 : col // 8 + 4]
    return frozenset(np.flatnonzero(part.any(axis=(1, 2))).tolist())


@pytest.mark.parametrize("oversample", [0.0, 0.3, 1.0])
def test_class_and_place_are_functions_of_their_keys(oversample: float) -> None:
    """Each class that occurs is as likely, and each place of those that hold it."""
    schedule, held = by_class(oversample)
    everywhere = [(i, *place) for i, p in enumerate(schedule.places) for place in listed(p)]
    occurring = [0, 1, 2, 4, 5, 6, 7, 8, 9]
    places_of_class = {
        label: [place for place in everywhere if label in holds(held, *place)]
        for label in occurring
    }
    for step in range(40):
        for number, one in enumerate(schedule.samples(step)):
            among = everywhere
            if key(3, "oversample", step, number) / 2**128 < oversample:
                label = occurring[key(3, "class", step, number) % len(occurring)]
                among = places_of_class[label]
            wanted = among[key(3, "crop", step, number) % len(among)]
            assert (one.image, one.region.row, one.region.col) == wanted


def test_the_other_crops_of_a_step_stay_what_they_were() -> None:
    schedule, _ = by_class(0.4)
    plain, alone = replace(schedule, oversample=0.0), replace(schedule, batch_size=3)
    changed = [
        one != other
        for step in range(200)
        for one, other in zip(schedule.samples(step), plain.samples(step), strict=True)
    ]
    assert 0.35 < sum(changed) / len(changed) < 0.45
    assert alone.samples(11) == schedule.samples(11)[:3]


# --- symmetries


@pytest.mark.parametrize("kind", ["images", "crops"])
def test_symmetries_are_drawn_for_each_sample_of_each_step(kind: str) -> None:
    """Equally often, and whatever else is in the step."""
    schedule = replace(
        crops(batch_size=6) if kind == "crops" else ImageSchedule(5, 3, SIZES),
        symmetries=SYMMETRIES,
    )
    drawn = Counter(s.symmetry for step in range(2000) for s in schedule.samples(step))
    assert set(drawn) == set(SYMMETRIES)
    expected = sum(drawn.values()) / 8
    chi2 = sum((count - expected) ** 2 / expected for count in drawn.values())
    assert abs(chi2 - 7) < 5 * 14**0.5
    for sample in (one for step in range(20) for one in schedule.samples(step)):
        height, width = sample.region.height, sample.region.width
        turned = (width, height) if sample.symmetry.transposed else (height, width)
        assert sample.size == turned
    steps = [[s.symmetry for s in schedule.samples(step)] for step in range(40)]
    assert [[s.symmetry for s in schedule.samples(step)] for step in reversed(range(40))] == (
        steps[::-1]
    )
    other = replace(schedule, seed=6)
    assert [[s.symmetry for s in other.samples(step)] for step in range(40)] != steps


def test_the_regions_are_the_same_with_symmetries_and_without() -> None:
    turned = replace(crops(), symmetries=SYMMETRIES)
    for step in range(20):
        plain = crops().samples(step)
        assert [replace(s, symmetry=AS_IS) for s in turned.samples(step)] == list(plain)
        assert all(s.size == (s.region.height, s.region.width) for s in plain)


# --- mini-batches


@given(st.integers(0, 200), st.integers(1, 40))
def test_mini_batches_are_few_and_even_and_hold_all_tiles(tiles: int, most: int) -> None:
    sizes = mini_batch_sizes(tiles, most)
    assert sum(sizes) == tiles
    assert len(sizes) == -(-tiles // most)
    if sizes:
        assert 1 <= max(sizes) - 1 <= min(sizes) <= max(sizes) <= most or set(sizes) == {1}
