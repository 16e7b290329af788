"""Check names of keyword arguments that a function hands on."""

import difflib
from collections.abc import Iterable, Sequence

from tilenet.errors import TilenetError


def check_names(names: Iterable[str], known: Sequence[str], subject: str) -> None:
    """Refuse a name that is not among `known`.

    Args:
        subject: Function or argument that takes the names; the error begins with it.

    Raises:
        TilenetError: A name is unknown; the error says the nearest known name.
    """
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0)[0]
            raise TilenetError(
                f"{subject} takes {', '.join(known)} (unknown: {name}; the nearest known one is "
                f"{near}); correct its name"
            )
