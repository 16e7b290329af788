"""Windows of a turned image are the turned windows of the source, beyond its edges too."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilenet.geometry.symmetries import AS_IS, SYMMETRIES, Symmetry, symmetries
from tilenet.geometry.windows import Window, reflected

PIXELS = np.random.default_rng(1).normal(size=(2, 5, 3))


def seen(image: np.ndarray, window: Window) -> np.ndarray:
    rows = reflected(window.row, window.height, image.shape[-2])
    cols = reflected(window.col, window.width, image.shape[-1])
    return image[..., rows, :][..., cols]


@given(
    st.sampled_from(SYMMETRIES),
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.tuples(st.integers(-30, 30), st.integers(-30, 30)),
    st.tuples(st.integers(1, 25), st.integers(1, 25)),
)
def test_a_window_of_the_turned_image_is_read_from_the_source(
    symmetry: Symmetry, size: tuple[int, int], origin: tuple[int, int], shape: tuple[int, int]
) -> None:
    source = np.random.default_rng(size).normal(size=(2, *size))
    turned = symmetry.turn(source)
    assert turned.shape[1:] == symmetry.size(*size)
    window = Window(*origin, *shape)
    found = symmetry.turn(seen(source, symmetry.source(window, *size)))
    assert np.array_equal(found, seen(turned, window))


def views(flips: bool, rotations: bool) -> list[bytes]:
    return [
        str((turned := one.turn(PIXELS)).shape).encode() + turned.tobytes()
        for one in symmetries(flips=flips, rotations=rotations)
    ]


@pytest.mark.parametrize(
    ("flips", "rotations", "wanted"),
    [
        (False, False, [PIXELS]),
        (True, False, [np.flip(PIXELS, axes) for axes in [(), (1,), (2,), (1, 2)]]),
        (False, True, [np.rot90(PIXELS, turns, (1, 2)) for turns in range(4)]),
        (
            True,
            True,
            [
                np.flip(np.rot90(PIXELS, turns, (1, 2)), axes)
                for turns in range(4)
                for axes in [(), (1,)]
            ],
        ),
    ],
    ids=["neither", "flips", "rotations", "both"],
)
def test_flips_and_rotations_are_numpys(
    flips: bool, rotations: bool, wanted: list[np.ndarray]
) -> None:
    found = views(flips, rotations)
    assert len(found) == len(set(found)) == len(wanted)
    assert set(found) == {str(one.shape).encode() + one.tobytes() for one in wanted}


def test_the_first_changes_nothing() -> None:
    window = Window(-1, 2, 7, 4)
    for flips, rotations in [(False, False), (True, False), (False, True), (True, True)]:
        assert symmetries(flips=flips, rotations=rotations)[0] == AS_IS
    assert AS_IS.source(window, 9, 8) == window
    assert np.array_equal(AS_IS.turn(PIXELS), PIXELS)
