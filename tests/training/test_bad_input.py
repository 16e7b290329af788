"""Bad input: one sentence, printed once, exit code 1 or 2 on every rank, no hang, nothing lost."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import rasterio
from mpi4py import MPI
from unlike_scenes import write

from tilenet.__main__ import main

pytestmark = pytest.mark.ranks(1, 2)

Make = Callable[..., str]


@pytest.fixture
def make(comm: MPI.Intracomm, shared_path: Path) -> Make:
    """Write a raster on rank 0; return its path on all."""

    def made(name: str, values: np.ndarray, **profile: object) -> str:
        if comm.rank == 0:
            grid = {"crs": "EPSG:32630", "transform": rasterio.Affine(2, 0, 5e5, 0, -2, 4e6)}
            values = values.reshape(-1, *values.shape[-2:])
            write(shared_path / name, values, **({"driver": "GTiff"} | grid | profile))
        comm.Barrier()
        return str(shared_path / name)

    return made


RNG = np.random.default_rng(0)
IMAGE = RNG.integers(1, 999, (3, 70, 90)).astype(np.uint16)
LABELS = RNG.integers(0, 3, (70, 90)).astype(np.uint8)


def said(
    comm: MPI.Intracomm, capfd: pytest.CaptureFixture[str], arguments: list[str], code: int
) -> str:
    """Run a command on all ranks; what was printed on all of them to stderr."""
    assert main(arguments) == code
    everything = comm.allgather(capfd.readouterr().err)
    return "".join(everything)


def training(folder: Path, image: str, labels: str, *more: str) -> list[str]:
    return [
        "train",
        *("--images", image, "--labels", labels, "--classes", "3", "--steps", "1"),
        *("--network.poolings", "2", "--network.base", "2", "--device", "cpu"),
        *("--output", str(folder / "run"), *more),
    ]


EMPTY, FLOATS = np.full_like(LABELS, 255), LABELS.astype(np.float32)
BATCH_OF_TILES = ("--network.norm", "batch", "--network.norm_scope", "tile")
EPOCHS = ("--steps", "null", "--epochs", "2")
DIVERGING = ("--optimizer.lr", "1e30", "--optimizer.name", "sgd", "--steps", "3")

# the image and its profile, the labels and theirs, options, a part of the sentence
IMAGES = [
    (IMAGE.astype(np.complex64), {}, "pixels must be real numbers"),
    (np.zeros_like(IMAGE), {"nodata": 0}, "an image must hold pixels with data"),
    (np.full(IMAGE.shape, np.nan, np.float32), {}, "an image must hold pixels with data"),
]
TRUTHS = [
    (LABELS[:-1], {"crs": None}, "must have the image's size"),
    (LABELS, {"crs": "EPSG:32631"}, "labels must overlap their image"),
    (LABELS, {"transform": rasterio.Affine(2, 0, 5e5 + 180, 0, -2, 4e6)}, "must overlap"),
    (LABELS + 1, {}, "labels must be 0 to classes − 1"),
    (EMPTY, {}, "at least one pixel with data must be labelled"),
    (FLOATS, {}, "labels must be one band of whole numbers"),
    (np.stack([LABELS, LABELS]), {}, "labels must be one band of whole numbers"),
]
OPTIONS = [
    (("--bands", "[1,2,4]"), "bands are counted from 1"),
    (("--tiles.size_px", "3"), "nearest legal tile: 4"),
    (("--tiles.rows", "19", "--tiles.columns", "1"), "at most 18 tiles"),
    (("--halo", "30"), "nearest: 28 or 32"),
    (("--crop_px", "30"), "crop_px must be a multiple"),
    (("--mesh.rows", "7"), "replicas × rows × columns must be the number of ranks"),
    (("--network.base", "2000000"), "fewer than 2³¹ elements"),
    (("--partitions", "99"), "every partition needs a layer"),
    (("--balance", "[3, 4]"), "must add up to the number of layers"),
    (("--micro_batches", "999"), "at least as many tiles as micro-batches"),
    (("--device", "[cuda:77]"), "a device is cpu, cuda:<number> or xpu:<number>"),
    (("--resolution", "3"), "nearest: 2 or 4"),
    (("--tiles.rows", "0", "--tiles.columns", "0"), "at least one tile a side"),
    (("--crop_px", "4", *BATCH_OF_TILES), "normalisation needs more than one cell"),
    (("--init", "/nowhere.safetensors"), "files must be whole"),
    ((*EPOCHS, "--schedule.warmup_steps", "2"), "warmup_steps: 2, steps: 2); choose fewer"),
    (("--vectors.background", "ignore"), "vectors.background is read only where labels are poly"),
    (("--validation.every", "2"), "validation.every is read only where something is held out"),
    (("--validation.batch_size", "3"), "validation.batch_size is read only where something is"),
    (("--validation.score", "loss"), "validation.score is read only where something is held"),
    (DIVERGING, "finite"),
]
CASES = [
    *((image, profile, LABELS, {}, (), said) for image, profile, said in IMAGES),
    *((IMAGE, {}, labels, profile, (), said) for labels, profile, said in TRUTHS),
    *((IMAGE, {}, LABELS, {}, options, said) for options, said in OPTIONS),
]


@pytest.mark.parametrize(
    ("image", "profile", "truth", "truths", "options", "sentence"),
    CASES,
    ids=[c[-1] for c in CASES],
)
def test_what_cannot_be_trained_is_said_once(
    comm, shared_path, make, capfd, image, profile, truth, truths, options, sentence
):  # type: ignore[no-untyped-def]
    paths = make("image.tif", image, **profile), make("labels.tif", truth, **truths)
    words = said(comm, capfd, training(shared_path, *paths, *options), 1)
    assert sentence in words
    assert words.count("tilenet: ") == 1
    history = shared_path / "run" / "history.csv"
    assert options == DIVERGING or not history.exists()


@pytest.mark.parametrize("way", ["missing", "truncated"])
def test_an_image_that_is_not_whole(comm, shared_path, make, capfd, way):  # type: ignore[no-untyped-def]
    image, labels = make("image.tif", IMAGE), make("labels.tif", LABELS)
    if comm.rank == 0:
        data = Path(image).read_bytes()
        Path(image).unlink()
        if way == "truncated":
            Path(image).write_bytes(data[: len(data) // 2])
    comm.Barrier()
    words = said(comm, capfd, training(shared_path, image, labels), 1)
    assert ("must be readable everywhere" if way == "truncated" else image) in words
    assert words.count("tilenet: ") == 1


def test_unknown_key(comm, shared_path, make, capfd):  # type: ignore[no-untyped-def]
    words = said(comm, capfd, training(shared_path, "a", "b", "--optimiser.lr", "1"), 2)
    assert words.count("the nearest known key is optimizer.lr") == 1


def test_unwritable_output(comm, shared_path, make, capfd):  # type: ignore[no-untyped-def]
    image, labels = make("image.tif", IMAGE), make("labels.tif", LABELS)
    arguments = training(Path(image), image, labels)  # a file where a folder should be
    words = said(comm, capfd, arguments, 1)
    assert "output must be a folder that can be written" in words
    assert words.count("tilenet: ") == 1


def test_existing_output_and_map(comm, shared_path, make, capfd):  # type: ignore[no-untyped-def]
    image, labels = make("image.tif", IMAGE), make("labels.tif", LABELS)
    arguments = training(shared_path, image, labels)
    assert main(arguments) == 0
    before = (shared_path / "run" / "history.csv").read_bytes()
    capfd.readouterr()
    words = said(comm, capfd, arguments, 1)
    assert "a run is not overwritten unasked" in words
    assert (shared_path / "run" / "history.csv").read_bytes() == before

    mapping = ["predict", str(shared_path / "run"), image, str(shared_path / "map.tif")]
    assert main(mapping) == 0
    capfd.readouterr()
    for asked, sentence in (
        (mapping, "a map is not overwritten unasked"),
        ([*mapping[:3], str(shared_path / "no" / "map.tif")], "a map needs an existing directory"),
        (["predict", str(shared_path), image, "x.tif"], "a checkpoint is a folder with"),
        ([*mapping[:3], image, "--overwrite"], "a map may not replace its image"),
        ([*mapping[:3], str(shared_path / "b.tif"), "--tile", "0"], "nearest legal tile"),
    ):
        assert sentence in said(comm, capfd, asked, 1)
    assert main([*mapping, "--overwrite"]) == 0
    comm.Barrier()
    assert not list(shared_path.glob(".*part"))
