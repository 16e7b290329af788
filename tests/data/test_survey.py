"""Statistics are the same to the last bit on any number of ranks, and stable."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
from mpi4py import MPI
from whole_image import random_scene

from tilenet.data import survey as module
from tilenet.data.collars import share_collars
from tilenet.data.labels.raster import Labels
from tilenet.data.rasters.raster import Raster
from tilenet.data.survey import Moments, merge, survey
from tilenet.data.survey_record import Survey
from tilenet.errors import AgreedError
from tilenet.parallel.ranks.together import RankControl

pytestmark = pytest.mark.ranks(1, 2)


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
        return survey(images, labels, classes, 8, RankControl(comm)), scenes


def written(path: Path, values: np.ndarray) -> str:
    """A raster of (C, H, W) that all ranks see."""
    if MPI.COMM_WORLD.rank == 0:
        count, height, width = values.shape
        size = {"count": count, "height": height, "width": width, "dtype": values.dtype.name}
        size |= {"crs": "EPSG:32630", "transform": rasterio.Affine(2, 0, 5e5, 0, -2, 4e6)}
        with rasterio.open(path, "w", driver="GTiff", **size) as file:
            file.write(values)
    MPI.COMM_WORLD.Barrier()
    return str(path)


def same_alone(images: list[Raster], comm: MPI.Intracomm) -> Survey:
    """A survey of all ranks, which is to the last bit that of one."""
    together, alone = (
        survey(images, None, 2, 8, RankControl(ranks)) for ranks in (comm, MPI.COMM_SELF)
    )
    for name in ("num_valid", "mean", "std", "minimum", "maximum"):
        assert getattr(together, name) == getattr(alone, name)
    return together


@pytest.mark.ranks(1, 2, 3, 4)
def test_survey_is_that_of_all_pixels_and_the_same_bits_on_any_number_of_ranks(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BLOCK_PX", 50)
    found, scenes = look(shared_path, comm)
    alone = look(shared_path, MPI.COMM_SELF)[0]
    assert (found.mean, found.std) == (alone.mean, alone.std)
    pixels = np.concatenate([s.pixels[:, s.valid] for s in scenes], axis=1).astype(np.float64)
    np.testing.assert_allclose(found.mean, pixels.mean(axis=1), rtol=1e-14)
    np.testing.assert_allclose(found.std, pixels.std(axis=1), rtol=1e-13)
    counted = [s.classes[s.valid & (s.classes != 255)] for s in scenes]
    assert found.class_pixels == tuple(np.bincount(np.concatenate(counted), minlength=3))
    assert found.num_valid == pixels.shape[1]
    assert found.minimum == tuple(pixels.min(axis=1))
    assert found.maximum == tuple(pixels.max(axis=1))
    for planes, scene in zip(found.classes_in_cells, scenes, strict=True):
        assert planes.shape == (1, *(-(-px // 8) for px in scene.classes.shape))
        for row, col in np.ndindex(planes.shape[1:]):
            part = np.s_[row * 8 : row * 8 + 8, col * 8 : col * 8 + 8]
            classes = scene.classes[part][scene.valid[part] & (scene.classes[part] != 255)]
            assert planes[0, row, col] == sum(1 << label for label in set(classes.tolist()))


@pytest.mark.parametrize("size", [1e160, 1e308])
@pytest.mark.filterwarnings("error")
def test_pixels_of_which_there_is_no_deviation_are_refused_by_all_ranks(
    comm: MPI.Intracomm, shared_path: Path, size: float
) -> None:
    values = np.random.default_rng(4).uniform(-1.5, 1.5, (2, 61, 83))
    values[1] *= size
    path = written(shared_path / "a.tif", values)
    said = r"pixels must be small enough .*a\.tif, band 2: -1\.\d+e\+\d+ to 1\.\d+e\+\d+\)"
    with Raster(path) as image, pytest.raises(AgreedError, match=said):
        survey([image], None, 3, 8, RankControl(comm))


def test_a_survey_of_more_than_eight_classes_keeps_them_apart(
    comm: MPI.Intracomm, shared_path: Path
) -> None:
    rng = np.random.default_rng(1)
    classes = rng.integers(0, 21, (70, 90)).astype(np.uint8)
    image_path = written(shared_path / "a.tif", rng.integers(1, 99, (2, 70, 90)))
    path = written(shared_path / "b.tif", classes[None])
    with Raster(image_path) as image, Labels(path, image, 255) as labels:
        found = survey([image], [labels], 21, 4, RankControl(comm))
    (planes,) = found.classes_in_cells
    assert planes.shape == (3, 18, 23)
    bits = np.unpackbits(planes, axis=0, bitorder="little")
    for row, col in np.ndindex(18, 23):
        part = classes[row * 4 : row * 4 + 4, col * 4 : col * 4 + 4]
        assert set(np.flatnonzero(bits[:, row, col])) == set(part.ravel().tolist())


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("kinds", [("float32",), ("uint8", "float32", "int32")], ids=str)
def test_real_numbers_and_several_kinds_give_the_same_bits_on_any_number_of_ranks(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch, kinds: tuple[str, ...]
) -> None:
    monkeypatch.setattr(module, "BLOCK_PX", 16)
    rng, paths, everything = np.random.default_rng(4), [], []
    for number, kind in enumerate(kinds):
        values = (rng.normal(size=(1, 67, 90)) * 30 + 100).clip(0, 250).astype(kind)
        values[:, :20, :] = (values[:, :20, :] / 50).astype(kind)  # ranks see others
        everything.append(values.ravel().astype(np.float64))
        paths.append(written(shared_path / f"{number}.tif", values))
    pixels = np.concatenate(everything)
    with ExitStack() as stack:
        together = same_alone([stack.enter_context(Raster(path)) for path in paths], comm)
    assert (together.minimum, together.maximum) == ((pixels.min(),), (pixels.max(),))
    np.testing.assert_allclose(together.mean, [pixels.mean()], rtol=1e-14)
    np.testing.assert_allclose(together.std, [pixels.std()], rtol=1e-13)
    assert together.class_pixels == (0, 0)
    assert not any(planes.any() for planes in together.classes_in_cells)


@pytest.mark.ranks(1, 2, 3)
def test_moments_of_groups_of_blocks_are_the_same_on_any_number_of_ranks(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there are too many blocks for moments of each: here 19 groups of 3."""
    monkeypatch.setattr(module, "BLOCK_PX", 13)
    monkeypatch.setattr(module, "MOST_MOMENTS", 40)
    values = (np.random.default_rng(9).normal(size=(2, 83, 97)) * 30 + 100).astype(np.float32)
    with Raster(written(shared_path / "image.tif", values)) as image:
        together = same_alone([image], comm)
    exact = values.astype(np.float64)
    np.testing.assert_allclose(together.mean, exact.mean(axis=(1, 2)), rtol=1e-14)
    np.testing.assert_allclose(together.std, exact.std(axis=(1, 2)), rtol=1e-13)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e9 + 0.1])
def test_a_constant_band_has_no_deviation(
    comm: MPI.Intracomm, shared_path: Path, value: float
) -> None:
    """Its mean by summation is another number, by rounding."""
    values = np.full((2, 61, 83), value)
    values[1, 5, 6] += 1
    with Raster(written(shared_path / "constant.tif", values)) as image:
        stats = survey([image], None, 2, 8, RankControl(comm))
    assert (stats.mean[0], stats.std[0]) == (value, 0.0)
    assert stats.std[1] == pytest.approx(values[1].std(), rel=1e-6)


@pytest.mark.ranks(1)
def test_moments_are_stable_far_from_zero() -> None:
    rng = np.random.default_rng(3)
    values = rng.normal(size=(2, 9000)) + 1e9  # E[x²] − E[x]² loses all digits here
    moments = Moments(0, np.zeros(2), np.zeros(2))
    for part in np.split(values, [1, 777, 8000], axis=1):
        moments = merge(moments, module._moments(list(part)))
    np.testing.assert_allclose(np.sqrt(moments.squares / moments.count), values.std(axis=1))


def test_a_label_that_is_no_class_is_named_on_all_ranks(
    comm: MPI.Intracomm, shared_path: Path
) -> None:
    with pytest.raises(AgreedError, match=r"labels must be 0 to classes − 1.*: 2 at row \d+, "):
        look(shared_path, comm, classes=2)


class CountingComm:
    """A communicator that counts what is called of it, but for looks at whether to stop."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm, self.calls = comm, 0

    def __getattr__(self, name: str) -> Any:
        self.calls += name.lower() in ("allreduce", "allgather", "bcast")
        return getattr(self.comm, name)


@pytest.mark.ranks(2)
def test_images_cost_no_collectives(comm: MPI.Intracomm, shared_path: Path) -> None:
    """Each would be a meeting of all ranks, thousands of times for thousands of images."""
    values = np.zeros((1, 40, 30), np.uint8)
    values[:, 9:20, 5:9] = 7
    paths = [written(shared_path / f"{number}.tif", values + number % 2) for number in range(5)]
    calls = []
    for some in (paths[:2], paths):
        counting: Any = CountingComm(comm)
        with ExitStack() as stack:
            images = [stack.enter_context(Raster(path, nodata="collar")) for path in some]
            share_collars(images, counting)
            assert [int(one.read(one.whole).valid.sum()) for one in images[:2]] == [44, 1200]
            survey(images, None, 2, 8, RankControl(counting))
        calls.append(counting.calls)
    assert calls[0] == calls[1]
