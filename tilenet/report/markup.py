r"""HTML and SVG as text in which nothing from outside is markup unless it was made here.

Nor a command to a terminal that shows the page's source: what cannot be printed is written as
Python writes it (\x1b).
"""

import unicodedata
from html import escape
from typing import Any

__all__ = ["Markup", "join", "tag"]

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
