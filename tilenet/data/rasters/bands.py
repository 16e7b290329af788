"""The bands of a raster by their names: descriptions, colours, and parts of the names of files."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from tilenet.errors import TilenetError

# Bands as a user names them: numbers from 1, names, or both.
BandNames = Sequence[int | str]


@dataclass(frozen=True)
class Band:
    """The names of a band; each may be empty.

    Attributes:
        description: Description in the file, such as `B08` or `red`.
        colour: Colour that GDAL gives it, such as `red`, `nir`.
        parts: Name of the file without ending, and the parts of that name, in a stack of files.
    """

    description: str
    colour: str
    parts: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name to show."""
        return self.description or self.colour or next(iter(self.parts), "")

    def is_called(self, name: str) -> tuple[bool, bool, bool]:
        """Whether description, colour or a part of the file's name is `name`, in any case."""
        folded = name.strip().casefold()
        parts = tuple(part.casefold() for part in self.parts)
        return (
            self.description.casefold() == folded != "",
            self.colour.casefold() == folded != "",
            folded in parts,
        )


def band_numbers(names: BandNames, bands: Sequence[Band], path: str) -> tuple[int, ...]:
    """Numbers, from 1, of the bands that are asked for; numbers are handed on unchecked.

    A description comes before a colour, and that before a part of a file's name: who described the
    bands knew best.

    Raises:
        TilenetError: A name is that of no band, or of several.
    """
    return tuple(_number(name, bands, path) if isinstance(name, str) else name for name in names)


def _number(name: str, bands: Sequence[Band], path: str) -> int:
    called = [band.is_called(name) for band in bands]
    for kind in range(3):
        numbers = [number for number, kinds in enumerate(called, start=1) if kinds[kind]]
        if len(numbers) > 1:
            raise TilenetError(
                f"a band's name must be that of one band (bands: {name}, {path}: bands {numbers} "
                "are called so); give its number"
            )
        if numbers:
            return numbers[0]
    names = [n for band in bands for n in (band.description, band.colour, *band.parts) if n]
    if not names:
        raise TilenetError(
            f"bands may be named where the file names them (bands: {name}, {path} has "
            f"{len(bands)} without names); give numbers"
        )
    near = difflib.get_close_matches(name.casefold(), [n.casefold() for n in names], 1, cutoff=0)
    listing = ", ".join(f"{n} {band.name or '(no name)'}" for n, band in enumerate(bands, start=1))
    raise TilenetError(
        f"a band must be one that the file has (bands: {name}, {path} has {listing}; nearest: "
        f"{near[0]}); use one of these names or numbers"
    )
