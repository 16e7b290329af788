"""Write the polygons of a class map to a file.

Each rank makes polygons of a band of rows, block by block, and joins those that its blocks cut; no
rank holds more pixels than a block. Rank 0 joins polygons that reach from band to band, and holds
all polygons. Only rank 0 simplifies them: an edge that two polygons share is simplified alike only
if both, and all that meet them, are whole; in polygons of blocks the cuts would stay as corners.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import shapely
from numpy.typing import NDArray

from tilenet.data.rasters.raster import Raster
from tilenet.errors import TilenetError
from tilenet.mapping.map_facts import check_class_map
from tilenet.mapping.polygons.class_polygons import (
    ClassPolygons,
    band_of,
    find_cut,
    gather,
    join,
    make_band_polygons,
)
from tilenet.mapping.polygons.corners import add_met_corners
from tilenet.mapping.polygons.vector_file import check_ending, crs_text, write_polygons
from tilenet.mapping.writing.target import check_target
from tilenet.mpi import Intracomm
from tilenet.parallel.ranks.comm import agreed
from tilenet.parallel.ranks.together import together
from tilenet.storage.class_names import names_in_map


@dataclass(frozen=True)
class PolygonsJob:
    """The polygons of a map to write, and their file.

    Attributes:
        map: Path of the class map.
        out: Path of the file of polygons.
        classes: Names or numbers; None: all.
        min_area: Least area of a polygon, in square units of the CRS; a smaller one is left out,
            and leaves a hole in the polygon around it.
        simplify: Tolerance in units of the CRS: a corner may go if its triangle with its neighbours
            is smaller than the tolerance squared; 0: all stay.
        overwrite: Whether a file of that name is replaced.
    """

    map: str
    out: str
    classes: tuple[str, ...] | None = None
    min_area: float = 0.0
    simplify: float = 0.0
    overwrite: bool = False


def make_polygons(job: PolygonsJob, comm: Intracomm) -> int:
    """Write the polygons of a map. Collective.

    Returns:
        Their number on rank 0; 0 on the others.

    Raises:
        AgreedError: On all ranks: the map or the job is refused, or a rank cannot read or write.
    """
    with ExitStack() as stack:
        with agreed(comm):
            check_ending(job.out)
            if comm.rank == 0:
                check_target(
                    job.out,
                    overwrite=job.overwrite,
                    image=job.map,
                    what="a file of polygons",
                    ending=".gpkg",
                )
            mapped = stack.enter_context(Raster(job.map))
            crs = crs_text(job.out, mapped.crs)
        with agreed(comm):
            names = names_in_map(job.map, mapped.dataset.tags(1))
            numbers = _choose_classes(job, mapped, names)
        band = band_of(mapped.size, comm.rank, comm.size)
        with together(comm) as phase:
            mine = make_band_polygons(mapped, band, numbers, phase.part_done)
        cut = find_cut(mine.shapes, band, mapped.size)
        polygons = gather(mine.take(cut | _find_large(mine, mapped, job.min_area)), comm)
        del mine
        count = 0
        with together(comm):  # ranks that wait leave the cores to rank 0
            if comm.rank == 0:
                polygons = _join_bands(polygons, mapped, comm.size)
                polygons = polygons.take(_find_large(polygons, mapped, job.min_area))
                count = len(polygons.shapes)
                columns = {
                    "class": np.array(
                        [_name_of(number, names) for number in polygons.classes], object
                    ),
                    "number": polygons.classes,
                    "area": _measure_areas(polygons, mapped),
                }
                shapes = _to_crs(polygons.shapes, mapped, job.simplify)
                del polygons  # those of a map of 100 000² pixels fill the memory
                write_polygons(job.out, shapes, columns, crs)
    return count


def _choose_classes(
    job: PolygonsJob, mapped: Raster, names: tuple[str, ...]
) -> NDArray[np.int32] | None:
    """Numbers of the classes that the job names; None: all.

    Raises:
        TilenetError: The map is not one of classes, lacks a named class, has no georeferencing, or
            has areas in square degrees.
    """
    check_class_map(mapped)
    if mapped.georeferencing.missing:
        raise TilenetError(
            f"polygons lie where the map's pixels do, by its transform ({job.map}: "
            f"{mapped.georeferencing.missing}); {mapped.georeferencing.remedy}"
        )
    if not np.can_cast(mapped.dtype, np.int32):
        raise TilenetError(
            f"classes are numbers of at most 32 bits with a sign ({job.map}: {mapped.dtype}); "
            "write the map as int32, by gdal_translate -ot Int32"
        )
    if job.min_area and mapped.crs is not None and mapped.crs.is_geographic:
        raise TilenetError(
            f"--min-area needs a CRS in units of length ({job.map}: degrees); leave it out, or "
            "reproject the map, by gdalwarp -r near -t_srs"
        )
    if job.classes is None:
        return None
    numbers = {name: number for number, name in reversed(list(enumerate(names)))}
    chosen = []
    for text in job.classes:
        if text in numbers:
            chosen.append(numbers[text])
        elif text.isdecimal() and int(text) < (len(names) or 1 << 31):
            chosen.append(int(text))
        else:
            raise TilenetError(
                f"--classes are names or numbers of the map's classes (--classes: {text}, "
                f"{job.map}: {', '.join(names) or 'numbers alone'}); name one of those"
            )
    return np.array(chosen, np.int32)


def _name_of(number: int, names: tuple[str, ...]) -> str:
    return (names[number] if 0 <= number < len(names) else "") or str(number)


def _measure_areas(polygons: ClassPolygons, mapped: Raster) -> NDArray[np.float64]:
    return np.asarray(shapely.area(polygons.shapes) * abs(mapped.transform.determinant))


def _find_large(polygons: ClassPolygons, mapped: Raster, least: float) -> NDArray[np.bool_]:
    # A product of pixels' sides may be a bit less than the area that was meant.
    return np.asarray(_measure_areas(polygons, mapped) >= least * (1 - 1e-9))


def _join_bands(polygons: ClassPolygons, mapped: Raster, ranks: int) -> ClassPolygons:
    """Join polygons over the edges of bands, and sort them by place, not by how they were cut."""
    edges = [band_of(mapped.size, rank, ranks).row for rank in range(1, ranks)]
    _, top, _, bottom = shapely.bounds(polygons.shapes).T
    cut = np.isin(top, edges) | np.isin(bottom, edges)
    polygons = ClassPolygons.concatenate([polygons.take(~cut), join(polygons.take(cut))])
    begin = shapely.get_point(shapely.get_exterior_ring(polygons.shapes), 0)
    return polygons.take(np.lexsort((shapely.get_x(begin), shapely.get_y(begin))))


def _to_crs(shapes: NDArray[Any], mapped: Raster, simplify: float) -> NDArray[Any]:
    """Move polygons from pixels to the map's CRS, and simplify them there."""
    t = mapped.transform

    def move(points: NDArray[np.float64]) -> NDArray[np.float64]:
        cols, rows = points.T
        return np.stack([t.c + t.a * cols + t.b * rows, t.f + t.d * cols + t.e * rows], axis=1)

    if not simplify or not len(shapes):
        return np.asarray(shapely.transform(shapes, move))
    coverage = shapely.transform(add_met_corners(shapes), move)
    return np.asarray(shapely.coverage_simplify(coverage, simplify))
