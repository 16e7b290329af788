r"""HTML and SVG as text in which nothing from outside is markup unless it was made here.

Nor a command to a terminal that shows the page's source: what cannot be printed is written as
Python writes it (\x1b).

Tables of a page, with headers that say what rows and columns are.

How the page looks: dark on light, at 1200 px and in print.
"""

import unicodedata
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

__all__ = [
    "STYLE",
    "Markup",
    "cell",
    "join",
    "note",
    "number",
    "section",
    "size",
    "table",
    "tag",
    "words",
]

ALONE = frozenset({"br", "img", "meta"})  # HTML's elements without an end


class Markup(str):
    """Text that is markup already; all other text is escaped where it is put in."""

    __slots__ = ()


def tag(name: str, /, *children: object, **attributes: Any) -> Markup:
    """An element.

    Args:
        name: Of the element.
        children: Markup, or anything else whose text is escaped; None is left out.
        attributes: A trailing underscore is dropped (`class_`), others become hyphens; those that
            are None are left out. Numbers are written short.
    """
    pairs = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_escaped(_text(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in ALONE:
        return Markup(f"<{name}{pairs}>")
    return Markup(f"<{name}{pairs}>{join(*children)}</{name}>")


def join(*children: object) -> Markup:
    """Pieces after one another."""
    return Markup(
        "".join(
            child if isinstance(child, Markup) else _escaped(str(child))
            for child in children
            if child is not None
        )
    )


def _text(value: object) -> str:
    # Hundredths of a pixel are enough, and keep curves of many points small.
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def _escaped(text: str) -> str:
    if not text.isprintable():
        text = "".join(
            letter if _shows(letter) else letter.encode("unicode_escape").decode()
            for letter in text
        )
    return escape(text, quote=True)


def _shows(letter: str) -> bool:
    return letter.isprintable() or letter in "\n\t" or unicodedata.category(letter) == "Zs"


def section(title: str, *parts: object) -> Markup:
    """A part of the page under a heading of its own."""
    name = title.lower().replace(" ", "-")
    return tag("section", tag("h2", title, id=name), *parts, aria_labelledby=name)


def note(sentence: str) -> Markup:
    """A sentence next to figures: what is not there and why, or what they mean."""
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


STYLE = """
:root { color-scheme: light; --ink: #1b2530; --soft: #55616e; --line: #d8dee4; --pale: #f5f7f9 }
* { box-sizing: border-box }
body { margin: 0; background: #eef1f4; color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", Arial, sans-serif }
main { max-width: 1160px; margin: 0 auto; padding: 24px 20px 60px }
header, section { background: #fff; border: 1px solid var(--line); border-radius: 8px;
  padding: 18px 24px 20px; margin-bottom: 18px }
h1 { font-size: 26px; margin: 0 0 12px; overflow-wrap: anywhere }
h1 small { color: var(--soft); font-size: 15px; font-weight: 400; margin-left: 10px }
h2 { font-size: 20px; margin: 0 0 10px }
h3 { font-size: 15px; margin: 16px 0 8px; color: var(--soft); font-weight: 600 }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 3px 18px; margin: 0 }
dt { color: var(--soft) }
dd { margin: 0; overflow-wrap: anywhere }
p.note { color: var(--soft); margin: 8px 0 0; max-width: 90ch; overflow-wrap: anywhere }
p.word { background: #fff4e0; border-left: 4px solid #e69f00; margin: 0 0 14px; padding: 8px 14px;
  overflow-wrap: anywhere }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 20px; align-items: start }
figure { margin: 0; min-width: 0 }
figcaption { color: var(--soft); font-size: 13px; margin-top: 4px }
.key { display: inline-block; margin-right: 16px }
.key i { display: inline-block; width: 12px; height: 12px; border: 1px solid #0003;
  border-radius: 2px; vertical-align: -1px }
svg { display: block; width: 100%; height: auto; font: 12px system-ui, "DejaVu Sans", sans-serif }
svg text { fill: var(--soft) }
svg text.label { fill: var(--ink); font-size: 13px }
svg .grid { stroke: #e7ebef }
svg .axis, svg .tick { stroke: #8a96a3 }
svg circle.mark { fill: none; stroke: var(--ink); stroke-width: 2 }
svg text.mark { fill: var(--ink); font-weight: 600; paint-order: stroke; stroke: #fff;
  stroke-width: 4px }
svg.tiles { max-height: 720px }
table { border-collapse: collapse; margin: 10px 0 4px; font-size: 14px;
  font-variant-numeric: tabular-nums; max-width: 100% }
caption { text-align: left; font-weight: 600; padding-bottom: 4px }
th, td { padding: 4px 12px; border-bottom: 1px solid var(--line); text-align: right;
  vertical-align: middle }
th { font-weight: 600; background: var(--pale) }
th[scope=col] { overflow-wrap: break-word; max-width: 160px }
th[scope=row], thead th:first-child { text-align: left; overflow-wrap: break-word;
  max-width: 360px }
td { white-space: nowrap }
td.words { text-align: left; white-space: normal }
.wide { overflow-x: auto }
.bar { display: flex; width: 260px; height: 14px }
.bar i { display: block; height: 14px }
.four { display: grid; grid-template-columns: repeat(4, 1fr); gap: 12px }
.four img { height: auto; display: block; border: 1px solid var(--line);
  image-rendering: pixelated; background: #fff }
pre { background: var(--pale); border: 1px solid var(--line); border-radius: 6px; margin: 0;
  padding: 12px 16px; font: 13px/1.45 ui-monospace, "DejaVu Sans Mono", monospace;
  columns: 3; column-gap: 28px; white-space: pre-wrap; overflow-wrap: anywhere }
footer { color: var(--soft); font-size: 13px }
@media (max-width: 800px) { .pair { grid-template-columns: 1fr } .four {
  grid-template-columns: 1fr 1fr } pre { columns: 1 } }
@media print { body { background: #fff; font-size: 11px }
  main { max-width: none; padding: 0 } header, section { border: 0; padding: 6px 0 }
  figure, table, .place { break-inside: avoid } h2, h3 { break-after: avoid }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact } .wide { overflow: visible } }
"""
