"""Names of classes: the names that maps, tables and pages can hold, and the names in a map."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from xml.etree import ElementTree

from tilenet.errors import TilenetError

# GDAL stores names as XML, next to a map and in it. XML 1.0 cannot hold most of these characters,
# not even escaped, and changes line ends and tabs.
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\ufffe\uffff]")
SURROGATE = re.compile("[\ud800-\udfff]")


def check_class_names(names: Sequence[str], where: str) -> None:
    """Refuse names with control characters, names that UTF-8 cannot hold, and a name given twice.

    Args:
        where: Key or file that holds the names, for the error.

    Raises:
        TilenetError: A name is not allowed; the error shows the first.
    """
    for name in names:
        if control := CONTROL.search(name):
            raise TilenetError(
                f"a class's name must not contain control characters ({where}: {name!r}, character "
                f"{control.start() + 1}), which maps cannot hold; leave it out of the name"
            )
        if SURROGATE.search(name):
            raise TilenetError(
                f"a class's name must be UTF-8 ({where}: {name!r}); write it again in an editor or "
                "terminal that writes UTF-8"
            )
    for name, times in Counter(names).most_common(1):
        if times > 1:
            raise TilenetError(
                f"each class has a name of its own, by which scores are told apart ({where}: "
                f"{name!r} is there {times} times); name them apart, or give only their number"
            )


def names_in_map(path: str, tags: Mapping[str, str]) -> tuple[str, ...]:
    """Names of a map's values 0, 1, …, from GDAL's file next to it, else from its tags.

    Args:
        tags: Tags of its band: tilenet writes the names there too, for maps that are copied alone.

    Returns:
        An empty tuple if the map has no names.
    """
    with suppress(OSError, ElementTree.ParseError, ValueError, LookupError):
        tree = ElementTree.parse(f"{path}.aux.xml")
        categories = tree.findall("PAMRasterBand[@band='1']/CategoryNames/Category")
        if categories:
            return tuple(category.text or "" for category in categories)
    numbers = [int(tag[6:]) for tag in tags if re.fullmatch("class_[0-9]{1,5}", tag)]
    # GDAL keeps no tag without a text.
    return tuple(tags.get(f"class_{number}", "") for number in range(1 + max(numbers, default=-1)))
