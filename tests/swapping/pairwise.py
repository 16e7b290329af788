"""Cases of several axes without their whole product: faults that one value, or two together, show.

Whoever computes wrongly does so for a norm, for a mode, or for a norm in a mode.
"""

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

__all__ = ["pairs"]


def pairs(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Rows in which each value of an axis meets each value of every other axis at least once."""
    values = [list(axis) for axis in axes]

    def met(row: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
        return set(combinations(enumerate(row), 2))

    every = list(product(*(range(len(axis)) for axis in values)))
    missing = set().union(*map(met, every))
    rows = []
    while missing:
        row = max(every, key=lambda row: len(met(row) & missing))
        missing -= met(row)
        rows.append(tuple(axis[place] for axis, place in zip(values, row, strict=True)))
    return rows
