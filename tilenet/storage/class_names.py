"""Names of classes, as maps, tables and pages may hold them."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from xml.etree import ElementTree

from tilenet.errors import TilenetError

__all__ = ["check_class_names", "names_in_map"]

# What XML 1.0 cannot hold at all, not even escaped, and the ends of lines and tabs, which it
# changes. GDAL keeps names as XML, next to a map and in it.
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\ufffe\uffff]")


SURROGATE = re.compile("[\ud800-\udfff]")


def check_class_names(names: Sequence[str], where: str) -> None:
    """Refuse names with control characters, and names that UTF-8 cannot hold.

    Args:
        where: Place of the names, for the error.

    Raises:
        TilenetError: Names the first such class.
    """
    for name in names:
        if control := CONTROL.search(name):
            raise TilenetError(
                f"a class has a name without control characters ({where}: {name!r}, character "
                f"{control.start() + 1}), which maps cannot hold; leave it out of the name"
            )
        if SURROGATE.search(name):
            raise TilenetError(
                f"a class has a name in UTF-8 ({where}: {name!r}); write it again in an editor or "
                "terminal that writes UTF-8"
            )


def names_in_map(path: str, tags: Mapping[str, str]) -> tuple[str, ...]:
    """Names of a map's values 0, 1, …: those in GDAL's file next to it, else in its tags; or none.

    Args:
        path: Path of the map.
        tags: Tags of its band, where tilenet writes them too, for maps that were copied alone.
    """
    with suppress(OSError, ElementTree.ParseError, ValueError, LookupError):
        tree = ElementTree.parse(f"{path}.aux.xml")
        categories = tree.findall("PAMRasterBand[@band='1']/CategoryNames/Category")
        if categories:
            return tuple(category.text or "" for category in categories)
    names: list[str] = []
    while (name := tags.get(f"class_{len(names)}")) is not None:
        names.append(name)
    return tuple(names)
