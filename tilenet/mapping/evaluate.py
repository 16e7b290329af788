"""Compare a map with labels by windows: a matrix of all pixels' classes, or errors of numbers."""

import sys
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from tilenet.data.labels.open import check_vectors, open_labels, resampling_note
from tilenet.data.labels.raster import Labels
from tilenet.data.labels.source import LabelSource
from tilenet.data.labels.values import Values
from tilenet.data.labels.vector_keys import VectorKeys
from tilenet.data.rasters.raster import Raster
from tilenet.errors import TilenetError, one_line
from tilenet.geometry.pieces import pieces_of
from tilenet.geometry.windows import Part, Window
from tilenet.mapping.map_facts import check_class_map
from tilenet.parallel.health.watchdog import NEVER, SLOW, Watchdog
from tilenet.scores import count_pairs, number_sums

BLOCK_PX = 2048
MOST_CLASSES = 4096


def sum_errors(
    map_path: str,
    labels_path: str,
    watchdog: Watchdog = NEVER,
    window: tuple[int, ...] | None = None,
) -> tuple[list[tuple[float, ...]], int]:
    """`number_sums` of each block of a map of numbers; labelled pixels without data in the map.

    Args:
        watchdog: Armed for each block.
        window: Row, column, height and width of the part of the map that is scored; None: all.

    Raises:
        TilenetError: A file cannot be read, the files lie apart, the window is not of the map, or
            nothing is labelled where the map has data.
    """
    pieces: list[tuple[float, ...]] = []
    unmapped = 0
    watchdog.arm("opening the map and the labels", SLOW)
    part = None if window is None else Part(window=window)
    with Raster(map_path, part=part) as mapped, Values(labels_path, mapped) as labels:
        _say_placement(labels, mapped)
        scale, offset = mapped.scaling[0]
        for block in _cut_blocks(mapped, watchdog):
            pixels, truth = mapped.read(block), labels.targets(block)
            labelled = labels.counted(truth)
            counted = labelled & pixels.valid
            unmapped += int((labelled & ~pixels.valid).sum())
            if counted.any():
                numbers = pixels.values[0][counted].astype(np.float64) * scale + offset
                pieces.append(number_sums(numbers, truth[counted]))
    if not pieces:
        raise TilenetError(
            f"at least one pixel with data in the map must be labelled ({labels_path}: "
            f"{unmapped} are, all nodata in {map_path}); map the place that is labelled"
        )
    return pieces, unmapped


def confusion_matrix(
    map_path: str,
    labels_path: str,
    ignore_index: int,
    vectors: VectorKeys | None = None,
    watchdog: Watchdog = NEVER,
    window: tuple[int, ...] | None = None,
    least: int = 0,
    *,
    all_named: bool = False,
) -> NDArray[np.int64]:
    """Count pixels by label (rows) and class in the map (columns).

    Pixels that are not labelled are left out; labelled ones without a class in the map are counted
    in an extra last column. Labels on another grid are resampled to the map's, polygons are burned
    on it as `vectors` says.

    Args:
        watchdog: Armed for each block.
        least: Classes of the matrix at least, whether or not they occur.
        all_named: Whether there are no others, of which labels could be.
        window: Row, column, height and width of the part of the map that is scored; None: all.

    Raises:
        TilenetError: A file cannot be read, the files lie apart, the window is not of the map, a
            label is no class of a map that names its own, or nothing is labelled where the map has
            data.
    """
    pairs = _count_labels(map_path, labels_path, ignore_index, vectors, watchdog, window)
    if not pairs:
        raise TilenetError(
            f"at least one pixel must be labelled ({labels_path}: all are {ignore_index} or "
            "nodata); check --ignore-index"
        )
    if all(guess < 0 for _, guess in pairs):
        raise TilenetError(
            f"at least one labelled pixel must have data in the map ({map_path}: all that "
            f"{labels_path} labels are nodata); map the place that is labelled"
        )
    classes = max(least, 1 + max(guess for _, guess in pairs))
    paths = map_path, labels_path
    _check_labels(paths, [label for label, _ in pairs], classes if all_named else None)
    classes = max(classes, 1 + max(label for label, _ in pairs))
    if classes > MOST_CLASSES:
        raise TilenetError(
            f"at most {MOST_CLASSES} classes are compared (largest value in {map_path} or "
            f"{labels_path}: {classes - 1}); if that is no class, name it with --ignore-index"
        )
    matrix = np.zeros((classes, classes + 1), np.int64)
    for (label, guess), count in pairs.items():
        matrix[label, guess] += count  # -1, no class, is the last column
    return matrix


def _check_labels(paths: tuple[str, str], labels: Sequence[int], classes: int | None) -> None:
    """Refuse labels below 0, and beyond the classes of a map that names them all."""
    map_path, labels_path = paths
    if min(labels) < 0:
        raise TilenetError(
            f"labels are counted from 0 ({labels_path}: {min(labels)}); name that value with "
            "--ignore-index or relabel"
        )
    if classes is not None and max(labels) >= classes:
        raise TilenetError(
            f"labels are classes of the map ({labels_path}: {max(labels)}, {map_path}: 0 to "
            f"{classes - 1}); name that value with --ignore-index or relabel"
        )


def _count_labels(
    map_path: str,
    labels_path: str,
    ignore_index: int,
    vectors: VectorKeys | None,
    watchdog: Watchdog,
    window: tuple[int, ...] | None,
) -> dict[tuple[int, int], int]:
    """Labelled pixels by label and class in the map, −1 for none."""
    watchdog.arm("opening the map and the labels", SLOW)
    part = None if window is None else Part(window=window)
    with (
        Raster(map_path, part=part) as mapped,
        open_labels(labels_path, mapped, ignore_index, vectors) as labels,
    ):
        check_vectors([labels], vectors or VectorKeys())
        _say_placement(labels, mapped)
        check_class_map(mapped)
        pairs: dict[tuple[int, int], int] = {}
        for block in _cut_blocks(mapped, watchdog):
            pixels = mapped.read(block)
            mapped_classes = np.where(pixels.valid, pixels.values[0].astype(np.int64), -1)
            truth = labels.read(block)
            counted = truth != ignore_index
            for pair, count in count_pairs(truth[counted], mapped_classes[counted]).items():
                pairs[pair] = pairs.get(pair, 0) + count
    return pairs


def _say_placement(labels: LabelSource, mapped: Raster) -> None:
    """Say how label rasters lie on the map, where they are not just on its pixels."""
    notes = [resampling_note([labels])]
    if isinstance(labels, Labels) and mapped.part is None:
        (height, width), (rows, cols) = labels.raster.size_in_file, labels.raster.file_size
        if (height, width) != (rows, cols):
            notes.append(
                f"the map covers {height} × {width} of the {rows} × {cols} px of {labels.path}, "
                "and is scored on these"
            )
    for note in filter(None, notes):
        print(one_line(f"tilenet: {note}"), file=sys.stderr)


def _cut_blocks(mapped: Raster, watchdog: Watchdog) -> Iterator[Window]:
    for block in pieces_of(mapped.whole, BLOCK_PX):
        watchdog.arm(f"the block at row {block.row}, column {block.col}", SLOW)
        yield block
