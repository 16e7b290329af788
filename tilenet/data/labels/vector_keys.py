"""Classes of polygons and the order in which they are burned: `vectors` in the run file."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from tilenet.errors import TilenetError

# Keys that commands take as options.
OPTIONS = {
    "field": "--field",
    "classes": "--classes",
    "layer": "--layer",
    "crs": "--label-crs",
    "all_touched": "--all-touched",
}


@dataclass(frozen=True)
class VectorKeys:
    """Keys to burn labels from the polygons of a vector file; see docs/run-file.md."""

    field: str | None = None
    """attribute of polygons that holds the class; without it all are `vectors.burn`"""
    classes: dict[str | int | float | bool | None, int | None] | None = None
    """classes of the attribute's values: `{road: 1, house: 2, ruin: null}`, where `null` is
    `ignore_index`; features without a value are `null` on the left. A value that is not there is an
    error. Left out: the values are class numbers. `tilenet info --field` counts the values and
    prints this line"""
    priority: list[int] | None = None
    """class numbers in the order of burning: the last lies on top, those not named lie below, and
    within a class the order of the file counts. Left out: the order of the file"""
    all_touched: bool = False
    """burn every pixel that a polygon touches, not only pixels with their middle inside"""
    burn: int = 1
    """class of all polygons where there is no field"""
    background: int | Literal["ignore"] = 0
    """class of pixels in no polygon; `ignore`: they do not count"""
    layer: str | None = None
    """layer, where a file has several; in a GeoPackage with a raster too it says that polygons are
    meant. Default: the only one."""
    crs: str | None = None
    """CRS of a file that names none: `EPSG:…`, WKT, or `image`: the image's. Default: the
    file's."""

    def check(self, num_classes: int, ignore_index: int) -> None:
        """Refuse keys that contradict one another or the run.

        Raises:
            TilenetError: As in `check_alone`, or a number is no class.
        """
        self.check_alone()
        numbers = {f"vectors.classes.{text_of(key)}": n for key, n in (self.classes or {}).items()}
        numbers |= {f"vectors.priority[{i}]": n for i, n in enumerate(self.priority or [])}
        numbers["vectors.burn"] = self.burn if self.field is None else None
        numbers["vectors.background"] = None if self.background == "ignore" else self.background
        for name, number in numbers.items():
            if number is not None and number != ignore_index and not 0 <= number < num_classes:
                raise TilenetError(
                    f"vector labels are burned as classes or as ignore_index ({name}: {number}, "
                    f"classes: 0 to {num_classes - 1}, ignore_index: {ignore_index}); change it or "
                    "raise classes"
                )

    def check_alone(self) -> None:
        """Refuse keys that contradict one another.

        Raises:
            TilenetError: `classes` has no field or names a value twice, or `priority` a class.
        """
        if self.classes and self.field is None:
            raise TilenetError(
                f"{name_of('classes')} maps the values of a field (vectors.classes: "
                f"{self.classes}, vectors.field: None); name it with {name_of('field')}"
            )
        classes_by_text((self.classes or {}).items())
        if self.priority is not None and len(set(self.priority)) < len(self.priority):
            raise TilenetError(
                f"vectors.priority names each class once (vectors.priority: {self.priority}); the "
                "last one lies on top"
            )

    def background_of(self, ignore_index: int) -> int:
        """Label of pixels in no polygon."""
        return ignore_index if self.background == "ignore" else self.background

    def classes_of(self, values: "list[Any]", ignore_index: int, path: str) -> list[int]:
        """Classes of features from the values of their field.

        Raises:
            TilenetError: A value has no class.
        """
        if self.classes is None:
            known = {text: int(text) for text in map(text_of, values) if is_whole(text)}
            remedy = "map it to a class or to null under vectors.classes"
            rule = "values of vectors.field must be whole numbers, unless vectors.classes maps them"
        else:
            known = {
                text: ignore_index if number is None else number
                for text, number in classes_by_text(self.classes.items()).items()
            }
            remedy = "add it there, with null if its pixels must not count"
            rule = "each value of vectors.field must stand under vectors.classes"
        unknown = sorted({text for text in map(text_of, values) if text not in known})
        if unknown:
            listing = ", ".join(map(quoted, unknown[:5])) + (" …" if len(unknown) > 5 else "")
            raise TilenetError(f"{rule} ({path}, {self.field}: {listing}); {remedy}")
        return [known[text_of(value)] for value in values]


def name_of(key: str) -> str:
    """A key as people write it, in run files and on command lines."""
    return f"vectors.{key}" + (f" ({OPTIONS[key]})" if key in OPTIONS else "")


def classes_by_text(pairs: Iterable[tuple[Any, int | None]]) -> dict[str, int | None]:
    """Classes by the text of their values.

    Raises:
        TilenetError: Two values have one text.
    """
    classes: dict[str, int | None] = {}
    for value, number in pairs:
        text = text_of(value)
        if text in classes:
            raise TilenetError(
                f"{name_of('classes')} names each value once, and a number and its text are one "
                f"value ({quoted(text)}: {classes[text]} and {number}); delete one"
            )
        classes[text] = number
    return classes


def text_of(value: Any) -> str:
    """A value as it is compared: 1, 1.0 and "1" are the same; none and NaN are null."""
    if hasattr(value, "item"):
        value = value.item()  # of numpy
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def quoted(text: str) -> str:
    """A value as people can tell it from its neighbours: quoted where it is empty or has blanks."""
    return text if text and not (text[0].isspace() or text[-1].isspace()) else f'"{text}"'


def is_whole(text: str) -> bool:
    """Whether a value is a number that may be that of a class."""
    digits = text.removeprefix("-")
    return digits.isdecimal() and len(digits) <= 18
