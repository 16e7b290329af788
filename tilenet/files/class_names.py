"""Names of classes, as maps, tables and pages may hold them."""

import re
from collections.abc import Sequence

from tilenet.errors import TilenetError

__all__ = ["check_class_names"]

# What XML 1.0 cannot hold at all, not even escaped, and the ends of lines and tabs, which it
# changes. GDAL keeps names as XML, beside a map and in it.
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\ufffe\uffff]")
SURROGATE = re.compile("[\ud800-\udfff]")


def check_class_names(names: Sequence[str], where: str) -> None:
    """Refuse names with control characters, and such that are no text in UTF-8.

    Args:
        where: They stand, for the sentence.

    Raises:
        TilenetError: With the first such name.
    """
    for name in names:
        if found := CONTROL.search(name):
            raise TilenetError(
                f"a class has a name without control characters ({where}: {name!r}, character "
                f"{found.start() + 1}), which maps cannot hold; leave it out of the name"
            )
        if SURROGATE.search(name):
            raise TilenetError(
                f"a class has a name in UTF-8 ({where}: {name!r}); write it anew in an editor or "
                "terminal that writes UTF-8"
            )
