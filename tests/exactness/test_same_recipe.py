"""Augmentation, focal loss, balanced weights, clipping and schedules: as on the whole image."""

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
import torch
from left_by_runs import losses as losses_of
from left_by_runs import weights
from mpi4py import MPI
from shared_out import grids
from test_same_as_whole_image import (
    SEED,
    check_same,
    options_of,
    outcome_of,
    read_outcome,
    with_norm,
)
from test_same_as_whole_image import scenes_of as scenes_with
from whole_image import Scene
from whole_recipe import train_recipe

from tilenet.errors import AgreedError
from tilenet.geometry.unet import unet_layers
from tilenet.library.whole_run import train
from tilenet.model import loss_scale
from tilenet.model.network import build_network
from tilenet.training import network as run_network
from tilenet.training.config.keys import (
    AugmentKeys,
    MeshKeys,
    NetworkKeys,
    OptimizerKeys,
    ScheduleKeys,
    TileKeys,
)
from tilenet.training.config.run_file import RunFile

pytestmark = pytest.mark.ranks(1, 2)

KEYS = NetworkKeys(poolings=2, base=6, dropout=0.2)
EVERYTHING = AugmentKeys(flips=True, rotations=True, brightness=0.3, contrast=0.4, noise=0.2)
SGD = OptimizerKeys("sgd", 0.2, momentum=0.9, nesterov=True)
ADAMW = OptimizerKeys("adamw", 0.01, weight_decay=0.1)
STILL = ScheduleKeys()
CLIPS = {"none": 0.3, "group": 1.0, "batch": 0.7}
POLY = ScheduleKeys("poly", power=1.5, warmup_steps=1, min_lr=0.001)


def scenes_of(folder: Path, sizes: list[tuple[int, int]], comm: MPI.Intracomm) -> list[Scene]:
    """Scenes with rare classes."""
    return scenes_with(folder, sizes, comm, shares=(0.7, 0.25, 0.05))


def a_run(folder: Path, scenes: list[Scene], keys: NetworkKeys = KEYS, **change: Any) -> RunFile:
    """All of the recipe at once; `change` turns to something else."""
    recipe: dict[str, Any] = {
        "augment": EVERYTHING,
        "loss": "focal",
        "class_weights": "auto",
        "optimizer": SGD,
        "schedule": POLY,
        "batch_size": len(scenes),
        "steps": 4,
        "classes": 3,
        "precision": "float64",
    } | change
    if recipe["loss"] == "focal":
        recipe["focal_gamma"] = 1.5
    return RunFile(
        images=[str(scene.image) for scene in scenes],
        labels=[str(scene.labels) for scene in scenes],
        output=str(folder / "run"),
        network=keys,
        device="cpu",
        seed=SEED,
        **recipe,
    )


def check(
    comm: MPI.Intracomm,
    folder: Path,
    scenes: list[Scene],
    keys: NetworkKeys = KEYS,
    clip_norm: float | None = None,
    **change: Any,
) -> None:
    run = a_run(folder, scenes, keys, **change)
    run = replace(run, optimizer=replace(run.optimizer, clip_norm=clip_norm))
    wanted = train_recipe(run, scenes, options_of(keys))
    assert abs(wanted.losses[-1] - wanted.losses[0]) > 1e-3, "steps must matter"
    found = outcome_of(run, comm, scenes[0].image, None)
    check_same(comm, found, wanted, scenes[0].valid, logits=1e-11)


@pytest.mark.ranks((1, 2))
@pytest.mark.parametrize(
    ("padding", "augment"),
    [
        pytest.param("same", EVERYTHING, id="everything-same"),
        pytest.param("valid", EVERYTHING, id="everything-valid"),
        pytest.param("same", AugmentKeys(flips=True, brightness=0.7), id="flips-same"),
        pytest.param("valid", AugmentKeys(rotations=True, contrast=0.5), id="rotations-valid"),
    ],
)
def test_tiles_of_whole_images(
    comm: MPI.Intracomm, shared_path: Path, padding: Any, augment: AugmentKeys
) -> None:
    """Of sizes that are no multiple of anything, so that turned images end elsewhere."""
    scenes = scenes_of(shared_path, [(51, 83), (62, 45)], comm)
    keys = replace(KEYS, padding=padding)
    check(
        comm, shared_path, scenes, keys, 0.12, augment=augment, mesh=MeshKeys(1, 1, comm.size),
        tiles=TileKeys(rows=2, columns=4),
    )  # fmt: skip


@pytest.mark.ranks((1, 2, 4))
@pytest.mark.parametrize("norm", ["none", "instance", "batch"])
@pytest.mark.parametrize("mode", ["overlap", "exchange"])
def test_windows_of_whole_images(
    comm: MPI.Intracomm, shared_path: Path, norm: Any, mode: str
) -> None:
    """One per rank; rotated, a grid of ranks lies across the image. Dice weighs no classes."""
    scenes = scenes_of(shared_path, [(51, 83)], comm)
    keys = replace(KEYS, norm=norm)
    # Of four ranks, what two do not tell: corners.
    for ranks in [(2, 2)] if comm.size == 4 else grids(comm.size):
        check(
            comm, shared_path, scenes, keys, 0.4, halo_mode=mode, mesh=MeshKeys(1, *ranks),
            loss="ce+dice", optimizer=ADAMW, schedule=ScheduleKeys("cosine", min_lr=0.002),
        )  # fmt: skip


@pytest.mark.ranks((1, 2))
@pytest.mark.parametrize(
    ("mode", "norm"),
    [("overlap", "group"), ("overlap", "batch"), ("exchange", "none"), ("exchange", "batch")],
)
def test_crops(comm: MPI.Intracomm, shared_path: Path, norm: Any, mode: str) -> None:
    """Of two images, at whose edges some are cut off."""
    scenes = scenes_of(shared_path, [(61, 83), (45, 70)], comm)
    mesh = {"mesh": MeshKeys(1, *grids(comm.size)[-1])}
    check(
        comm, shared_path, scenes, with_norm(KEYS, norm), CLIPS[norm], halo_mode=mode,
        crop_px=40, batch_size=3, **mesh,
        schedule=ScheduleKeys("step", milestones=[1, 3], factor=0.4),
        micro_batches=3 if mode == "exchange" and norm != "batch" else 1,
    )  # fmt: skip


@pytest.mark.ranks((1, 2, 4))
@pytest.mark.parametrize("loss", ["focal", "dice"])
def test_crops_in_a_pipeline(comm: MPI.Intracomm, shared_path: Path, loss: str) -> None:
    """Parameters on two devices, more tiles than ranks, and images of replicas."""
    scenes = scenes_of(shared_path, [(61, 83)], comm)
    replicas = 2 - comm.size % 2
    check(
        comm, shared_path, scenes, KEYS, 0.2 if loss == "focal" else 0.1, loss=loss, crop_px=40,
        batch_size=4, mesh=MeshKeys(replicas, 1, comm.size // replicas), tiles=TileKeys(3, 2),
        partitions=3, micro_batches=24, checkpointing="always",
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["overlap", "exchange"])
def test_dice_does_not_know_what_classes_weigh(
    comm: MPI.Intracomm, shared_path: Path, mode: str
) -> None:
    """Also where all that is labelled weighs nothing, in some of the steps: they are Dice's."""
    scenes = scenes_of(shared_path, [(44, 61), (52, 40)], comm)
    if comm.rank == 0:
        with rasterio.open(scenes[1].labels, "r+") as file:
            file.write(np.ones((1, 52, 40), np.uint8))
    comm.Barrier()
    changes: dict[str, Any] = {"batch_size": 1, "halo_mode": mode, "crop_px": 28}
    losses = []
    for weights_of_classes in (None, [2, 0, 3]):
        run = a_run(shared_path, scenes, loss="dice", class_weights=weights_of_classes, **changes)
        run = replace(run, steps=8, output=str(shared_path / str(weights_of_classes)))
        assert train(run, comm=comm) == 0
        losses.append(losses_of(run))
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-12)


@pytest.mark.parametrize("mode", ["overlap", "exchange"])
def test_where_all_that_is_labelled_weighs_nothing_dice_is_left(
    comm: MPI.Intracomm, shared_path: Path, mode: str
) -> None:
    scenes = scenes_of(shared_path, [(44, 61)], comm)
    found = []
    for loss, weighs in (("dice", None), ("ce+dice", [0, 0, 0, 1])):
        run = a_run(shared_path, scenes, loss=loss, class_weights=weighs, classes=4, halo_mode=mode)
        run = replace(run, output=str(shared_path / loss))
        assert train(run, comm=comm) == 0
        found.append(losses_of(run))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-12)
    assert found[0][0] != found[0][-1] != 0


def test_a_run_that_goes_on_has_the_same_rates_turns_and_noise(
    comm: MPI.Intracomm, shared_path: Path
) -> None:
    """Undisturbed on one rank; in two parts on all, where the total is another in the first."""
    scenes = scenes_of(shared_path, [(61, 83)], comm)
    steps = ScheduleKeys("step", warmup_steps=1, milestones=[2, 3], factor=0.3)
    run = a_run(shared_path, scenes, crop_px=40, batch_size=3, schedule=steps)
    alone = replace(run, output=str(shared_path / f"alone{comm.rank}"))
    wanted = outcome_of(alone, MPI.COMM_SELF, scenes[0].image, None)
    assert train(replace(run, steps=2), comm=comm) == 0
    assert train(run, resume=True, comm=comm) == 0
    found = read_outcome(run, scenes[0].image, comm)
    check_same(comm, found, wanted, scenes[0].valid, logits=np.inf)


def test_what_classes_weigh_is_said_once(
    comm: MPI.Intracomm, shared_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    scenes = scenes_of(shared_path, [(40, 41)], comm)
    run = a_run(shared_path, scenes, steps=1, classes=["sea", "land", "reef"], schedule=STILL)
    assert train(run, comm=comm) == 0
    counts = [int((scenes[0].classes[scenes[0].valid] == label).sum()) for label in range(3)]
    words = capfd.readouterr().err
    assert words.count("class_weights: auto") == (comm.rank == 0)
    if comm.rank == 0:
        line = next(line for line in words.splitlines() if "class_weights: auto" in line)
        names = ["sea", "land", "reef"]
        for name, count in zip(names, counts, strict=True):
            weight = float(line.split(f"{name} ")[1].split()[0])
            assert weight == pytest.approx(sum(counts) / 3 / count, rel=1e-14)
            assert f"({count:,} px)" in line


def test_turned_images_of_several_sizes_cannot_be_one_batch(
    comm: MPI.Intracomm, shared_path: Path
) -> None:
    scenes = scenes_of(shared_path, [(51, 83), (52, 84)], comm)
    keys = replace(KEYS, norm="batch")
    more: dict[str, Any] = {"mesh": MeshKeys(1, 1, comm.size), "steps": 1, "schedule": STILL}
    with pytest.raises(AgreedError, match=r"of one size .*, or augment\.rotations: false$"):
        train(a_run(shared_path, scenes, keys, **more), comm=comm)
    flips = AugmentKeys(flips=True)
    assert train(a_run(shared_path, scenes, keys, augment=flips, **more), comm=comm) == 0


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_the_clipped_gradient_is_that_of_the_mean_loss(
    comm: MPI.Intracomm, shared_path: Path, precision: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever float16 scales the loss with: a step with rate 1 is as long as the clipped norm."""
    monkeypatch.setattr(loss_scale, "FIRST", 0.25)
    scenes = scenes_of(shared_path, [(40, 41)], comm)
    sgd = OptimizerKeys("sgd", 1.0, clip_norm=0.01)
    keys = replace(KEYS, dropout=0.0)
    run = a_run(
        shared_path, scenes, keys, steps=1, optimizer=sgd, schedule=STILL, precision=precision,
        tiles=TileKeys(2, 3),
    )  # fmt: skip
    assert train(run, comm=comm) == 0
    after = weights(run)
    before = build_network(unet_layers(options_of(keys)), SEED, torch.float32).state_dict()
    squares = [((after[name] - tensor).double() ** 2).sum() for name, tensor in before.items()]
    assert float(sum(squares)) ** 0.5 == pytest.approx(0.01, rel=1e-4)


def test_memory_is_planned_for_turned_images(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = []
    monkeypatch.setattr(run_network, "decide_swaps", lambda *given: loads.append(given[0].loads))
    scenes = scenes_of(shared_path, [(51, 83)], comm)
    for seed in range(2):
        for rotations in (False, True):
            augment = AugmentKeys(rotations=rotations)
            change = {"tiles": TileKeys(1, 4), "augment": augment, "steps": 1, "schedule": STILL}
            run = a_run(shared_path, scenes, mesh=MeshKeys(1, 1, comm.size), **change)
            run = replace(run, seed=seed)
            assert train(run, overwrite=True, comm=comm) == 0
        plain, turned = (max((load.tile for load in one), key=prod) for one in loads[-2:])
        # One tile is as high as the image, and each image as high as the other is wide.
        assert (plain[0], turned[0]) == (52, 84)
        assert turned[1] < plain[1] < 83
        assert prod(turned) > prod(plain)
