"""Choose the small image of a run's proof: the cheapest one that is cut as the run's own images.

The time of rank 0 counts, which computes its tiles and then the whole image.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import prod

from tilenet.errors import TilenetError
from tilenet.geometry.halo_rule import HaloRule
from tilenet.geometry.layers import Conv, Layer, TransposedConv
from tilenet.geometry.maps import check_cells, map_shapes
from tilenet.geometry.ownership import check_shares
from tilenet.geometry.tiles import Cut, Span, Tiling, cut
from tilenet.geometry.windows import Window
from tilenet.planning.compatibility import whole_image

SECONDS = 2.0  # of a core
SHARE = 0.02  # of the run, where that is more
LEAST_PX = 64  # height and width: networks do not do the same on the smallest images
MOST_UNITS = 256  # alignment units of a tile that are looked through

# Measured with float64 on a core of 3 GHz: 6 to 16e9 multiplications per second; of convolutions in
# groups a tenth of that, and 10 µs per group, as of all layers some nanoseconds per value.
SPEED = 5e9
SLOWER, PER_GROUP, PER_VALUE = 8, 50_000, 10


@dataclass(frozen=True)
class ImageQuestion:
    """The requirements of a small image: the features of the run that it tests, and its time.

    Attributes:
        rule: Halo and alignment of the run's tiles.
        grid: Tiles of the small image along rows and columns, see `proof_grid`.
        like: Tiling of an image of the run; the small image has the same remainders.
        tiles: Most tiles of a rank.
        images: Images of a replica.
        replicas: Replicas that rank 0 computes the images of.
        backward: Whether gradients are compared.
        run_pixels: Pixels that each rank computes in the run.
        patience_s: Seconds of a core that it may take; more where that is little of the run.
    """

    layers: tuple[Layer, ...]
    rule: HaloRule
    grid: tuple[int, int]
    like: Tiling
    tiles: int = 1
    images: int = 1
    replicas: int = 1
    backward: bool = False
    run_pixels: float = 0
    patience_s: float = SECONDS

    def seconds(self, tiling: Tiling) -> float:
        """Seconds that rank 0 takes."""
        own = self.tiles * self.images * _work(self.layers, *tiling.largest_read)
        whole = self.images * self.replicas * _work(self.layers, *tiling.extended)
        return (own + whole) * (3 if self.backward else 1) / SPEED

    def most_seconds(self, tiling: Tiling) -> float:
        """Seconds that it may take."""
        pixels = prod(tiling.extended)
        once = _work(self.layers, *tiling.extended) / pixels * (3 if self.backward else 1) / SPEED
        return max(self.patience_s, SHARE * self.run_pixels * once)


def proof_grid(run: tuple[int, int], ranks: tuple[int, int]) -> tuple[int, int]:
    """Return the fewest tiles that have all kinds of neighbours and give each rank one."""
    rows, cols = (min(tiles, max(3, least)) for tiles, least in zip(run, ranks, strict=True))
    return rows, cols


def choose_small_image(question: ImageQuestion) -> Tiling:
    """Choose: one that tests the halo, or else the smallest.

    Raises:
        TilenetError: No size is legal, or each takes too long.
    """
    rows, cols = (_smallest_axis(question, axis) for axis in (0, 1))
    sizes = (_longer(question, 0, rows), cols), (rows, _longer(question, 1, cols)), (rows, cols)
    tilings = [tiling for size in sizes if (tiling := _with_norms(question, size)) is not None]
    for tiling in sorted(tilings, key=lambda tiling: bool(untested_halo(tiling))):
        if question.seconds(tiling) <= question.most_seconds(tiling):
            return tiling
    if not tilings:
        raise TilenetError(f"no image of up to {MOST_UNITS} alignment units per tile is legal")
    raise TilenetError(
        f"the smallest image for {question.grid[0]} × {question.grid[1]} tiles "
        f"({rows} × {cols} px) takes about {question.seconds(tilings[-1]):.0f} s, more than "
        f"{question.patience_s:g} s and {SHARE:.0%} of the run"
    )


def choose_number_too(question: ImageQuestion) -> tuple[ImageQuestion, Tiling]:
    """Choose a small image as `choose_small_image` does, or two where norms need two.

    Raises:
        TilenetError: See `choose_small_image`.
    """
    try:
        return question, choose_small_image(question)
    except TilenetError:
        if whole_image(question.layers) != "batch norm":
            raise
        question = replace(question, images=2)  # of one average a norm has no spread
        return question, choose_small_image(question)


def untested_halo(tiling: Tiling) -> str:
    """The note on tiles that a shorter halo would not harm; empty: they test it."""
    if tiling.rule.exchanged or len(tiling.tiles) == 1 or not tiling.rule.halo_px:
        return ""
    if any(_tests_halo(spans) for spans in (tiling.rows, tiling.cols)):
        return ""
    height, width = tiling.extended
    return f"; {height} × {width} px are too few to test the halo"


def _tests_halo(spans: tuple[Span, ...]) -> bool:
    """Whether a tile begins and ends inside the image, as those at an edge have twice the halo.

    Of two tiles, whether one ends inside.
    """
    end = spans[-1].first + spans[-1].own
    inner = [span.start > 0 or len(spans) == 2 for span in spans]
    return any(
        begins and span.start + span.read < end
        for span, begins in zip(spans, inner, strict=True)
        if len(spans) > 1
    )


def _sizes(question: ImageQuestion, axis: int) -> list[int]:
    """Pixels along an axis that leave the run's own remainder of alignment units."""
    unit, tiles = question.rule.alignment_px, question.grid[axis]
    rest = question.like.extended[axis] // unit % tiles
    return [(tiles * each + rest) * unit for each in range(1, MOST_UNITS)]


def _spans(question: ImageQuestion, axis: int, pixels: int) -> tuple[Span, ...]:
    """The tiles along an axis."""
    return cut(pixels, pixels, Cut(grid=(question.grid[axis],) * 2), question.rule).rows


def _smallest_axis(question: ImageQuestion, axis: int) -> int:
    """Return the smallest legal size along an axis, or the largest size tried if none is legal."""
    name, sizes = ("rows", "columns")[axis], _sizes(question, axis)
    for pixels in sizes:
        check = partial(check_shares, question.layers, _spans(question, axis, pixels), name)
        if pixels >= LEAST_PX and (not question.rule.exchanged or _legal(check)):
            return pixels
    return sizes[-1]


def _longer(question: ImageQuestion, axis: int, least: int) -> int:
    """Smallest size along an axis that tests the halo; `least` where no size does."""
    can_test = question.grid[axis] > 1 and question.rule.halo_px
    for pixels in _sizes(question, axis) if can_test else ():
        if pixels >= least and _tests_halo(_spans(question, axis, pixels)):
            return pixels
    return least


def _with_norms(question: ImageQuestion, least: tuple[int, int]) -> Tiling | None:
    """Return the smallest image from a size on with enough cells for the norms' statistics."""
    sizes = ([px for px in _sizes(question, axis) if px >= least[axis]] for axis in (0, 1))
    images = question.images * question.replicas if question.backward else None
    for height, width in zip(*sizes, strict=False):
        tiling = cut(height, width, Cut(grid=question.grid), question.rule)
        whole = Window(0, 0, *tiling.extended)
        if _legal(partial(check_cells, question.layers, whole, images)):
            return tiling
    return None


def _legal(check: Callable[[], None]) -> bool:
    try:
        check()
    except TilenetError:
        return False
    return True


def _work(layers: tuple[Layer, ...], height: int, width: int) -> float:
    """Return the multiplications of one pass forward, with other work in equal time."""
    shapes, total = map_shapes(layers, height, width), 0.0
    for layer, before, after in zip(layers, shapes, shapes[1:], strict=False):
        total += PER_VALUE * after.num_elements
        if isinstance(layer, Conv | TransposedConv):
            cells = before if isinstance(layer, TransposedConv) else after
            slower = min(layer.groups, SLOWER)
            total += slower * layer.num_parameters * cells.rows * cells.cols
            total += PER_GROUP * layer.groups if layer.groups > 1 else 0
    return total
