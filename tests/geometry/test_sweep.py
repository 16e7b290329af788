"""Sweeps in numbers: each row once, from rows that are there, and no other rows are kept."""

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilenet.geometry import sweep as sweeping
from tilenet.geometry.halo import context_of
from tilenet.geometry.layers import (
    Activation,
    Conv,
    Expand,
    GlobalPool,
    Join,
    Layer,
    Pool,
    Stash,
    TransposedConv,
    Upsample,
)
from tilenet.geometry.maps import map_grids, map_shapes
from tilenet.geometry.sweep import Strip, row_readers, strip_edges, sweep
from tilenet.geometry.unet import UNetOptions, unet_layers

KEEPING = (
    Conv(1, 1, padding=1),
    Conv(1, 1, 5, dilation=2, padding=4),
    Conv(1, 1, 7, padding=3),
    Pool(1, 1, 3, 1, 1),
    Activation(1, 1),
)
SMALLER = (
    Conv(1, 1, 3, 2, padding=1),
    Conv(1, 1, 2, 2),
    Conv(1, 1, 4, 2, padding=1),
    Conv(1, 1, 3, 2, extra=1),
    Pool(1, 1),
    Pool(1, 1, 3, 2, 1),
    Pool(1, 1, mode="corners"),
)
LARGER = (
    Upsample(1, 1),
    Upsample(1, 1, mode="bilinear"),
    Upsample(1, 1, mode="bilinear", corners=True),
    Upsample(1, 1, mode="bicubic"),
    TransposedConv(1, 1),
    TransposedConv(1, 1, 4, 2, 1),
    TransposedConv(1, 1, 3, 2, 1, 1),
)


@st.composite
def networks(draw: st.DrawFn) -> tuple[Layer, ...]:
    """Down and up again, with maps that wait for the way back, and gates of the whole image."""
    depth = draw(st.integers(0, 3))

    def some(kinds: tuple[Layer, ...]) -> list[Layer]:
        return draw(st.lists(st.sampled_from(kinds), max_size=2))

    layers: list[Layer] = some(KEEPING)
    for level in range(depth):
        layers += [Stash(1, 1, f"{level}"), draw(st.sampled_from(SMALLER)), *some(KEEPING)]
    if draw(st.booleans()):
        layers += [Stash(1, 1, "sizes", sizes=True), Stash(1, 1, "x"), GlobalPool(1, 1, 2)]
        layers += [Activation(1, 1), Expand(1, 1, "sizes"), Join(1, 1, ("x",), "multiply")]
    for level in reversed(range(depth)):
        layers += [draw(st.sampled_from(LARGER)), Join(1, 1, (f"{level}",), "add"), *some(KEEPING)]
    return (*layers, Conv(1, 1, 1))


def check(layers: tuple[Layer, ...], rows: int, strips: tuple[Strip, ...]) -> None:
    grids, shapes, readers = map_grids(layers), map_shapes(layers, rows, rows), row_readers(layers)
    held = [(0, 0) for _ in shapes]
    read: list[set[int]] = [set() for _ in shapes]
    kept: list[list[set[int]]] = [[] for _ in shapes]
    for strip in strips:
        here = [range(first, stop) for first, stop in held]
        here[0] = range(held[0][0], strip.image[1])
        for number, one in enumerate(strip.layers):
            after = number + 1
            start, stop = one.out
            assert start == held[after][1], "each row once, in order"
            here[after] = range(held[after][0], stop)
            if not readers[number]:
                continue
            needs = [layers[number].needs(row, row) for row in range(start, stop)]
            looked = {cell for low, high in needs for cell in range(low, high + 1)}
            assert not looked or (min(looked), max(looked) + 1) == one.need
            for source in readers[number]:
                inside = {cell for cell in looked if 0 <= cell < shapes[source].rows}
                assert inside <= set(here[source]), "what is looked at is there"
                read[source] |= inside
        held = list(strip.held)
        for source, (first, stop) in enumerate(held):
            kept[source].append(set(range(first, stop)))
    assert held[-1][1] == shapes[-1].rows
    for source, before in enumerate(kept):
        if not grids[source].whole:
            assert before[-1] == set()
            assert set().union(*before) <= read[source], "what is kept is looked at"


@given(networks(), st.integers(1, 90), st.integers(6, 20))
@settings(max_examples=150)
def test_each_row_once_and_no_more_kept_than_needed(
    layers: tuple[Layer, ...], strip_rows: int, units: int
) -> None:
    rows = 8 * units
    check(layers, rows, tuple(sweep(layers, strip_edges(rows, strip_rows))))


@pytest.mark.parametrize("upsampling", ["nearest", "bilinear", "transposed"])
def test_the_output_is_late_by_the_context_at_the_most(upsampling: str) -> None:
    layers = unet_layers(UNetOptions(poolings=3, base=2, bands=1, classes=1, upsampling=upsampling))
    context = context_of(layers)
    rows, strip_rows = 40 * context.alignment_px, 5 * context.alignment_px
    strips = tuple(sweep(layers, strip_edges(rows, strip_rows)))
    check(layers, rows, strips)
    outputs = [strip.output for strip in strips]
    assert outputs[0][0] == 0
    assert outputs[-1][1] == rows
    assert all(a[1] == b[0] for a, b in pairwise(outputs))
    late = {strip.image[1] - strip.output[1] for strip in strips[1:-1]}
    assert max(late) <= context.context_any_pixel_px
    whole = sum(one.num_elements for one in map_shapes(layers, rows, 64))
    held = max(
        sum((stop - first) * one.cols * one.channels for (first, stop), one in zip(
            strip.held, map_shapes(layers, rows, 64), strict=True))
        for strip in strips
    )  # fmt: skip
    assert held < whole / 10


@pytest.mark.parametrize("change", ["keep", "wait"])
def test_a_row_too_few_is_seen(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = unet_layers(UNetOptions(poolings=2, base=2, bands=1, classes=1))
    if change == "keep":
        right = sweeping._still_read
        monkeypatch.setattr(sweeping, "_still_read", lambda *of: right(*of) + 1)
    else:
        ready = sweeping._ready
        monkeypatch.setattr(sweeping, "_ready", lambda *of: min(ready(*of) + 1, of[2]))
    with pytest.raises(AssertionError, match="is there"):
        check(layers, 64, tuple(sweep(layers, strip_edges(64, Random(1).choice([8, 12, 20])))))


@pytest.mark.parametrize("cut", [1, 9, 20, 25])
def test_partitions_keep_the_rows_that_their_own_layers_look_at(cut: int) -> None:
    layers, edges = unet_layers(UNetOptions(2, base=2, bands=2, classes=2)), strip_edges(96, 8)
    owns, readers = (range(cut), range(cut, len(layers))), row_readers(layers)
    parts = [list(sweep(layers, edges, own)) for own in owns]
    for whole, *cuts in zip(sweep(layers, edges), *parts, strict=True):
        assert all(one.layers == whole.layers for one in cuts)
        for map_, (first, stop) in enumerate(whole.held):
            held = [one.held[map_] for one in cuts]
            assert min(held) == (first, stop)
            for own, rows in zip(owns, held, strict=True):
                if not any(map_ in readers[number] for number in own):
                    assert rows == (stop, stop)
