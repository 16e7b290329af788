"""The results of a survey of images, and the file in which a run keeps them.

One safetensors file, written aside and renamed, read without pickle. It holds the key of all that
the survey depends on, and a digest of its contents: a file with another key or digest is not used.
"""

import hashlib
import os
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from tilenet.errors import TilenetError
from tilenet.storage.atomic import aside


@dataclass(frozen=True)
class Survey:
    """Statistics of all pixels and labels of the images.

    Attributes:
        num_valid: Pixels with data.
        mean: Mean of each band over the valid pixels of all images.
        class_pixels: Labelled valid pixels of each class.
        classes_in_cells: Classes of the labelled valid pixels in each square cell of each image:
            (ceil(K / 8), rows, columns), a bit per class, class 0 the lowest bit of the first byte;
            empty where cells were not asked for.
    """

    num_valid: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    minimum: tuple[float, ...]
    maximum: tuple[float, ...]
    class_pixels: tuple[int, ...]
    classes_in_cells: tuple[NDArray[np.uint8], ...]


PER_BAND_OR_CLASS = tuple(field.name for field in fields(Survey))[1:-1]


def save_survey(survey: Survey, path: Path, key: str) -> None:
    """Keep a survey.

    Raises:
        TilenetError: It cannot be written.
    """
    arrays = {name: np.array(getattr(survey, name)) for name in PER_BAND_OR_CLASS}
    arrays["num_valid"] = np.array([survey.num_valid])
    for number, planes in enumerate(survey.classes_in_cells):
        arrays[f"classes_in_cells.{number}"] = np.ascontiguousarray(planes)
    try:
        with aside(path) as part:
            save_file(arrays, part, {"key": key, "digest": _digest(arrays)})
            # safetensors keeps its files to the owner; a run's other files follow the umask
            mask = os.umask(0)
            os.umask(mask)
            part.chmod(0o666 & ~mask)
    except (OSError, SafetensorError) as error:
        raise TilenetError(
            f"a survey must be written to a folder that can be written ({path}: {error}); make "
            "room there"
        ) from error


def load_survey(path: Path, key: str) -> Survey | None:
    """The survey in a file; None: it is one of other files or keys.

    Raises:
        TilenetError: It is not whole.
    """
    try:
        with safe_open(path, "numpy") as file:
            about = file.metadata() or {}
            arrays = {name: np.array(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError) as error:
        raise TilenetError(f"a survey's file must be whole ({path}: {error})") from error
    if about.get("digest") != _digest(arrays):
        raise TilenetError(f"a survey's file must be whole ({path}: not what was written)")
    if about.get("key") != key:
        return None
    if not all(np.isfinite(arrays[name]).all() for name in ("mean", "std")):
        return None  # older versions kept them; a new survey says what is wrong
    num_valid = int(arrays.pop("num_valid")[0])
    values = {name: tuple(arrays.pop(name).tolist()) for name in PER_BAND_OR_CLASS}
    planes = tuple(arrays[f"classes_in_cells.{number}"] for number in range(len(arrays)))
    return Survey(num_valid, **values, classes_in_cells=planes)


def _digest(arrays: dict[str, NDArray[np.generic]]) -> str:
    """Digest of names, shapes, dtypes and bytes."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].shape} {arrays[name].dtype};".encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()
