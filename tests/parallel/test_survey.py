"""Statistics are the same to the last bit on any number of ranks, and stable."""

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI
from whole_image import random_scene

from tilenet.errors import AgreedError
from tilenet.files.labels import Labels
from tilenet.files.raster import Raster
from tilenet.parallel import survey as module
from tilenet.parallel.survey import Moments, Survey, merge, survey


def look(path: Path, comm: MPI.Intracomm, classes: int = 3) -> tuple[Survey, list]:  # type: ignore[type-arg]
    scenes = [
        random_scene(path, size, seed, write=MPI.COMM_WORLD.rank == 0)
        for seed, size in enumerate([(157, 211), (66, 40)])
    ]
    MPI.COMM_WORLD.Barrier()
    with ExitStack() as stack:
        images = [stack.enter_context(Raster(str(s.image))) for s in scenes]
        pairs = zip(scenes, images, strict=True)
        labels = [stack.enter_context(Labels(str(s.labels), image, 255)) for s, image in pairs]
        return survey(images, labels, classes, 8, comm), scenes


def test_survey_is_that_of_all_pixels(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BLOCK_PX", 50)
    found, scenes = look(shared_path, comm)
    pixels = np.concatenate([s.pixels[:, s.valid] for s in scenes], axis=1).astype(np.float64)
    np.testing.assert_allclose(found.mean, pixels.mean(axis=1), rtol=1e-14)
    np.testing.assert_allclose(found.std, pixels.std(axis=1), rtol=1e-13)
    counted = [s.classes[s.valid & (s.classes != 255)] for s in scenes]
    assert found.class_pixels == tuple(np.bincount(np.concatenate(counted), minlength=3))
    for cells, scene in zip(found.labelled, scenes, strict=True):
        for row, col in np.ndindex(cells.shape):
            part = np.s_[row * 8 : row * 8 + 8, col * 8 : col * 8 + 8]
            assert cells[row, col] == (scene.valid[part] & (scene.classes[part] != 255)).any()


def test_survey_is_the_same_to_the_last_bit_as_on_one_rank(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BLOCK_PX", 50)
    together, alone = look(shared_path, comm)[0], look(shared_path, MPI.COMM_SELF)[0]
    assert (together.mean, together.std) == (alone.mean, alone.std)


def test_moments_are_stable_far_from_zero() -> None:
    rng = np.random.default_rng(3)
    values = rng.normal(size=(2, 9000)) + 1e9  # E[x²] − E[x]² loses all digits here
    moments = Moments(0, np.zeros(2), np.zeros(2))
    for part in np.split(values, [1, 777, 8000], axis=1):
        moments = merge(moments, module._moments(part))
    np.testing.assert_allclose(np.sqrt(moments.squares / moments.count), values.std(axis=1))


def test_a_label_that_is_no_class_is_named_on_all_ranks(
    comm: MPI.Intracomm, shared_path: Path
) -> None:
    with pytest.raises(AgreedError, match=r"labels must be 0 to classes − 1.*: 2 at row \d+, "):
        look(shared_path, comm, classes=2)
