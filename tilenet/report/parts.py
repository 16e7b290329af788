"""What a page consists of: values that templates/page.html lays out and escapes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

__all__ = [
    "Cell",
    "Drawing",
    "Heading",
    "Legend",
    "Note",
    "Pair",
    "Part",
    "PlaceRow",
    "Section",
    "Table",
    "Text",
    "number",
    "size",
]


@dataclass(frozen=True)
class Note:
    """A sentence next to figures: what is missing and why, or what they mean."""

    text: str
    kind: ClassVar[str] = "note"


@dataclass(frozen=True)
class Heading:
    """A heading within a section."""

    text: str
    kind: ClassVar[str] = "heading"


@dataclass(frozen=True)
class Text:
    """Text as it is, line by line."""

    text: str
    kind: ClassVar[str] = "text"


@dataclass(frozen=True)
class Legend:
    """Colours and what they stand for."""

    keys: Sequence[tuple[str, str]]
    kind: ClassVar[str] = "legend"


@dataclass(frozen=True)
class Drawing:
    """A chart as SVG that was made here: it is not escaped."""

    svg: str
    kind: ClassVar[str] = "figure"


@dataclass(frozen=True)
class Cell:
    """A cell of a table that is more than a number.

    Attributes:
        text: What it says.
        title: What it says when pointed at.
        background: As CSS.
        text_cell: Whether it is a text, read from the left.
        bar: Widths in percent, colours and names of the pieces of a bar, instead of the text.
    """

    text: str = ""
    title: str = ""
    background: str = ""
    text_cell: bool = False
    bar: Sequence[tuple[str, str, str]] = ()


@dataclass(frozen=True)
class Table:
    """A table whose first cell of each row is that row's header."""

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    kind: ClassVar[str] = "table"


@dataclass(frozen=True)
class PlaceRow:
    """Pictures of one place: name, description and data address of each; width in percent."""

    text: str
    pictures: Sequence[tuple[str, str, str]]
    width: str
    kind: ClassVar[str] = "place"


@dataclass(frozen=True)
class Pair:
    """Parts next to one another."""

    parts: Sequence["Part"]
    kind: ClassVar[str] = "pair"


Part = Note | Heading | Text | Legend | Drawing | Table | PlaceRow | Pair


@dataclass(frozen=True)
class Section:
    """Parts of the page under a heading of their own."""

    title: str
    parts: Sequence[Part] = field(default_factory=tuple)


def number(value: float | None, digits: int = 4) -> str:
    """A number for a cell; a dash where there is none."""
    if value is None or value != value:
        return "–"
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.{digits}f}" if abs(value) >= 10.0**-digits else f"{value:.3g}"


def size(num_bytes: float | None) -> str:
    """Bytes in the unit that suits them."""
    if num_bytes is None or num_bytes != num_bytes:
        return "–"
    for power, unit in ((30, "GiB"), (20, "MiB")):
        if num_bytes >= 1 << power:
            return f"{num_bytes / (1 << power):.2f} {unit}"
    return f"{num_bytes / 1024:.1f} KiB"
