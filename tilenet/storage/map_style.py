"""The style of a class map in QGIS: a file next to the map, which QGIS reads as it opens it."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from xml.etree import ElementTree

from tilenet.storage.atomic import aside

MADE_BY = ("made-by", "tilenet")  # QGIS leaves it out when a user saves another style
HEAD = "<!DOCTYPE qgis PUBLIC 'http://mrcc.com/qgis.dtd' 'SYSTEM'>\n"


def style_text(names: Sequence[str], colours: Sequence[tuple[int, int, int, int]]) -> str:
    """Return the style of a map with classes as its values 0, 1, …

    Args:
        colours: Red, green, blue and alpha of each class, 0 to 255.
    """
    root = ElementTree.Element("qgis", {"styleCategories": "Symbology", MADE_BY[0]: MADE_BY[1]})
    options = {"type": "paletted", "band": "1", "opacity": "1", "alphaBand": "-1"}
    renderer = ElementTree.SubElement(
        ElementTree.SubElement(root, "pipe"), "rasterrenderer", options
    )
    palette = ElementTree.SubElement(renderer, "colorPalette")
    for value, (name, (*colour, alpha)) in enumerate(zip(names, colours, strict=True)):
        entry = {"value": str(value), "color": f"#{bytes(colour).hex()}", "alpha": str(alpha)}
        ElementTree.SubElement(palette, "paletteEntry", {**entry, "label": name})
    ElementTree.indent(root)
    return f"{HEAD}{ElementTree.tostring(root, encoding='unicode')}\n"


def put_style(map_path: str, style: str | None) -> None:
    """Put a style next to a map, under its name with .qml; one that a user made stays.

    Args:
        style: Text of the style; None if the map has none: that of an older map is removed.

    Raises:
        OSError: The disk does not take it.
    """
    path = Path(map_path).with_suffix(".qml")
    old = b""
    with suppress(FileNotFoundError):
        old = path.read_bytes()
    if old and '{}="{}"'.format(*MADE_BY).encode() not in old:
        return
    if style is None:
        path.unlink(missing_ok=True)
        return
    with aside(path) as part:
        part.write_text(style, encoding="utf-8")
