"""The files that a name with plus signs stands for."""

import os

from tilenet.data.rasters.location import file_name, is_remote
from tilenet.errors import printable

MOST_PLUS_SIGNS = 8  # in the name of one file


def stacked_paths(path: str, folder: str = "") -> tuple[str, ...]:
    """The files of `R.tif+G.tif`; names that hold a plus sign themselves are found where they lie.

    Where a part is no file, it is joined to the parts after it as long as that gives none either.
    An address goes on up to the next address or file here.

    Args:
        folder: Folder of names that are not absolute.
    """
    if "+" not in path:  # thousands of images are not looked for
        return (path,)
    parts, paths = path.split("+"), list[str]()
    while parts:
        most = min(len(parts), MOST_PLUS_SIGNS + 1)
        tries = ("+".join(parts[:count]) for count in range(1, most + 1))
        name = next((n for n in tries if os.path.isfile(os.path.join(folder, n))), parts[0])
        if paths and is_remote(paths[-1]) and not _begins(name, folder):
            paths[-1] += f"+{name}"
        else:
            paths.append(name)
        del parts[: name.count("+") + 1]
    return tuple(paths)


def image_name(path: str) -> str:
    """Name of an image, or of all files of a stack, without folders."""
    return printable("+".join(map(file_name, stacked_paths(path))))


def _begins(name: str, folder: str) -> bool:
    """Whether what follows an address is another file: one here, or a longer name of GDAL."""
    return ":" in name or "/vsi" in name or os.path.exists(os.path.join(folder, name))
