"""A reader of pages, and what their tests share."""

from collections.abc import Callable
from dataclasses import dataclass, field
from html.parser import HTMLParser

EVIL = '<script>alert("1")</script> & "roof"'
VOID = {"meta", "img", "br"}


@dataclass
class Element:
    """An element of a page."""

    name: str
    attributes: dict[str, str]
    text: str = ""
    path: tuple[str, ...] = ()
    inside: list["Element"] = field(default_factory=list)

    def all(self, name: str) -> list["Element"]:
        found = [self] if self.name == name else []
        return found + [one for child in self.inside for one in child.all(name)]


class Page(HTMLParser):
    """Elements of a page; fails where one is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.root = Element("root", {})
        self._open = [self.root]
        self.feed(text)
        self.close()
        assert [one.name for one in self._open] == ["root"], "an element is not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs})
        self._open[-1].inside.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop().name == tag

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.text += data

    def section(self, title: str) -> Element:
        return next(one for one in self.all("section") if title in [h.text for h in one.all("h2")])

    def all(self, name: str) -> list[Element]:
        return self.root.all(name)

    def table(self, caption: str) -> list[list[str]]:
        """Texts of a table's cells, its header first."""
        found = next(t for t in self.all("table") if caption in t.all("caption")[0].text)
        return [[cell.text for cell in row.inside] for row in found.all("tr")]


Write = Callable[[str, list[str], list[list[object]]], None]
