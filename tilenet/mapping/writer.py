"""Write maps by windows: one writer, a file aside, then a cloud-optimised GeoTIFF in its place.

A map that may be interrupted keeps the file aside and a journal of the tiles in it.
"""

import contextlib
import errno
import os
import re
from collections.abc import Callable, Sequence
from colorsys import hsv_to_rgb
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

import numpy as np
import rasterio
from affine import Affine
from numpy.typing import NDArray
from rasterio.io import MemoryFile
from rasterio.windows import Window as FileWindow

from tilenet.data.rasters.opening import quiet
from tilenet.data.rasters.raster import GDAL_ERRORS, Raster
from tilenet.data.rasters.stack import stacked_paths
from tilenet.errors import TilenetError
from tilenet.geometry.windows import Window, overlap
from tilenet.mapping.cog import CogJob, cannot_write, template_like, write_cog
from tilenet.mapping.journal import (
    Done,
    MapJournal,
    Part,
    frame_of,
    part_of,
    why_not_kept,
    wrong_pixels,
)
from tilenet.mapping.tiff_header import BLOCK_PX, Template
from tilenet.storage.atomic import check_name, put, sync
from tilenet.storage.lock import Lock

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "MapKind",
    "MapWriter",
    "check_target",
    "class_colours",
    "finish_map",
    "journal_of",
    "map_lock",
    "put_map",
]


def put_map(aside: str, path: str, categories: tuple[str, ...]) -> None:
    """Put a finished map in its place, with the names of its values in GDAL's file next to it.

    What an older map left there, names and statistics, would be taken for this one's.

    Args:
        aside: The map, in the same directory.
        path: Its place.
        categories: Meanings of the values 0, 1, …; empty: they have none.
    """
    side_file, names = f"{path}.aux.xml", f"{aside}.names"
    try:
        if categories:
            named = "".join(f"<Category>{escape(name)}</Category>" for name in categories)
            with open(names, "w", encoding="utf-8") as file:
                file.write(
                    '<PAMDataset><PAMRasterBand band="1"><CategoryNames>'
                    f"{named}</CategoryNames></PAMRasterBand></PAMDataset>\n"
                )
        if os.path.exists(side_file):
            os.remove(side_file)
        put(aside, path)
        if categories:
            put(names, side_file)
    finally:
        if os.path.exists(names):
            os.remove(names)


@dataclass(frozen=True)
class MapKind:
    """What a map holds.

    Attributes:
        bands: Number of bands.
        dtype: Dtype of the pixels.
        nodata: Value of pixels without data.
        classes: Names of the classes: the bands' names, or the meanings of the values of a class
            map of one band, which then has a colour table.
        scale: What values count in: GDAL shows them multiplied by it.
        unit: Unit of the numbers; None: they have none.
        note: On how the map was made, where it is approximate.
    """

    bands: int
    dtype: str
    nodata: float
    classes: tuple[str, ...]
    scale: float = 1.0
    unit: str | None = None
    note: str | None = None

    @property
    def of_classes(self) -> bool:
        """Whether values are classes."""
        return self.bands == 1 and np.dtype(self.dtype).kind == "u" and self.scale == 1


def check_target(path: str, *, overwrite: bool, image: str | None = None) -> None:
    """Refuse a map that exists, or a directory that cannot be written, before any work is done.

    Raises:
        TilenetError: With the remedy.
    """
    folder = os.path.dirname(os.path.abspath(path))
    if (
        image is not None
        and os.path.exists(path)
        and os.path.realpath(path) in map(os.path.realpath, _files_of(image))
    ):
        raise TilenetError(f"a map may not replace its image ({path}); give it another name")
    if os.path.isdir(path):
        raise TilenetError(
            f"a map is a file ({path} is a directory); give it a name ending in .tif"
        )
    if os.path.exists(path) and not overwrite:
        raise TilenetError(
            f"a map is not overwritten unasked ({path} exists); add --overwrite or another name"
        )
    if not os.path.isdir(folder):
        raise TilenetError(f"a map needs an existing directory ({folder} is not); make it first")
    check_name("a map", path)
    name = os.path.basename(path)
    probe = os.path.join(folder, f".{name}.probe.part")
    try:
        with open(probe, "wb"):
            pass
        os.remove(probe)
    except OSError as error:
        raise TilenetError(
            f"a map needs a directory that can be written ({folder}: {error.strerror}); choose "
            "another one"
        ) from error


def map_lock(path: str) -> Lock:
    """The right to write a map, next to which other jobs would write the same files.

    Raises:
        TilenetError: Another job writes it.
    """
    folder, name = os.path.split(os.path.abspath(path))
    return Lock(Path(folder, f".{name}.lock.part"), f"the map {path}")


def journal_of(path: str) -> str:
    """Where an interrupted map's journal is."""
    folder, name = os.path.split(os.path.abspath(path))
    return os.path.join(folder, f".{name}.journal.part")


class MapWriter:
    """A map being written; a context manager that leaves either the whole map or nothing.

    With `made_of` it leaves what is done, and goes on with what it left.

    Args:
        path: Path of the finished map.
        like: Gives size, transform and CRS; copied, so that rotated grids survive; GCPs and RPCs.
        kind: What the map holds.
        window: The pixels of `like` that the map shows; None: all.
        made_of: What the journal compares; None: the map cannot be interrupted.
        lock: Held while the map is written; None: no other job may write it.

    Attributes:
        done: What an interrupted map had.
        why_anew: Why that of an interrupted map cannot be used; "": it can, or there was none.
    """

    def __init__(
        self,
        path: str,
        like: Raster,
        kind: MapKind,
        window: Window | None = None,
        made_of: dict[str, Any] | None = None,
        lock: Lock | None = None,
    ) -> None:
        self.path, self._lock = path, lock
        self.kind = kind
        self.window = window or like.whole
        folder, name = os.path.split(os.path.abspath(path))
        # One name per map: what a killed run leaves, the next one overwrites.
        self._raw, self._cog = (os.path.join(folder, part) for part in _aside(name))
        self._journal = MapJournal(journal_of(path), made_of or {})
        self._keeps = False
        self._parts: list[Part] = []  # written since the journal's last line
        self.done, self.why_anew = Done(), ""
        self._ground, self._factor = like.ground, like.factor
        t, row, col = like.transform, self.window.row, self.window.col
        self._profile = {
            "driver": "GTiff",
            "height": self.window.height,
            "width": self.window.width,
            "count": kind.bands,
            "dtype": kind.dtype,
            "nodata": kind.nodata,
            **like.ground.profile(
                Affine(t.a, t.b, t.a * col + t.b * row + t.c, t.d, t.e, t.d * col + t.e * row + t.f)
            ),
            "tiled": True,
            "blockxsize": BLOCK_PX,
            "blockysize": BLOCK_PX,
            # Uncompressed: own windows do not fall on blocks, and a compressed block that is
            # written twice leaves its first copy in the file. The finished map is compressed.
            "BIGTIFF": "IF_SAFER",
            "interleave": "band",
        }
        if made_of is None:
            self._guarded(self._create)
        else:
            self._guarded(self._go_on)

    def _create(self) -> None:
        # First: it would speak of the pixels that are overwritten now.
        self._journal.remove()
        if not os.path.isdir(self._raw):
            Path(self._raw).unlink(missing_ok=True)
        self._dataset = rasterio.open(self._raw, "w", **self._profile)
        self._describe(self._dataset)

    def _go_on(self) -> None:
        done, self.why_anew = self._journal.read()
        if done is not None:
            self.why_anew = why_not_kept(self._raw, self._block_bytes, done.frame, done.parts)
        if done is None or self.why_anew:
            self._create()
            # Closing writes the blocks that nobody wrote. From then on each has its place in the
            # file, and whatever kills a rank, the file's structure is never half changed.
            self._dataset.close()
            self._check_raw()
            sync(self._raw)
            self._journal.begin(frame_of(self._raw, self._block_bytes))
        else:
            self.done = done
            self._journal.mend()
        self._dataset = rasterio.open(self._raw, "r+")
        self._keeps = True

    @property
    def _block_bytes(self) -> int:
        """Bytes of all blocks of the file aside."""
        blocks = -(-self.window.height // BLOCK_PX) * -(-self.window.width // BLOCK_PX)
        return blocks * BLOCK_PX**2 * self.kind.bands * np.dtype(self.kind.dtype).itemsize

    def keep(self, tiles: Sequence[int]) -> None:
        """Have the disk hold what was written, then the journal say that these tiles are done."""

        def flush() -> None:
            self._check_lock()
            self._dataset.close()
            sync(self._raw)
            self._check_written()
            self._dataset = rasterio.open(self._raw, "r+")
            self._journal.add_tiles(tiles, self._parts)
            self._parts = []

        self._guarded(flush)

    def keep_sums(self, name: str, sums: dict[str, Any]) -> None:
        """Have the journal hold sums."""
        self._guarded(lambda: self._journal.add_sums(name, sums))

    def _describe(self, dataset: Any) -> None:
        kind = self.kind
        self._ground.carry(dataset, self.window, self._factor)
        if kind.note is not None:
            dataset.update_tags(TILENET_NOTE=kind.note)
        if kind.scale != 1:
            dataset.scales = (kind.scale,) * kind.bands
        if not kind.of_classes:
            if kind.unit is not None:
                dataset.units = (kind.unit,) * kind.bands
            for band, name in enumerate(kind.classes, start=1):
                dataset.set_band_description(band, name)
            return
        dataset.update_tags(1, **{f"class_{i}": name for i, name in enumerate(kind.classes)})
        if kind.dtype == "uint8":
            colours = dict(enumerate(class_colours(len(kind.classes))))
            dataset.write_colormap(1, {**colours, int(kind.nodata): (0, 0, 0, 0)})

    def write(self, window: Window, values: NDArray[Any]) -> None:
        """Write `values` (bands, H, W) to a window of the image; what the map lacks is cut off."""
        part = overlap(window, self.window)
        if part is None:
            return
        top, left = part.row - window.row, part.col - window.col
        inside = values[:, top : top + part.height, left : left + part.width]
        row, col = part.row - self.window.row, part.col - self.window.col
        place = FileWindow(col, row, part.width, part.height)
        self._guarded(lambda: self._dataset.write(np.ascontiguousarray(inside), window=place))
        self._parts.append(part_of(place, inside))

    def finish(self, comm: "MPI.Intracomm | None" = None) -> None:
        """Close the file, make it cloud-optimised, and put it in its place.

        Args:
            comm: All ranks, which call `finish_map`; None: this one alone.
        """
        if comm is None:
            from mpi4py import MPI  # not at the top: importing starts MPI, and planning must not

            comm = MPI.COMM_SELF
        self._guarded(self._dataset.close)
        self._guarded(self._check_raw)
        classes, parts, self._parts = self.kind.of_classes, self._parts, []
        files = self.path, self._raw, self._cog
        template = self._guarded(self._template)
        write_cog(CogJob(*files, template, classes, parts, keeps=self._keeps), comm)
        names = self.kind.classes if classes else ()
        self._check_lock()
        self._guarded(lambda: put_map(self._cog, self.path, names))
        self._keeps = False
        self._remove()

    def _template(self) -> Template:
        """What the finished map begins with, but for its size."""
        small = {**self._profile, "height": BLOCK_PX, "width": BLOCK_PX + 1, "sparse_ok": True}
        with MemoryFile(ext=".tif") as file:
            with file.open(**small) as dataset:
                self._describe(dataset)
            return template_like(file.name, classes=self.kind.of_classes)

    def _check_raw(self) -> None:
        """Closing says nothing of blocks that no longer fitted on the disk."""
        pixels = self.window.height * self.window.width * self.kind.bands
        if os.path.getsize(self._raw) < pixels * np.dtype(self.kind.dtype).itemsize:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _check_written(self) -> None:
        """Nor of pixels that the disk did not take, those since the last time that they were kept.

        GDAL writes most of them when it closes the file, and does not say when that fails.
        """
        wrong = wrong_pixels(self._raw, self._parts)
        if wrong:
            raise OSError(wrong)

    def __enter__(self) -> "MapWriter":
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(*GDAL_ERRORS):
            self._dataset.close()
        self._remove()

    def _check_lock(self) -> None:
        if self._lock is not None:
            self._lock.check()

    def _remove(self) -> None:
        """All that is aside; of a map that goes on later what is done stays."""
        if self._lock is not None and self._lock.lost:
            return  # the files are another job's now
        for path in (self._cog,) if self._keeps else (self._cog, self._raw, self._journal.path):
            with contextlib.suppress(OSError):
                os.remove(path)

    def _guarded(self, act: Callable[[], Any]) -> Any:
        try:
            with quiet():
                return act()
        except GDAL_ERRORS as error:
            self._remove()
            raise cannot_write(self.path, error, keeps=self._keeps) from error


def finish_map(writer: MapWriter | None, comm: "MPI.Intracomm") -> None:
    """Make a map cloud-optimised and put it in its place. Collective.

    Args:
        writer: On rank 0.

    Raises:
        TilenetError: It cannot be written; on all ranks unless rank 0 alone had to do with it.
    """
    if writer is None:
        write_cog(None, comm)
    else:
        writer.finish(comm)


def _aside(name: str) -> tuple[str, str]:
    """The files of a map that is made: raw, and cloud-optimised."""
    return f".{name}.raw.part", f".{name}.cog.part"


def _files_of(image: str) -> list[str]:
    """All that a name of an image may stand for, the file in NETCDF:"file":variable too."""
    parts = (image, *stacked_paths(image))
    return [piece for part in parts for piece in (part, *re.split('[":!?]+', part)) if piece]


def class_colours(classes: int) -> list[tuple[int, int, int, int]]:
    """Distinct colours for class maps, (red, green, blue, alpha), 0 to 255.

    Hues a golden section apart are spread evenly, however many there are.
    """
    colours = []
    for index in range(classes):
        hue, value = (index * 0.618034 + 0.13) % 1, 0.9 if index % 2 == 0 else 0.65
        red, green, blue = (round(255 * part) for part in hsv_to_rgb(hue, 0.75, value))
        colours.append((red, green, blue, 255))
    return colours
