"""What cannot be trained exactly is refused: one sentence on all ranks, and its remedy works."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI
from test_bad_input import IMAGE, LABELS, make, said, training

from tilenet.__main__ import main

pytestmark = pytest.mark.ranks(2)

Make = Callable[..., str]
EXCHANGE, OVERLAP = ("--halo_mode", "exchange"), ("--halo_mode", "overlap")
PLAIN, GROUP = ("--network.norm", "none"), ("--network.norm", "group")
VALID, EXACT = ("--network.padding", "valid"), ("--halo", "exact")
OF_TILES = "--network.norm_scope", "tile"
UNPADDED = "an unpadded network reflects the image beyond its edges"
FOR_VALID = ("--network.padding", "same"), (*OVERLAP, *PLAIN), (*OVERLAP, *OF_TILES)
JUST = "halo_mode: exchange needs no halo, since each layer exchanges its own (halo: "
ONE_WINDOW = "ranks that exchange halos hold one window of an image each, as large as their shares "
FLOW = "--partitions", "2", "--micro_batches", "1", "--pipeline", "1f1b"
# What is asked for, a part of the sentence, and what stands in for it.
CASES: dict[str, tuple[tuple[str, ...], str, tuple[tuple[str, ...], ...]]] = {
    "valid": ((*EXCHANGE, *VALID, *PLAIN), UNPADDED, FOR_VALID[:2]),
    "valid, group": ((*EXCHANGE, *VALID, *GROUP), UNPADDED, FOR_VALID),
    "valid, group, overlap": ((*OVERLAP, *VALID, *GROUP), "over whole images: group norm", ()),
    "epsilon": ((*EXCHANGE, "--halo", "epsilon"), f"{JUST}epsilon)", (EXACT, OVERLAP)),
    "halo": ((*EXCHANGE, "--halo", "8"), f"{JUST}8)", (EXACT, OVERLAP)),
    "epsilon, instance": (
        ("--halo", "epsilon", "--network.norm", "instance"),
        "tiles must lie on the network's grid for statistics over whole images (halo: epsilon",
        (EXACT, OF_TILES),
    ),
    "tiles": (
        (*EXCHANGE, "--tiles.rows", "2", "--tiles.columns", "7"),
        f"{ONE_WINDOW}(tiles: 2 × 7, mesh: 1 × ",
        (OVERLAP,),
    ),
    "dice in flow": (
        (*FLOW, "--loss", "dice"),
        "Dice is one loss of all tiles (pipeline: 1f1b, loss: dice); use pipeline: gpipe, or loss",
        (("--pipeline", "gpipe", "--micro_batches", "1"), ("--loss", "ce")),
    ),
    "batch norm in flow": (
        (*FLOW, "--network.norm", "batch"),
        "all images of a step at once (pipeline: 1f1b, over whole images: batch norm); use",
        (("--pipeline", "gpipe"), OF_TILES),
    ),
}
__all__ = ["make"]  # the fixture


def run(
    comm: MPI.Intracomm,
    capfd: pytest.CaptureFixture[str],
    arguments: list[str],
    sentence: str,
    *remedies: tuple[str, ...],
) -> None:
    """Refused with the sentence; a remedy is what stands in for it."""
    words = said(comm, capfd, arguments, 1)
    assert comm.allreduce(sentence in words, op=MPI.LAND), words
    assert words.count("tilenet: ") == 1
    assert "\n" not in words.strip().split("tilenet: ")[1]
    for remedy in remedies:
        code = main([*arguments, "--overwrite", *remedy])
        words = "".join(comm.allgather(capfd.readouterr().err))
        assert comm.allreduce(code, op=MPI.MAX) == 0, (remedy, words)


@pytest.fixture
def scene(make: Make, shared_path: Path) -> list[str]:
    return training(shared_path, make("image.tif", IMAGE), make("labels.tif", LABELS))


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_and_its_remedies_work(comm, capfd, scene, name):  # type: ignore[no-untyped-def]
    asked, sentence, remedies = CASES[name]
    run(comm, capfd, [*scene, *asked], sentence, *remedies)


def test_tiles_narrower_than_a_halo(comm, shared_path, make, capfd):  # type: ignore[no-untyped-def]
    """Kernel 13 and one pooling: 6 cells of 2 px, so 12 px at least."""
    size = 10 * comm.size
    labels = np.resize(LABELS, (size, 40))
    paths = make("i.tif", np.resize(IMAGE, (3, size, 40))), make("l.tif", labels)
    narrow = [
        *training(shared_path, *paths, *EXCHANGE),
        *("--network.poolings", "1", "--network.kernel", "13"),
        *("--mesh.columns", "1", "--mesh.rows", str(comm.size)),
    ]
    most = size // 12
    run(comm, capfd, narrow, f"(rows: {comm.size} ranks, the narrowest owns 10 px, layer ", OVERLAP)
    words = said(comm, capfd, [*narrow, "--overwrite"], 1)
    assert f"the smallest legal tile is 12 px: use at most {most} ranks along it" in words
    larger = np.resize(LABELS, (12 * comm.size, 40))
    make("i.tif", np.resize(IMAGE, (3, 12 * comm.size, 40))), make("l.tif", larger)
    assert main([*narrow, "--overwrite"]) == 0


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (EXCHANGE, "the tiles of an image cannot (micro_batches: 3, over whole images: nothing"),
        (("--network.norm", "group"), "the tiles of an image cannot (micro_batches: 3"),
        ((*EXCHANGE, "--network.norm", "batch"), "all tiles of a step cannot (micro_batches: 3"),
    ],
    ids=["exchange", "group", "batch"],
)
def test_micro_batches_above_images(comm, capfd, scene, more, sentence):  # type: ignore[no-untyped-def]
    run(comm, capfd, [*scene, *more, "--micro_batches", "3"], sentence, ("--micro_batches", "1"))
    words = said(comm, capfd, [*scene, *more, "--micro_batches", "3", "--overwrite"], 1)
    assert "set micro_batches: 1" in words
    assert ("or a larger batch_size" in words) == ("batch" not in more)


def two(make: Make, folder: Path, second: tuple[int, int]) -> list[str]:
    """A run of two images, the second cut."""
    rows, cols = second
    images = make("a.tif", IMAGE), make("b.tif", IMAGE[:, :rows, :cols])
    labels = make("c.tif", LABELS), make("d.tif", LABELS[:rows, :cols])
    return training(folder, f"[{', '.join(images)}]", f"[{', '.join(labels)}]")


def test_batch_norm_with_images_of_two_sizes(comm, shared_path, make, capfd):  # type: ignore[no-untyped-def]
    run(
        comm,
        capfd,
        [
            *two(make, shared_path, (64, 40)),
            *("--batch_size", "2", "--network.norm", "batch", "--mesh.replicas", "1"),
        ],
        "so they must be of one size (sizes: (64, 40) and (72, 92), images per replica: 2); set "
        "mesh.replicas: 2, crop_px",
        ("--crop_px", "24"),
        ("--network.norm", "instance"),
        ("--network.norm_scope", "tile"),
    )


def test_batch_norm_with_unequal_replicas(comm, shared_path, make, capfd):  # type: ignore[no-untyped-def]
    images = comm.size + 1
    run(
        comm,
        capfd,
        [
            *two(make, shared_path, (70, 90)),
            *("--crop_px", "24", "--batch_size", str(images), "--network.norm", "batch"),
            *("--mesh.replicas", str(comm.size)),
        ],
        f"as many images of it as the others (mesh.replicas: {comm.size}, images of a step: "
        f"{images})",
        ("--batch_size", str(2 * comm.size)),
        ("--mesh.replicas", "1"),
        ("--network.norm", "group"),
    )


def test_dice_with_few_micro_batches(comm, capfd, scene):  # type: ignore[no-untyped-def]
    tiles = ("--tiles.rows", str(comm.size * 2), "--tiles.columns", "2")
    mesh = ("--mesh.rows", str(comm.size), "--mesh.columns", "1")
    run(
        comm,
        capfd,
        [*scene, "--loss", "dice", *tiles, *mesh],
        "needs all tiles of a step at once (loss: dice, micro_batches: 1, a rank has 4); set "
        "micro_batches: 4",
        ("--micro_batches", "4"),
        ("--loss", "ce"),
    )


def test_dice_counts_the_tiles_of_a_long_image(comm, shared_path, make, capfd):  # type: ignore[no-untyped-def]
    """72 × 92 px are 3 × 4 tiles of 24 px, 8 × 400 px, which are fewer pixels, 17."""
    long = make("b.tif", np.resize(IMAGE, (3, 8, 400))), make("d.tif", np.resize(LABELS, (8, 400)))
    images, labels = (make("a.tif", IMAGE), long[0]), (make("c.tif", LABELS), long[1])
    arguments = [
        *training(shared_path, f"[{', '.join(images)}]", f"[{', '.join(labels)}]"),
        *("--loss", "dice", "--tiles.size_px", "24", "--mesh.replicas", "1"),
        *("--mesh.rows", str(comm.size), "--mesh.columns", "1", "--steps", "2"),
    ]
    rank_has = max(-(-3 // comm.size) * 4, 17)
    run(
        comm,
        capfd,
        [*arguments, "--micro_batches", "12"],
        f"a rank has {rank_has}); set micro_batches: {rank_has}",
        ("--micro_batches", str(rank_has)),
    )
