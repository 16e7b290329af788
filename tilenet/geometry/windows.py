"""A part of an image: from coordinates to the window of pixels under them."""

from dataclasses import dataclass
from math import ceil, floor

from tilenet.errors import TilenetError


@dataclass(frozen=True)
class Window:
    """A rectangle of pixels; it may reach over the raster's edges."""

    row: int
    col: int
    height: int
    width: int


def reflected(first: int, count: int, pixels: int) -> list[int]:
    """Indices 0 … pixels − 1 that stand at `first` … `first + count − 1` of the endless raster.

    Beyond its edges the raster is reflected, the edge pixel once, again and again with period
    2·(pixels − 1); torch's own reflection padding refuses more than one repetition.
    """
    if pixels == 1:
        return [0] * count
    period = 2 * (pixels - 1)
    places = (place % period for place in range(first, first + count))
    return [min(place, period - place) for place in places]


# A corner this close to a pixel's edge, in pixels, lies on it: coordinates have been rounded.
ON_EDGE_PX = 1e-6

FAR = 1e30  # beyond it is no coordinate, and products would overflow


@dataclass(frozen=True)
class Part:
    """A part of images, named by coordinates or by pixels.

    Attributes:
        bbox: xmin, ymin, xmax, ymax in each image's CRS.
        window: Row, column, height and width, instead of `bbox`.
    """

    bbox: tuple[float, ...] | None = None
    window: tuple[int, ...] | None = None

    def of(
        self, transform: tuple[float, ...], size: tuple[int, int], image: str = "image"
    ) -> Window:
        """The pixels of the part; all where nothing is named.

        Args:
            transform: Transform of the image, see `window_of_bbox`.
            size: Height and width of the image.
            image: Name of the image, for errors.

        Raises:
            TilenetError: The part has no pixels.
        """
        if self.bbox is not None:
            return window_of_bbox(self.bbox, transform, size, image)
        if self.window is not None:
            return checked_window(self.window, size, image)
        return Window(0, 0, *size)

    def __str__(self) -> str:
        name, numbers = ("bbox", self.bbox) if self.bbox is not None else ("window", self.window)
        return f"{name} {','.join(f'{number:.17g}' for number in numbers or ())}"


def window_of_bbox(
    bbox: tuple[float, ...],
    transform: tuple[float, ...],
    size: tuple[int, int],
    image: str = "image",
) -> Window:
    """The smallest window of an image that covers the part of a box which lies on it.

    Args:
        bbox: xmin, ymin, xmax, ymax, in the image's coordinates.
        transform: a, b, c, d, e, f: x = a·col + b·row + c, y = d·col + e·row + f; rotated grids
            have b and d. The box stays upright in coordinates and so is turned on their pixels.
        size: Height and width of the image.
        image: Name of the image, for errors.

    Raises:
        TilenetError: The box is empty, not finite, or lies outside the image.
    """
    text = ",".join(f"{value:.10g}" for value in bbox)
    if len(bbox) != 4 or not all(abs(value) < FAR for value in bbox):
        raise TilenetError(
            f"a bbox is four finite numbers, XMIN,YMIN,XMAX,YMAX (bbox: {text}); give all four in "
            "the image's CRS"
        )
    xmin, ymin, xmax, ymax = bbox
    if not (xmin < xmax and ymin < ymax):
        raise TilenetError(
            f"a bbox needs XMIN below XMAX and YMIN below YMAX (bbox: {text}); put the smaller "
            "number of each axis first"
        )
    a, b, c, d, e, f = transform[:6]
    cols, rows = [], []
    for x in (xmin - c, xmax - c):
        for y in (ymin - f, ymax - f):
            cols.append((e * x - b * y) / (a * e - b * d))
            rows.append((a * y - d * x) / (a * e - b * d))
    top, bottom = _edges(rows)
    left, right = _edges(cols)
    window = overlap(Window(top, left, bottom - top, right - left), Window(0, 0, *size))
    if window is None:
        height, width = size
        xs = [a * col + b * row + c for col in (0, width) for row in (0, height)]
        ys = [d * col + e * row + f for col in (0, width) for row in (0, height)]
        raise TilenetError(
            f"a bbox must touch the image (bbox: {text}, {image}: {min(xs):.10g},{min(ys):.10g},"
            f"{max(xs):.10g},{max(ys):.10g}); give coordinates in the image's own CRS"
        )
    return window


def _edges(places: list[float]) -> tuple[int, int]:
    """First pixel and the one after the last."""
    first = floor(min(places) + ON_EDGE_PX)
    return first, max(first + 1, ceil(max(places) - ON_EDGE_PX))


def checked_window(numbers: tuple[int, ...], size: tuple[int, int], image: str = "image") -> Window:
    """The window of row, column, height and width.

    Raises:
        TilenetError: It is empty or reaches over the image's edges.
    """
    text = ",".join(str(number) for number in numbers)
    if len(numbers) != 4:
        raise TilenetError(
            f"a window is four whole numbers, ROW,COL,HEIGHT,WIDTH (window: {text}); give all four"
        )
    window = Window(*numbers)
    if window != overlap(window, Window(0, 0, *size)):
        raise TilenetError(
            f"a window has pixels and lies inside the image (window: {text}, {image}: {size[0]} × "
            f"{size[1]} px); rows and columns are counted from 0"
        )
    return window


def overlap(window: Window, other: Window) -> Window | None:
    """The pixels of both; None: they do not meet."""
    top, left = max(window.row, other.row), max(window.col, other.col)
    bottom = min(window.row + window.height, other.row + other.height)
    right = min(window.col + window.width, other.col + other.width)
    if bottom <= top or right <= left:
        return None
    return Window(top, left, bottom - top, right - left)
