"""Cases of several axes without their whole product: for faults of one value or of two together."""

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
