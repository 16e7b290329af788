"""What is held out is not trained on, by any number of ranks, and nothing leaks from it."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
import torch
from left_by_runs import alone, check_close, farthest, losses, weights
from mpi4py import MPI
from test_same_as_whole_image import LR, SEED, STEPS, options_of, run_file
from unlike_scenes import (
    CONTEXT_PX,
    KEYS,
    NETWORK,
    held_out,
    mixed_scenes,
    near_blocks,
)
from whole_image import IGNORE, Scene
from whole_recipe import train_whole

from tilenet.data import labelled_blocks
from tilenet.data.holdout import HeldOut, blocks_of
from tilenet.errors import AgreedError
from tilenet.geometry.halo import context_of
from tilenet.geometry.unet import unet_layers
from tilenet.library.whole_run import train
from tilenet.parallel.ranks.together import RankControl
from tilenet.training.config.keys import AugmentKeys, MeshKeys, NetworkKeys
from tilenet.training.config.validation_keys import ValidationKeys
from tilenet.training.images.held_out import hold_out
from tilenet.training.images.open import open_images


@pytest.mark.ranks(2, 3)
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
    assert max(abs(a - b) for a, b in zip(losses(run), wanted.losses, strict=True)) <= 1e-12
    assert farthest(weights(run), wanted.weights) <= 1e-10


@pytest.mark.ranks(2, 4)
def test_crops_and_class_weights_are_those_of_one_rank(
    comm: MPI.Intracomm, shared_path: Path
) -> None:
    scenes = mixed_scenes(shared_path, comm)
    run = run_file(shared_path, scenes, NETWORK, validation=KEYS, crop_px=48)
    run = replace(run, class_weights="auto", augment=AugmentKeys(flips=True, rotations=True))
    assert train(run, comm=comm) == 0
    check_close(run, alone(run, comm))


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
@pytest.mark.parametrize(("padding", "crop_px"), [("same", 48), ("valid", None)])
def test_nothing_leaks_from_what_is_held_out(
    comm: MPI.Intracomm, shared_path: Path, padding: Any, crop_px: int | None
) -> None:
    """Losses and weights are the same bits; and are not with a margin of one pixel less."""
    scenes = mixed_scenes(shared_path, comm)
    network = replace(NETWORK, padding=padding)
    run = run_file(shared_path, scenes, network, validation=KEYS, class_weights="auto")
    if crop_px:
        turned = AugmentKeys(flips=True, rotations=True)
        run = replace(run, crop_px=crop_px, augment=turned, steps=12)
    context_px = context_of(unet_layers(options_of(network))).context_any_pixel_px

    def both(margin_less: int) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
        with pytest.MonkeyPatch.context() as patch:
            original = HeldOut.mask

            def narrower(self, image, window, margin_px=0):  # type: ignore[no-untyped-def]
                assert margin_px in (0, context_px)
                return original(self, image, window, max(0, margin_px - margin_less))

            patch.setattr(HeldOut, "mask", narrower)
            found = []
            for change in (False, True):
                mixed_scenes(shared_path, comm)
                if change:
                    changed(scenes, held_out(scenes, KEYS))
                assert train(run, overwrite=True, comm=comm) == 0
                found.append((losses(run), weights(run)))
        return found

    before, after = both(0)
    assert before[0] == after[0]
    assert all(torch.equal(before[1][name], after[1][name]) for name in before[1])
    before, after = both(1)
    assert not all(torch.equal(before[1][name], after[1][name]) for name in before[1])


@pytest.mark.ranks(1)
def test_averages_of_whole_images_are_said_to_leak(
    comm: MPI.Intracomm, shared_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """And so they do: the network has no norm but a frozen one."""
    scenes = mixed_scenes(shared_path, comm)
    gated = NetworkKeys(module="zoo:network", options={"name": "gated", "drops": False})
    run = run_file(shared_path, scenes, gated, validation=KEYS)
    found = []
    for change in (False, True):
        if change:
            changed(scenes, held_out(scenes, KEYS))
        assert train(run, overwrite=True, comm=comm) == 0
        found.append(losses(run))
    assert found[0] != found[1]
    said = "too, but pools over whole images or crops (mean) are of held-out pixels as well"
    assert capfd.readouterr().err.count(said) == 2


@pytest.mark.ranks(2)
def test_validation_sees_what_training_does_not(comm: MPI.Intracomm, shared_path: Path) -> None:
    scenes = mixed_scenes(shared_path, comm)
    run = run_file(shared_path, scenes[:2], NETWORK)
    other = ValidationKeys(str(scenes[2].image), str(scenes[2].labels), 0.15, 33)
    held = held_out(scenes[:2], other)
    with ExitStack() as stack:
        opened = open_images(replace(run, validation=other), stack, RankControl(comm))
        parts = hold_out(
            opened, other, len(run.class_names), run.seed, CONTEXT_PX, RankControl(comm)
        )
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


@pytest.mark.ranks(2)
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


@pytest.mark.ranks(1, 3)
def test_blocks_whose_labels_have_no_data_count_as_those_without_labels(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(labelled_blocks, "PIECE_PX", 9)
    scenes = mixed_scenes(shared_path, comm)
    for scene in scenes[:2]:
        scene.pixels[:, :, 40:] = 0  # nodata
        scene.valid[:, 40:] = False
        if comm.rank == 0:
            with rasterio.open(scene.image, "r+") as file:
                file.write(scene.pixels)
    comm.Barrier()
    blocks = blocks_of([scene.valid.shape for scene in scenes], 33)
    with ExitStack() as stack:
        opened = open_images(run_file(shared_path, scenes, NETWORK), stack, RankControl(comm))
        found = labelled_blocks.labelled_blocks(
            opened.images, opened.labels, blocks, 3, RankControl(comm)
        )
    wanted, labelled = [], []
    for image, window in blocks:
        rows = slice(window.row, window.row + window.height)
        place = rows, slice(window.col, window.col + window.width)
        counted = scenes[image].classes[place] != IGNORE
        labelled.append(counted.any())
        wanted.append((counted & scenes[image].valid[place]).any())
    assert found.tolist() == wanted != labelled
