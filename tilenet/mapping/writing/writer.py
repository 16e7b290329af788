"""Write maps by windows: all ranks write pieces, then one cloud-optimised GeoTIFF of them.

Of a map that may be interrupted the pieces that are done stay.
"""

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import astuple, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from affine import Affine
from numpy.typing import NDArray
from rasterio.io import MemoryFile

from tilenet.data.rasters.opening import GDAL_ERRORS, quiet
from tilenet.data.rasters.raster import Raster
from tilenet.data.rasters.stacked_paths import image_name
from tilenet.errors import TilenetError
from tilenet.geometry.tiles import Tile, owned
from tilenet.geometry.windows import Window, overlap
from tilenet.mapping.writing.class_colours import class_colours
from tilenet.mapping.writing.cog import CogJob, cannot_write, template_like, write_cog
from tilenet.mapping.writing.compressed_tiles import remove_partial, remove_record
from tilenet.mapping.writing.map_kind import IMAGE_TAG, MapKind
from tilenet.mapping.writing.map_pieces import Pieces, begin_pieces, put_file
from tilenet.mapping.writing.target import put_map
from tilenet.mapping.writing.tiff_header import BLOCK_PX, Template
from tilenet.mpi import Intracomm
from tilenet.parallel.ranks.comm import agreed
from tilenet.storage.lock import Lock


class MapWriter:
    """A map being written by all ranks; a context manager that leaves either it or nothing.

    With `made_of` it leaves the pieces that are done, and goes on with those. Collective, but for
    `lacks`, `write` and sums.

    Args:
        path: Path of the finished map.
        like: Raster from which size and georeferencing are copied: the transform as it is, so that
            rotated grids survive, the CRS, GCPs and RPCs.
        window: The pixels of `like` that the map shows; None: all.
        made_of: On rank 0, all that pixels depend on; None: the map cannot be interrupted.
        lock: On rank 0, lock that is held while the map is written; None: no other job writes it.
        comm: The ranks that write; None: this one alone.

    Attributes:
        why_restarted: Why pieces of an interrupted map cannot be used; "": they can, or none were.

    Raises:
        AgreedError: On all ranks: the folder of pieces cannot be written, or a rank cannot see it.
    """

    def __init__(
        self,
        path: str,
        like: Raster,
        kind: MapKind,
        window: Window | None = None,
        made_of: dict[str, Any] | None = None,
        lock: Lock | None = None,
        comm: Intracomm | None = None,
    ) -> None:
        if comm is None:
            from mpi4py import MPI  # not at the top: importing starts MPI, and planning must not

            comm = MPI.COMM_SELF
        self.path, self.kind, self.comm = path, kind, comm
        self.window = window or like.whole
        folder, name = os.path.split(os.path.abspath(path))
        # One name per map: the next run overwrites the files of a killed one.
        aside = Path(folder, f".{name}.pieces.part")
        size = self.window.height, self.window.width
        self._cog, no_windows = str(aside / "map.tif"), np.empty((0, 4), np.int64)
        self._pieces = Pieces(aside, kind.bands, *size, kind.dtype, kind.nodata, no_windows)
        self._georeferencing, self._factor = like.georeferencing, like.factor
        self._image = image_name(like.path)
        t, row, col = like.transform, self.window.row, self.window.col
        self._profile = {
            "driver": "GTiff",
            "height": self.window.height,
            "width": self.window.width,
            "count": kind.bands,
            "dtype": kind.dtype,
            "nodata": kind.nodata,
            **like.georeferencing.profile(
                Affine(t.a, t.b, t.a * col + t.b * row + t.c, t.d, t.e, t.d * col + t.e * row + t.f)
            ),
            "tiled": True,
            "blockxsize": BLOCK_PX,
            "blockysize": BLOCK_PX,
            "interleave": "band",
            "photometric": "MINISBLACK",  # or else GDAL takes four scaled scores for colours
        }
        self._written: list[Window] = []
        self._resumable, self._lock, self.why_restarted = False, lock, ""
        self._done: set[Window] = set()
        try:
            self._open(made_of)
        except TilenetError:
            self._remove()
            raise

    def _open(self, made_of: dict[str, Any] | None) -> None:
        comm, probe = self.comm, ""
        with agreed(comm):
            if comm.rank == 0:
                probe = self._guarded(lambda: self._begin(made_of))
        begun = made_of is not None, self._lock, self.why_restarted, self._done, probe
        # All ranks look after the lock, which rank 0 gives back.
        resumable, self._lock, self.why_restarted, self._done, probe = comm.bcast(begun)
        with agreed(comm):
            if not os.path.exists(probe):
                raise TilenetError(
                    f"all ranks write a map ({self.path}: rank {comm.rank} does not see what rank "
                    "0 writes there); choose a directory that all nodes share"
                )
        if comm.rank == 0:
            os.remove(probe)
        self._resumable = resumable

    def _begin(self, made_of: dict[str, Any] | None) -> str:
        """Find the pieces that are done, and refuse a disk without room for the rest.

        Returns:
            A new file among the pieces.
        """
        folder, kind = self._pieces.folder, self.kind
        self._resumable = made_of is not None and folder.exists()
        self.why_restarted = begin_pieces(folder, made_of)
        self._done = set(self._pieces.list_whole())
        self._resumable = len(os.listdir(folder)) > 1  # sums may have taken hours before any piece
        pixels = self.window.height * self.window.width
        pixels -= sum(window.height * window.width for window in self._done)
        if shutil.disk_usage(folder).free < pixels * kind.bands * np.dtype(kind.dtype).itemsize:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        handle, probe = tempfile.mkstemp(dir=folder)
        os.close(handle)
        return probe

    def lacks(self, window: Window) -> bool:
        """Whether the map shows a window of the image that had no piece when it was opened."""
        part = overlap(window, self.window)
        return part is not None and self._place_of(part) not in self._done

    def _place_of(self, part: Window) -> Window:
        row, col = part.row - self.window.row, part.col - self.window.col
        return Window(row, col, part.height, part.width)

    def read_sums(self, name: str) -> dict[str, Any]:
        """Sums that an interrupted map kept; {}: none."""
        try:
            return dict(json.loads(self._sums_path(name).read_bytes()))
        except (OSError, ValueError, TypeError, RecursionError):
            return {}

    def write_sums(self, name: str, sums: dict[str, Any]) -> None:
        """Have the disk hold sums; floats come back to the last bit."""
        self._guarded(lambda: put_file(self._sums_path(name), json.dumps(sums).encode()))

    def _sums_path(self, name: str) -> Path:
        return self._pieces.folder / f"sums-{name}.json"

    def _describe(self, dataset: Any) -> None:
        kind = self.kind
        self._georeferencing.copy_to(dataset, self.window, self._factor)
        dataset.update_tags(**{IMAGE_TAG: self._image})
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
        """Write `values` (bands, H, W) to a window of the image, cut to the map.

        Raises:
            TilenetError: On this rank: the disk does not take them, or another job writes the map.
        """
        part = overlap(window, self.window)
        if part is None:
            return
        inside, place = owned(values, Tile(window, part)), self._place_of(part)
        self._check_lock()
        self._guarded(lambda: self._put_piece(place, inside))
        self._written.append(place)

    def _put_piece(self, place: Window, values: NDArray[Any]) -> None:
        if self._resumable and not self._written:
            remove_record(self._pieces.folder)  # its tiles were compressed from older pieces
        self._pieces.put(place, values, lasting=self._resumable)

    def finish(self) -> None:
        """Make a cloud-optimised file of all pieces, and put it in its place.

        Raises:
            AgreedError: On all ranks: it cannot be written.
        """
        comm, kind, job = self.comm, self.kind, None
        # As ranks say themselves: a folder's list may be seconds old on network file systems.
        written = comm.allgather([astuple(window) for window in self._written])
        windows = {*map(astuple, self._done), *chain.from_iterable(written)}
        pieces = replace(self._pieces, windows=np.array(sorted(windows), np.int64).reshape(-1, 4))
        with agreed(comm):
            if comm.rank == 0:
                self._check_lock()
                template = self._guarded(self._make_template)
                job = CogJob(
                    self.path, pieces, self._cog, template, kind.of_classes, self._resumable
                )
        write_cog(job, comm)
        with agreed(comm):
            if comm.rank == 0:
                self._check_lock()
                names = kind.classes if kind.of_classes else ()
                self._guarded(lambda: put_map(self._cog, self.path, names, self._profile["crs"]))
        self._resumable = False
        self._remove()

    def _make_template(self) -> Template:
        """Return the template of the finished map's header, which lacks its size."""
        small = {**self._profile, "height": BLOCK_PX, "width": BLOCK_PX + 1, "sparse_ok": True}
        with MemoryFile(ext=".tif") as file:
            with file.open(**small) as dataset:
                self._describe(dataset)
            return template_like(file.name, classes=self.kind.of_classes)

    def __enter__(self) -> "MapWriter":
        return self

    def __exit__(self, *error: object) -> None:
        self._remove()

    def _check_lock(self) -> None:
        if self._lock is not None:
            self._lock.check()

    def _remove(self) -> None:
        """Remove all files aside, on rank 0; of a map that goes on later, keep finished pieces."""
        if self.comm.rank or (self._lock is not None and self._lock.lost):
            return  # or the files are another job's now
        if self._resumable:
            remove_partial(self._cog)
        else:
            shutil.rmtree(self._pieces.folder, ignore_errors=True)

    def _guarded(self, act: Callable[[], Any]) -> Any:
        try:
            with quiet():
                return act()
        except GDAL_ERRORS as error:
            raise cannot_write(self.path, error, resumable=self._resumable) from error
