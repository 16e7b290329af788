"""Tables of a page, with headers that say what rows and columns are."""

from collections.abc import Iterable, Sequence

from tilenet.report.markup import Markup, tag

__all__ = ["cell", "note", "number", "section", "size", "table", "words"]


def section(title: str, *parts: object) -> Markup:
    """A part of the page under a heading of its own."""
    name = title.lower().replace(" ", "-")
    return tag("section", tag("h2", title, id=name), *parts, aria_labelledby=name)


def note(sentence: str) -> Markup:
    """A sentence beside figures: what is not there and why, or what they mean."""
    return tag("p", sentence, class_="note")


def table(caption: str, heads: Sequence[object], rows: Iterable[Sequence[object]]) -> Markup:
    """A table whose first cell of each row is that row's header.

    Args:
        caption: What it shows.
        heads: Of the columns.
        rows: Cells: text, numbers, or what `cell` makes.
    """
    body = [
        tag("tr", tag("th", row[0], scope="row"), *(_cell(value) for value in row[1:]))
        for row in rows
    ]
    return tag(
        "table",
        tag("caption", caption),
        tag("thead", tag("tr", *(tag("th", head, scope="col") for head in heads))),
        tag("tbody", *body),
    )


def cell(*children: object, colour: str | None = None, title: str | None = None) -> Markup:
    """A cell with a background."""
    style = None if colour is None else f"background:{colour}"
    return tag("td", *children, style=style, title=title)


def words(text: str) -> Markup:
    """A cell of text, which is read from the left."""
    return tag("td", text, class_="words")


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


def _cell(value: object) -> Markup:
    if isinstance(value, Markup) and value.startswith("<td"):
        return value
    return tag("td", value)
