"""The promise: ranks and tiles never change the result."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
import torch
from left_by_runs import farthest, losses, weights
from mpi4py import MPI
from whole_image import Outcome, Scene, random_scene
from whole_recipe import train_whole

from tilenet.geometry.unet import UNetOptions
from tilenet.library.whole_run import train
from tilenet.mapping.predict import predict
from tilenet.mapping.prediction import Prediction
from tilenet.training.config.keys import MeshKeys, NetworkKeys, OptimizerKeys, TileKeys
from tilenet.training.config.run_file import RunFile
from tilenet.training.loop import Loop

pytestmark = pytest.mark.ranks(1, 2, (3, 6), 4)

SEED, STEPS, LR = 5, 3, 0.05

NETWORKS = {
    "same-nearest": NetworkKeys(poolings=3, base=4, dropout=0.2),
    "same-bilinear": NetworkKeys(poolings=2, base=4, dropout=0.2, upsampling="bilinear"),
    "same-transposed": NetworkKeys(poolings=2, base=4, dropout=0.2, upsampling="transposed"),
    "valid": NetworkKeys(poolings=2, base=4, dropout=0.2, padding="valid"),
}
TILES: dict[str, tuple[tuple[int, int], tuple[int, int] | int | None]] = {
    "tile per rank": ((157, 211), None),
    "3x2": ((157, 211), (3, 2)),
    "2x3": ((211, 99), (2, 3)),
    "size 40": ((157, 211), 40),
}
OTHER_RANKS = 1, 3, 4, 6
# All over 2 ranks; over each other number each network and each tiles: a Latin square.
CASES = [
    pytest.param(*TILES[way], name, id=f"{way}-{name}", marks=pytest.mark.ranks(2, ranks))
    for row, name in enumerate(NETWORKS)
    for ranks, way in zip(OTHER_RANKS[row:] + OTHER_RANKS[:row], TILES, strict=True)
]


def options_of(keys: NetworkKeys) -> UNetOptions:
    given = {name: value for name, value in vars(keys).items() if value is not None}
    return UNetOptions(**given, bands=3, classes=3)


def with_norm(keys: NetworkKeys, norm: Any) -> NetworkKeys:
    return replace(keys, norm=norm, groups=2 if norm == "group" else None)


def run_file(folder: Path, scenes: list[Scene], network: NetworkKeys, **more: Any) -> RunFile:
    return RunFile(
        images=tuple(str(scene.image) for scene in scenes),
        labels=tuple(str(scene.labels) for scene in scenes),
        classes=3,
        output=str(folder / "run"),
        network=network,
        precision="float64",
        device="cpu",
        seed=SEED,
        steps=STEPS,
        batch_size=len(scenes),
        optimizer=OptimizerKeys(name="sgd", lr=LR),
        **more,
    )


def outcome_of(run: RunFile, comm: MPI.Intracomm, image: Path, tile_px: int | None) -> Outcome:
    """Train and map with tilenet; what it left on disk."""
    assert train(run, overwrite=True, comm=comm) == 0
    return read_outcome(run, image, comm, tile_px)


def read_outcome(
    run: RunFile, image: Path, comm: MPI.Intracomm, tile_px: int | None = None
) -> Outcome:
    """Map with the network that a run left; what is on disk."""
    logits = Path(run.output) / "logits.tif"
    predict(
        Prediction(run.output, str(image), str(logits), "logits", tile_px, overwrite=True), comm
    )
    with rasterio.open(logits) as file:
        return Outcome(losses(run), weights(run), file.read())


def differences(found: Outcome, wanted: Outcome, valid: np.ndarray[Any, Any]) -> tuple[float, ...]:
    """Largest differences of losses, weights (relative to the tensor's largest) and logits."""
    loss = max(abs(a - b) for a, b in zip(found.losses, wanted.losses, strict=True))
    weight = farthest(found.weights, wanted.weights)
    assert np.isnan(found.logits[:, ~valid]).all()
    return loss, weight, float(np.abs(found.logits - wanted.logits)[:, valid].max())


def check_same(
    comm: MPI.Intracomm,
    found: Outcome,
    wanted: Outcome,
    valid: np.ndarray[Any, Any],
    logits: float = 1e-12,
) -> None:
    """Losses, weights and logits, on all ranks. Collective."""
    apart = [comm.allreduce(one, op=MPI.MAX) for one in differences(found, wanted, valid)]
    assert apart[0] <= 1e-12
    assert apart[1] <= 1e-10
    assert apart[2] <= logits * max(1.0, float(np.abs(wanted.logits).max()))


def scenes_of(
    folder: Path, sizes: Sequence[tuple[int, int]], comm: MPI.Intracomm, **more: Any
) -> list[Scene]:
    """Scenes on disk that share their statistics, as images of a run do. Collective."""
    scenes = [
        random_scene(folder, size, seed, write=comm.rank == 0, **more)
        for seed, size in enumerate(sizes, start=1)
    ]
    comm.Barrier()
    return with_common_statistics(scenes)


def wanted_of(scenes: list[Scene], keys: NetworkKeys, loss: str = "ce") -> Outcome:
    """The reference on scenes of `scenes_of`; tests of the same scenes and network share it."""
    return _wanted(tuple(scene.valid.shape for scene in scenes), keys, loss)


@cache
def _wanted(sizes: tuple[tuple[int, int], ...], keys: NetworkKeys, loss: str) -> Outcome:
    scenes = [random_scene(Path(), size, seed, write=False) for seed, size in enumerate(sizes, 1)]
    options = options_of(keys)
    return train_whole(with_common_statistics(scenes), options, STEPS, LR, SEED, loss)


def with_common_statistics(scenes: list[Scene]) -> list[Scene]:
    """Else the reference takes those of each image alone."""
    pixels = np.concatenate([s.pixels[:, s.valid] for s in scenes], axis=1).astype(np.float64)
    statistics = pixels.mean(axis=1), pixels.std(axis=1)
    return [replace(scene, statistics=statistics) for scene in scenes]


@pytest.mark.parametrize(("size", "tiles", "name"), CASES)
def test_losses_weights_and_logits_are_those_of_the_whole_image(
    comm: MPI.Intracomm,
    shared_path: Path,
    size: tuple[int, int],
    tiles: tuple[int, int] | int | None,
    name: str,
) -> None:
    (scene,) = scenes_of(shared_path, [size], comm)
    keys = TileKeys()
    if isinstance(tiles, tuple):
        keys = TileKeys(rows=tiles[0], columns=tiles[1])
    elif tiles is not None:
        keys = TileKeys(size_px=tiles)
    run = run_file(shared_path, [scene], NETWORKS[name], tiles=keys)
    wanted = wanted_of([scene], NETWORKS[name])
    tile_px = tiles if isinstance(tiles, int) else 64
    found = outcome_of(run, comm, scene.image, tile_px)
    check_same(comm, found, wanted, scene.valid)


@pytest.mark.ranks(1, 2, 3, 4)
def test_several_images_of_a_step_are_shared_by_replicas(
    comm: MPI.Intracomm, shared_path: Path
) -> None:
    scenes = scenes_of(shared_path, [(60, 77), (41, 120), (97, 33)], comm)
    keys = NETWORKS["same-bilinear"]
    # each replica holds whole images; three images over up to six ranks leave some idle
    run = run_file(shared_path, scenes, keys, mesh=MeshKeys(comm.size, 1, 1))
    wanted = wanted_of(scenes, keys)
    found = outcome_of(run, comm, scenes[0].image, 32)
    check_same(comm, found, wanted, scenes[0].valid)


def test_a_halo_one_alignment_unit_too_small_is_detected(
    comm: MPI.Intracomm, shared_path: Path
) -> None:
    """The negative control: the tolerances above are tight enough to see a wrong halo."""
    (scene,) = scenes_of(shared_path, [(157, 211)], comm)
    keys = NETWORKS["same-nearest"]
    wanted = wanted_of([scene], keys)
    exact_px = 48
    run = run_file(shared_path, [scene], keys, tiles=TileKeys(rows=3, columns=4), halo=exact_px - 8)
    found = outcome_of(run, comm, scene.image, 40)
    assert max(abs(a - b) for a, b in zip(found.losses, wanted.losses, strict=True)) > 1e-12
    weight = differences(found, wanted, scene.valid)[1]
    assert weight > 1e-10


@pytest.mark.ranks(1, 2, 4)
def test_crops_do_not_depend_on_how_they_are_tiled(comm: MPI.Intracomm, shared_path: Path) -> None:
    (scene,) = scenes_of(shared_path, [(157, 211)], comm)
    keys = NETWORKS["same-nearest"]
    more = {"crop_px": 64}
    run = replace(run_file(shared_path, [scene], keys, **more), batch_size=3)
    alone = replace(run, output=str(shared_path / f"alone{comm.rank}"))
    wanted = outcome_of(alone, MPI.COMM_SELF, scene.image, None)
    found = outcome_of(replace(run, tiles=TileKeys(2, 2)), comm, scene.image, None)
    check_same(comm, found, wanted, scene.valid, logits=np.inf)


def weights_of_saves(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, torch.Tensor]]:
    """What this rank holds whenever a run saves."""
    held: list[dict[str, torch.Tensor]] = []
    save = Loop._save

    def watched(self: Loop, *arguments: Any, **options: Any) -> None:
        held.append({k: v.clone() for k, v in self.network.network.state_dict().items()})
        save(self, *arguments, **options)

    monkeypatch.setattr(Loop, "_save", watched)
    return held


def test_all_ranks_hold_the_same_weights_to_the_last_bit(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (scene,) = scenes_of(shared_path, [(97, 130)], comm)
    keys = replace(NETWORKS["same-nearest"], norm="batch", norm_scope="tile")
    held = weights_of_saves(monkeypatch)
    run = replace(
        run_file(shared_path, [scene], keys, tiles=TileKeys(2, 3)),
        optimizer=OptimizerKeys("adamw", 0.01),
        precision="float32",
    )
    assert train(run, comm=comm) == 0
    everywhere = comm.allgather(held[-1])
    for other in everywhere:
        for name, tensor in held[-1].items():
            # batches seen is the one number that may differ: a rank counts its own tiles
            assert name.endswith("num_batches_tracked") or torch.equal(tensor, other[name])
