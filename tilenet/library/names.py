"""Names of arguments that a function takes one by one, and hands on."""

import difflib
from collections.abc import Iterable, Sequence

from tilenet.errors import TilenetError

__all__ = ["check_names"]


def check_names(given: Iterable[str], known: Sequence[str], what: str) -> None:
    """Refuse a name that nobody knows.

    Raises:
        TilenetError: With the nearest name.
    """
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0)[0]
            raise TilenetError(
                f"{what} takes {', '.join(known)} (unknown: {name}; the nearest known one is "
                f"{near}); correct its name"
            )
