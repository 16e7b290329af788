"""A file that lists images, their labels, and which of them are held out for validation.

A CSV file, or any vector file that GDAL reads (GeoJSON, GeoPackage …), with the columns `image`,
`label` and `split`. The images themselves are not read here.
"""

import csv
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Any

from tilenet.data.rasters.remedies import VECTOR_INFO
from tilenet.data.rasters.stacked_paths import stacked_paths
from tilenet.errors import TilenetError

SPLITS = {"train": "train", "validation": "validation", "val": "validation", "test": "test"}

Pair = tuple[str, str]  # an image and its labels
Row = Mapping[str, Any]  # cells by the names of their columns


@dataclass(frozen=True)
class ImageList:
    """The images of a list.

    Attributes:
        train: Images and their labels, in the order of the list.
        validation: Images that are held out and their labels, in the order of the list.
        num_test: Images that are left out.
        has_splits: Whether there is a column `split`; without it all images are in `train`.
    """

    train: tuple[Pair, ...]
    validation: tuple[Pair, ...]
    num_test: int
    has_splits: bool


def read_image_list(path: str) -> ImageList:
    """Read a list; paths in it are relative to its folder.

    Raises:
        TilenetError: It cannot be read, lacks a column, or a row is incomplete, has
            an unknown split or names an image for the second time.
    """
    try:
        is_csv = Path(path).suffix.lower() == ".csv"
        rows = _csv_rows(path) if is_csv else _vector_rows(path)
    except (OSError, ValueError, csv.Error) as error:
        raise TilenetError(
            f"a list of images must be readable ({path}: {error}); check the path, and that it is "
            "a CSV file in UTF-8"
        ) from error
    return listed(path, rows)


def _csv_rows(path: str) -> list[Row]:
    """Rows by the names of their columns; a number of cells that is not the header's is refused."""
    with open(path, encoding="utf-8-sig", newline="") as file:
        # Spreadsheets write semicolons where the comma is a decimal sign.
        delimiter = max(",;\t", key=file.readline().count)
        file.seek(0)
        reader = csv.DictReader(file, delimiter=delimiter, strict=True)
        names = reader.fieldnames = _columns(path, reader.fieldnames or ())
        rows: list[Row] = []
        for row in reader:
            if not any(cell.strip() for cell in row.values() if isinstance(cell, str)):
                continue
            if None in row or None in row.values():  # more cells, or fewer
                raise TilenetError(
                    f"each row of a list has as many cells as the first ({path}, line "
                    f"{reader.line_num}, columns: {len(names)}); put quotes around commas"
                )
            rows.append(row)
    return rows


def _vector_rows(path: str) -> list[Row]:
    """Attributes of the features of a vector file with one layer."""
    # Not at the top: most runs have no such list, and thousands of ranks load what they import.
    import pyogrio

    from tilenet.data.labels.vector_layer import VECTOR_ERRORS

    try:
        layers = pyogrio.list_layers(path)
        if len(layers) != 1:
            raise TilenetError(
                f"a list of images has one layer ({path} has {len(layers)}); copy it to a file of "
                "its own with ogr2ogr or QGIS"
            )
        meta, _, _, columns = pyogrio.raw.read(path, read_geometry=False)
    except VECTOR_ERRORS as error:
        raise TilenetError(
            f"a list of images must be a file that GDAL can read ({path}: "
            f"{' '.join(str(error).partition(';')[0].split())}); check the path, and the file with "
            f"{VECTOR_INFO}"
        ) from error
    names = _columns(path, meta["fields"])
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [dict(zip(names, row, strict=True)) for row in rows]


def _columns(path: str, fields: Iterable[str]) -> list[str]:
    """Names of the columns, which case and blanks do not change."""
    names = [str(name).strip().lower() for name in fields]
    for name in ("image", "label", "split"):
        if names.count(name) != 1 and (name != "split" or name in names):
            raise TilenetError(
                f"a list of images has the columns image, label and, if some are held out, split, "
                f"each once ({path}: {', '.join(names) or 'none'}); name them in the first row"
            )
    return names


def listed(path: str, rows: Sequence[Row]) -> ImageList:
    """The images of the rows of a list.

    Args:
        path: Path of the list; names are relative to its folder.
        rows: Cells of the columns image and label, and split where there are splits.

    Raises:
        TilenetError: A row is incomplete, has an unknown split, or names an image again.
    """
    if not rows:
        raise TilenetError(f"a list of images must name at least one ({path}: none); add rows")
    has_splits = "split" in rows[0]
    parts: dict[str, list[Pair]] = {"train": [], "validation": [], "test": []}
    first_in: dict[str, int] = {}
    for number, row in enumerate(rows, start=1):
        where = f"{path}, entry {number}"
        split = SPLITS.get(_text(row["split"]).lower()) if has_splits else "train"
        if split is None:
            raise TilenetError(
                f"split is train, validation, val or test ({where}: {_text(row['split'])!r}); "
                "correct it, or leave the column out to train on all"
            )
        names = {column: _text(row[column]) for column in ("image", "label")}
        for column, name in names.items():
            required = column == "image" or split != "test"
            if (required and not name) or "\0" in name:
                raise TilenetError(
                    f"each entry of a list names a file for its {column} ({where}: {name!r}); fill "
                    "it in, or delete the entry"
                )
        image = _from(path, names["image"])
        before = first_in.setdefault(os.path.normpath(image), number)
        if before != number:
            raise TilenetError(
                f"a list names each image once ({path}: {names['image']} in entries {before} and "
                f"{number}); delete one"
            )
        parts[split].append((image, _from(path, names["label"])))
    return ImageList(
        tuple(parts["train"]), tuple(parts["validation"]), len(parts["test"]), has_splits
    )


def _text(cell: Any) -> str:
    """A cell's text; empty for None and for the NaN of an empty column of numbers."""
    empty = cell is None or (isinstance(cell, float) and isnan(cell))
    return "" if empty else str(cell).strip()


def _from(path: str, name: str) -> str:
    """A name in a list, or several that plus signs join, as seen from the working directory."""
    folder = os.path.dirname(path)
    parts = stacked_paths(name, folder)
    return "+".join(part if "://" in part else os.path.join(folder, part) for part in parts)
