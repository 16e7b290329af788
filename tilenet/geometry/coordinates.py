"""Numbers that depend on where cells lie on the whole map."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from tilenet.geometry.layers import Layer

OFFSETS = {"ends": 0.0, "middles": 0.5, "edges": 0.0, "counted": 1.0, "cells": 0.0}


@dataclass(frozen=True)
class Coordinates(Layer):
    """Numbers that change evenly along rows and columns of the whole map, whatever its values.

    Attributes:
        numbers: Three of each channel: the value at the first cell, and the amounts that are added
            along rows and along columns.
        unit: Share of these that is added at cell i of n along an axis: `ends`, i / (n − 1);
            `middles`, (i + 1/2) / n; `edges`, i / n; `counted`, (i + 1) / n; `cells`, i.
        epsilon: Number that is added to the divisor of these shares.
    """

    numbers: tuple[float, ...] = ()
    unit: Literal["ends", "middles", "edges", "counted", "cells"] = "ends"
    epsilon: float = 0.0

    kind: ClassVar[str] = "coordinates"
