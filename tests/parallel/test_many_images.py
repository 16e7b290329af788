"""Runs on many images of any size, CRS and resolution, some or parts of them held out."""

import csv
import json
import os
import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
import torch
from mpi4py import MPI
from safetensors.torch import load_file
from test_same_as_whole_image import LR, SEED, STEPS, options_of, run_file
from whole_image import IGNORE, Scene, random_scene, train_whole

from tilenet.__main__ import main
from tilenet.errors import AgreedError
from tilenet.geometry.halo import context_of
from tilenet.geometry.networks import unet_layers
from tilenet.parallel import labelled_blocks
from tilenet.planning.held_out import HeldOut, choose_held_out
from tilenet.run import images as run_images
from tilenet.run.file import RunFile
from tilenet.run.images import hold_out, open_images
from tilenet.run.keys import AugmentKeys, MeshKeys, NetworkKeys, ValidationKeys
from tilenet.run.lists import with_listed_images
from tilenet.train import train

NETWORK = NetworkKeys(poolings=2, convolutions=1, base=4, dropout=0.2)
CONTEXT_PX = context_of(unet_layers(options_of(NETWORK))).context_any_pixel_px
KEYS = ValidationKeys(share=0.15, block_px=33)  # no multiple of the stride: blocks of every phase

GRIDS = [
    ((97, 131), "EPSG:32630", rasterio.Affine(2, 0.1, 5e5, 0.1, -2, 4e6)),
    ((140, 66), "EPSG:4326", rasterio.Affine(3e-6, 0, 8.5, 0, -3e-6, 47.3)),
    ((101, 99), "EPSG:2263", rasterio.Affine(0.5, 0, 9e5, 0, -0.5, 2e5)),
]


def mixed_scenes(folder: Path, comm: MPI.Intracomm) -> list[Scene]:
    """Images on unlike grids, with labels."""
    scenes = []
    for seed, (size, crs, transform) in enumerate(GRIDS):
        scene = random_scene(folder, size, seed, write=False)
        if comm.rank == 0:
            grid = {"crs": crs, "transform": transform, "driver": "GTiff"}
            write(scene.image, scene.pixels, nodata=0, **grid)
            write(scene.labels, scene.classes[None].astype(np.uint8), **grid)
        scenes.append(scene)
    comm.Barrier()
    return scenes


def write(path: Path, values: np.ndarray, **profile: Any) -> None:  # type: ignore[type-arg]
    count, height, width = values.shape
    size = {"count": count, "height": height, "width": width, "dtype": values.dtype}
    with rasterio.open(path, "w", **size, **profile) as file:
        file.write(values)


def held_out(scenes: list[Scene], keys: ValidationKeys) -> HeldOut:
    """The choice, from labels in memory."""
    sizes, side = [scene.valid.shape for scene in scenes], keys.block_px
    labelled = [
        (scene.classes[row : row + side, col : col + side] != IGNORE).any()
        for scene in scenes
        for row in range(0, scene.valid.shape[0], side)
        for col in range(0, scene.valid.shape[1], side)
    ]
    return choose_held_out(np.array(labelled), sizes, side, keys.share, SEED)


def near_blocks(held: HeldOut, image: int, margin: int) -> np.ndarray:  # type: ignore[type-arg]
    """Where an image is held out or near, pixel by pixel."""
    found = np.zeros(held.sizes[image], np.bool_)
    for row, col in np.argwhere(held.chosen[image]) * held.block_px:
        bottom = min(row + held.block_px, found.shape[0]) + margin
        right = min(col + held.block_px, found.shape[1]) + margin
        found[max(0, row - margin) : bottom, max(0, col - margin) : right] = True
    return found


def outcome(run: RunFile) -> tuple[list[float], dict[str, torch.Tensor]]:
    with (Path(run.output) / "history.csv").open() as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file)]
    return losses, load_file(Path(run.output) / "last" / "weights.safetensors")


def worst(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    assert found.keys() == wanted.keys()
    gaps = [
        (found[name] - tensor).abs().max() / tensor.abs().max() for name, tensor in wanted.items()
    ]
    return float(max(gaps))


@pytest.mark.ranks(1, 2, 3, 4)
def test_what_is_held_out_is_not_trained_on_in_images_of_any_grid(
    comm: MPI.Intracomm, shared_path: Path
) -> None:
    scenes = mixed_scenes(shared_path, comm)
    run = run_file(shared_path, scenes, NETWORK, validation=KEYS, mesh=MeshKeys(comm.size, 1, 1))
    assert train(run, comm=comm) == 0
    held = held_out(scenes, KEYS)
    seen = [
        scene.pixels[:, scene.valid & ~near_blocks(held, image, 0)].astype(np.float64)
        for image, scene in enumerate(scenes)
    ]
    pixels = np.concatenate(seen, axis=1)
    hidden = [
        replace(
            scene,
            classes=np.where(near_blocks(held, image, CONTEXT_PX), IGNORE, scene.classes),
            statistics=(pixels.mean(axis=1), pixels.std(axis=1)),
        )
        for image, scene in enumerate(scenes)
    ]
    left = [int((scene.valid & (scene.classes != IGNORE)).sum()) for scene in hidden]
    assert min(left) > 0
    wanted = train_whole(hidden, options_of(NETWORK), STEPS, LR, SEED)
    losses, weights = outcome(run)
    assert max(abs(a - b) for a, b in zip(losses, wanted.losses, strict=True)) <= 1e-12
    assert worst(weights, wanted.weights) <= 1e-10


@pytest.mark.ranks(2, 3, 4)
def test_crops_and_class_weights_are_those_of_one_rank(
    comm: MPI.Intracomm, shared_path: Path
) -> None:
    scenes = mixed_scenes(shared_path, comm)
    run = run_file(
        shared_path,
        scenes,
        NETWORK,
        validation=KEYS,
        crop_px=48,
        class_weights="auto",
        augment=AugmentKeys(flips=True, rotations=True),
    )
    alone = replace(run, output=str(shared_path / "alone"))
    assert train(run, comm=comm) == 0
    if comm.rank == 0:
        assert train(alone, comm=MPI.COMM_SELF) == 0
    comm.Barrier()
    found, wanted = outcome(run), outcome(alone)
    assert max(abs(a - b) for a, b in zip(found[0], wanted[0], strict=True)) <= 1e-12
    assert worst(found[1], wanted[1]) <= 1e-10


def changed(scenes: list[Scene], held: HeldOut) -> None:
    """Other pixels and labels inside the held-out blocks, on disk."""
    rng = np.random.default_rng(8)
    for image, scene in enumerate(scenes):
        inside = near_blocks(held, image, 0)
        noise = rng.integers(1, 4000, scene.pixels.shape).astype(np.uint16)
        classes = np.where(scene.classes == IGNORE, IGNORE, (scene.classes + 1) % 3)
        with rasterio.open(scene.image, "r+") as file:
            file.write(np.where(inside, noise, scene.pixels))
        with rasterio.open(scene.labels, "r+") as file:
            file.write(np.where(inside, classes, scene.classes).astype(np.uint8), 1)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("crop_px", [None, 48])
@pytest.mark.parametrize("padding", ["same", "valid"])
def test_nothing_leaks_from_what_is_held_out(
    comm: MPI.Intracomm, shared_path: Path, padding: Any, crop_px: int | None
) -> None:
    """Losses and weights are the same bits; and are not with a margin of one pixel less."""
    scenes = mixed_scenes(shared_path, comm)
    network = replace(NETWORK, padding=padding)
    turned = AugmentKeys(flips=True, rotations=True)
    run = run_file(
        shared_path,
        scenes,
        network,
        validation=KEYS,
        crop_px=crop_px,
        class_weights="auto",
        augment=turned if crop_px else AugmentKeys(),
    )
    run = replace(run, steps=STEPS if crop_px is None else 12)
    context_px = context_of(unet_layers(options_of(network))).context_any_pixel_px

    def both(margin_less: int) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
        with pytest.MonkeyPatch.context() as patch:
            original = run_images.HeldOut.mask

            def narrower(self, image, window, margin_px=0):  # type: ignore[no-untyped-def]
                assert margin_px in (0, context_px)
                return original(self, image, window, max(0, margin_px - margin_less))

            patch.setattr(run_images.HeldOut, "mask", narrower)
            found = []
            for change in (False, True):
                mixed_scenes(shared_path, comm)
                if change:
                    changed(scenes, held_out(scenes, KEYS))
                assert train(run, overwrite=True, comm=comm) == 0
                found.append(outcome(run))
        return found

    before, after = both(0)
    assert before[0] == after[0]
    assert all(torch.equal(before[1][name], after[1][name]) for name in before[1])
    before, after = both(1)
    assert not all(torch.equal(before[1][name], after[1][name]) for name in before[1])


@pytest.mark.ranks(1, 3)
def test_validation_sees_what_training_does_not(comm: MPI.Intracomm, shared_path: Path) -> None:
    scenes = mixed_scenes(shared_path, comm)
    run = run_file(shared_path, scenes[:2], NETWORK)
    other = ValidationKeys(str(scenes[2].image), str(scenes[2].labels), 0.15, 33)
    held = held_out(scenes[:2], other)
    with ExitStack() as stack:
        opened = open_images(replace(run, validation=other), stack)
        parts = hold_out(replace(run, validation=other), opened, CONTEXT_PX, comm)
        assert [part.path for part in parts.all_images] == [str(scene.image) for scene in scenes]
        whole, *blocks = parts.validation
        assert (whole.image.path, whole.windows) == (str(scenes[2].image), None)
        np.testing.assert_array_equal(whole.labels.read(whole.image.whole), scenes[2].classes)
        shown = [image for image in range(2) if held.chosen[image].any()]
        assert [part.image.path for part in blocks] == [str(scenes[i].image) for i in shown]
        for image, part in zip(shown, blocks, strict=True):
            assert part.windows == held.windows(image)
            classes, inside = scenes[image].classes, near_blocks(held, image, 0)
            assert (classes[inside] != IGNORE).any()
            wanted = np.where(inside, classes, IGNORE)
            np.testing.assert_array_equal(part.labels.read(part.image.whole), wanted)
        for image, labels in enumerate(parts.labels):
            near = near_blocks(held, image, CONTEXT_PX)
            wanted = np.where(near, IGNORE, scenes[image].classes)
            np.testing.assert_array_equal(labels.read(parts.images[image].whole), wanted)


@pytest.mark.ranks(1, 3)
def test_labels_that_are_held_out_are_looked_at_before_training(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(labelled_blocks, "PIECE_PX", 9)
    scenes = mixed_scenes(shared_path, comm)
    window = held_out(scenes, KEYS).windows(0)[0]
    scenes[0].classes[window.row + 5, window.col + 7] = 3
    if comm.rank == 0:
        with rasterio.open(scenes[0].labels, "r+") as file:
            file.write(scenes[0].classes.astype(np.uint8), 1)
    comm.Barrier()
    run = run_file(shared_path, scenes, NETWORK, validation=KEYS, mesh=MeshKeys(comm.size, 1, 1))
    said = rf"0\.tif: 3 at row {window.row + 5}, column {window.col + 7}; classes: 3"
    with pytest.raises(AgreedError, match=said):
        train(run, comm=comm)


@pytest.mark.ranks(2)
def test_a_list_is_read_once_and_a_block_of_its_images_held_out(
    comm: MPI.Intracomm, shared_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    scenes = mixed_scenes(shared_path, comm)
    path = shared_path / "list.csv"
    if comm.rank == 0:
        rows = zip(scenes, ("train", "val", "train"), strict=True)
        text = "".join(f"{s.image.name},{s.labels.name},{split}\n" for s, split in rows)
        path.write_text(f"image,label,split\n{text}gone.tif,,test\n")
    comm.Barrier()
    arguments = [
        *("train", "--images", str(path), "--classes", "3", "--steps", "1", "--batch_size", "2"),
        *("--output", str(shared_path / "run"), "--device", "cpu", "--validation.share", "0.1"),
        *("--validation.block_px", "33", "--network.poolings", "2", "--network.base", "4"),
        *("--network.convolutions", "1", "--network.norm", "instance", "--mesh.replicas", "2"),
    ]
    assert main(arguments) == 0
    said = "".join(comm.allgather(capfd.readouterr().err))
    assert said.count("2 images to train on, 1 for validation, 1 for test; those for test") == 1
    assert said.count("2 of 24 blocks of 33 px are held out; training leaves out labels w") == 1
    assert said.count("the statistics of norms (image) are of held-out pixels as well") == 1
    if comm.rank == 0:
        path.write_text("image,label\nimage0.tif,\n")
    comm.Barrier()
    assert main([*arguments, "--overwrite"]) == 1
    said = "".join(comm.allgather(capfd.readouterr().err))
    assert said.count("each entry of a list names a file for its label") == 1


@pytest.mark.real
@pytest.mark.ranks(3)
def test_a_list_of_real_scenes(comm: MPI.Intracomm, shared_path: Path, real: Path) -> None:
    """Several CRSs, pixels of 0.3 to 5 m, 8 and 16 bits, a stack, polygons in degrees."""
    vegas = "+".join(str(real / f"SN_Vegas_WV03-{band}.tif") for band in "RGB")
    rows = (
        (real / "SN7_int16_4band.tif", real / "SN7_buildings.geojson"),
        (
            real / "massachusetts_23429155_15_uint16.tif",
            real / "massachusetts_23429155_15.gpkg",
        ),
        (vegas, real / "SN_Vegas_WV03.gpkg"),
    )
    path = shared_path / "list.csv"
    if comm.rank == 0:
        path.write_text("\n".join(["image;label", *(f"{image};{label}" for image, label in rows)]))
    comm.Barrier()
    run = RunFile(
        images=str(path),
        classes=2,
        output=str(shared_path / "run"),
        bands=[1, 2, 3],
        nodata="none",
        crop_px=64,
        batch_size=3,
        steps=2,
        network=NETWORK,
        precision="float64",
        device="cpu",
        class_weights="auto",
        validation=ValidationKeys(share=0.2, block_px=128),
    )
    run, notes = with_listed_images(run)
    assert notes == [f"{path}: 3 images to train on"]
    assert train(run, comm=comm) == 0
    alone = replace(run, output=str(shared_path / "alone"))
    if comm.rank == 0:
        assert train(alone, comm=MPI.COMM_SELF) == 0
    comm.Barrier()
    found, wanted = outcome(run), outcome(alone)
    assert max(abs(a - b) for a, b in zip(found[0], wanted[0], strict=True)) <= 1e-12
    assert worst(found[1], wanted[1]) <= 1e-10


@pytest.mark.ranks(2, 3)
def test_a_file_that_another_node_sees_differently_is_named(
    comm: MPI.Intracomm, shared_path: Path
) -> None:
    """Each rank its own folder, as if on its own node."""
    mine = shared_path / str(comm.rank)
    mine.mkdir()
    scenes = [random_scene(mine, (60, 77), seed, write=True) for seed in (1, 2)]
    run = run_file(mine, scenes, NETWORK, mesh=MeshKeys(comm.size, 1, 1))
    run = replace(run, steps=1, output=str(shared_path / "run"))
    assert train(run, comm=comm) == 0  # the same files in other folders
    last = comm.size - 1
    if comm.rank == last:
        with scenes[1].labels.open("ab") as file:
            file.write(b"\0")
    size = scenes[1].labels.stat().st_size
    size = comm.bcast(size, root=last)
    said = rf"\(.*0/labels2\.tif on rank 0: {size - 1} bytes, 60 × 77 px, 1 × uint8; "
    with pytest.raises(AgreedError, match=rf"{said}.*labels2\.tif on rank {last}: {size} bytes"):
        train(run, overwrite=True, comm=comm)


@pytest.mark.ranks(2)
def test_a_run_goes_on_with_the_files_that_it_began_with(
    comm: MPI.Intracomm, shared_path: Path
) -> None:
    scenes = [random_scene(shared_path, (60, 77), n, write=comm.rank == 0) for n in (1, 2, 3)]
    comm.Barrier()
    run = replace(run_file(shared_path, scenes[:2], NETWORK), batch_size=1)
    assert train(replace(run, steps=1), comm=comm) == 0
    more = replace(
        run, images=[str(s.image) for s in scenes], labels=[str(s.labels) for s in scenes]
    )
    with pytest.raises(AgreedError, match=r"as it began \(files of .*: 4 files, .*: 6 files, "):
        train(more, resume=True, comm=comm)
    swapped = replace(run, images=run.images[::-1], labels=run.labels[::-1])  # type: ignore[index]
    with pytest.raises(AgreedError, match=r"as it began \(files of "):
        train(swapped, resume=True, comm=comm)
    with pytest.raises(AgreedError, match=r"\(held_out of .*: None, .*: 0\.1.* of blocks of 33 px"):
        train(replace(run, validation=replace(KEYS, share=0.125)), resume=True, comm=comm)
    moved = shared_path / "moved"
    if comm.rank == 0:
        moved.mkdir()
        for scene in scenes[:2]:
            shutil.move(scene.image, moved)
            shutil.move(scene.labels, moved)
    comm.Barrier()
    there = [
        replace(scene, image=moved / scene.image.name, labels=moved / scene.labels.name)
        for scene in scenes[:2]
    ]
    images, labels = [str(s.image) for s in there], [str(s.labels) for s in there]
    run = replace(run, images=images, labels=labels)
    assert train(replace(run, steps=2), resume=True, comm=comm) == 0
    if comm.rank == 0:  # as an older version wrote it
        path = Path(run.output) / "last" / "progress.json"
        progress = json.loads(path.read_text())
        assert progress.pop("files").startswith("4 files, ")
        assert progress.pop("held_out") is None
        path.write_text(json.dumps(progress))
    comm.Barrier()
    assert train(run, resume=True, comm=comm) == 0


@pytest.mark.ranks(1)
def test_images_that_do_not_go_together_are_refused(comm: MPI.Intracomm, shared_path: Path) -> None:
    scenes = mixed_scenes(shared_path, comm)
    run = run_file(shared_path, scenes, NETWORK)
    os.symlink(scenes[1].image, shared_path / "link.tif")
    linked = ValidationKeys(str(shared_path / "link.tif"), str(scenes[1].labels))
    names, labels = run.image_paths, run.label_paths
    red = shared_path / "red.tif"
    with rasterio.open(scenes[0].image) as file:
        grid = {"crs": file.crs, "transform": file.transform, "driver": "GTiff"}
        write(red, file.read([1]), **grid)
        green = shared_path / "green.tif"
        write(green, file.read([2]), **grid)
    one_band = ValidationKeys(str(red), str(scenes[0].labels))
    for change, said in (
        (
            {"resolution": 2.0},
            r"units of all images \(resolution: 2, .*image0\.tif: metres, .*image1\.tif: degrees\)",
        ),
        (
            {
                "resolution": 3e-6,
                "images": names[1],
                "labels": labels[1],
                "validation": ValidationKeys(names[2], labels[2]),
            },
            r"image1\.tif: degrees, .*image2\.tif: units of 0\.30480061 m\)",
        ),
        ({"validation": linked}, r"not both \(.*link\.tif\)"),
        ({"validation": one_band, "images": names[1:], "labels": labels[1:]}, r"\(.*: 3, .*: 1\)"),
        (
            {
                "images": [*names, f"{shared_path}/./image0.tif"],
                "labels": [*labels, labels[0]],
                "validation": KEYS,
            },
            r"image once \(.*image0\.tif: several",
        ),
        (
            {
                "images": [f"{red}+{green}", f"{green}+{red}"],
                "labels": [labels[0]] * 2,
                "validation": KEYS,
            },
            r"image once \(.*/red\.tif: several",
        ),
        (
            {
                "validation": ValidationKeys(share=0.1, block_px=200),
                "images": names[0],
                "labels": labels[0],
            },
            r"blocks: 1, with labels: 1\)",
        ),
        ({"images": "list.csv", "labels": None}, r"are read before .*images: list\.csv\)"),
        ({"validation": ValidationKeys(share=0.95, block_px=12)}, "no others are left"),
    ):
        with pytest.raises(AgreedError, match=said) as raised:
            train(replace(run, **change), comm=comm)  # type: ignore[arg-type]
        assert "\n" not in str(raised.value)
