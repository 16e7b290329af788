"""Modules as they are, on windows: an approximation, but the same one on any ranks and tiles."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
import torch
import torch.nn.functional as F
from attending import network
from left_by_runs import losses, same_tensors, weights
from mpi4py import MPI
from test_same_as_whole_image import SEED, STEPS, check_same, run_file, scenes_of
from torch import nn
from whole_image import IGNORE, Outcome, Scene, random_scene, standardised
from whole_recipe import samples_of

import tilenet
from tilenet.cli.predict import main
from tilenet.errors import TilenetError
from tilenet.geometry.halo_rule import HaloRule
from tilenet.geometry.opaque import Opaque
from tilenet.library.whole_run import train
from tilenet.mapping.blended import tiles_of_windows, window_ratio
from tilenet.mapping.predict import predict
from tilenet.mapping.prediction import Prediction
from tilenet.model.opaque import digest_of
from tilenet.planning.memory.map_limits import countable
from tilenet.random_keys import key
from tilenet.training.config.keys import AugmentKeys, MeshKeys, NetworkKeys, OptimizerKeys, TileKeys
from tilenet.training.config.run_file import RunFile
from tilenet.training.config.validation_keys import ValidationKeys

WINDOW = 24  # crops begin on multiples of 8 px, and some reach over an edge
SIZES = [(109, 151), (83, 97)]


def a_run(folder: Path, scenes: list[Scene], **change: Any) -> RunFile:
    keys = NetworkKeys(module="attending:network", options={"window_px": WINDOW})
    given: dict[str, Any] = {
        "crop_px": WINDOW,
        "halo_mode": "windows",
        "augment": AugmentKeys(flips=True),
        "optimizer": OptimizerKeys("sgd", 0.2, momentum=0.9),
        "batch_size": 5,
        "network": keys,
    }
    run = run_file(folder, scenes, keys)
    return RunFile(**(vars(run) | given | change))


def blended(module: nn.Module, image: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The map (classes, H, W) of an image (bands, H, W): windows that overlap by half."""
    height, width = image.shape[1:]
    half = WINDOW // 2
    image = np.pad(image, ((0, 0), (0, -height % half), (0, -width % half)), mode="reflect")
    away = np.arange(WINDOW) - (WINDOW - 1) / 2
    bell = np.exp(-((away / (WINDOW / 8)) ** 2) / 2)
    weight = bell[:, None] * bell
    total, weights = np.zeros((3, *image.shape[1:])), np.zeros(image.shape[1:])
    for row in range(0, image.shape[1] - half, half):
        for col in range(0, image.shape[2] - half, half):
            part = np.s_[..., row : row + WINDOW, col : col + WINDOW]
            total[part] += weight * module(torch.from_numpy(image[part])[None])[0][0].numpy()
            weights[part] += weight
    return np.asarray((total / weights)[:, :height, :width])


def train_plainly(run: RunFile, scenes: list[Scene]) -> Outcome:
    """A plain loop over the crops in torch."""
    module = network(WINDOW).double()
    optimizer = torch.optim.SGD(module.parameters(), run.optimizer.lr, momentum=0.9)
    look, losses = samples_of(run, scenes, 8), []
    for step in range(STEPS):
        module.train()
        module.norm.eval()
        optimizer.zero_grad()
        total, count = torch.zeros((), dtype=torch.float64), 0
        for sample in look(step):
            torch.manual_seed(key(SEED, "opaque", step, sample.number) % 2**63)
            labels = torch.from_numpy(sample.labels)[None]
            height, width = sample.labels.shape
            edges = ((0, 0), (0, WINDOW - height), (0, WINDOW - width))
            window = np.pad(sample.pixels, edges, mode="reflect")
            logits = module(torch.from_numpy(window)[None])[0][..., :height, :width]
            total = total + F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
            count += int((labels != IGNORE).sum())
        (total / count).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(total.detach()) / count)
    with torch.no_grad():
        logits = blended(module.eval(), standardised(scenes[0]))
    return Outcome(losses, dict(module.state_dict()), logits)


def outcome_on_windows(run: RunFile, image: Path, comm: MPI.Intracomm, tile_px: int) -> Outcome:
    """What a run and a map of it leave. Collective."""
    assert train(run, overwrite=True, comm=comm) == 0
    logits = Path(run.output) / "logits.tif"
    asked = Prediction(run.output, str(image), str(logits), "logits", tile_px, overwrite=True)
    predict(replace(asked, module=network(WINDOW, seed=9)), comm)
    with rasterio.open(logits) as file:
        assert f"windows of {WINDOW} × {WINDOW} px" in file.tags()["TILENET_NOTE"]
        return Outcome(losses(run), weights(run), file.read())


@pytest.mark.ranks(1, 2, 3)
def test_training_and_maps_are_those_of_a_plain_loop(
    shared_path: Path, comm: MPI.Intracomm
) -> None:
    scenes = scenes_of(shared_path, SIZES, comm)
    run = a_run(shared_path, scenes)
    found = outcome_on_windows(run, scenes[0].image, comm, tile_px=48)
    check_same(comm, found, train_plainly(run, scenes), scenes[0].valid)


@pytest.mark.ranks(1, 2, 3)
def test_tiles_do_not_change_a_bit_of_a_map(shared_path: Path, comm: MPI.Intracomm) -> None:
    (scene,) = scenes_of(shared_path, SIZES[:1], comm)
    module = network(WINDOW).double()
    maps = [
        tilenet.predict(module, scene.image, output="logits", window_px=WINDOW, tile_px=tile_px)
        for tile_px in (None, 16, 80)
    ]
    for other in maps[1:]:
        np.testing.assert_array_equal(maps[0], other)
    bounds = (37, 40, 30, 61)
    part = tilenet.predict(module, scene.image, output="logits", window_px=WINDOW, window=bounds)
    np.testing.assert_array_equal(maps[0][:, 37:67, 40:101], part)
    raw = np.where(scene.valid, scene.pixels, 0).astype(np.float64)
    with torch.no_grad():
        wanted = blended(module.eval(), raw)
    apart = np.abs(maps[0] - wanted)[:, scene.valid].max()
    assert apart <= 1e-12 * np.abs(wanted).max()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("shard", ["always", "never"])
def test_weights_may_lie_in_any_order(shared_path: Path, comm: MPI.Intracomm, shard: Any) -> None:
    """Channels last, say: optimizers go over weights and gradients as they lie in memory."""
    scenes = scenes_of(shared_path, SIZES, comm)
    keys = NetworkKeys(module="attending:channels_last", options={"window_px": WINDOW})
    optimizer = OptimizerKeys("sgd", 0.2, momentum=0.9, shard=shard)
    run = a_run(shared_path, scenes, network=keys, optimizer=optimizer)
    found = outcome_on_windows(run, scenes[0].image, comm, tile_px=48)
    check_same(comm, found, train_plainly(run, scenes), scenes[0].valid)


@pytest.mark.ranks(1, 2)
def test_scores_of_a_validation_are_those_of_the_map(
    shared_path: Path, comm: MPI.Intracomm
) -> None:
    scenes = scenes_of(shared_path, SIZES, comm)
    held = ValidationKeys(images=str(scenes[1].image), labels=str(scenes[1].labels), every=1)
    run = a_run(shared_path, scenes[:1], validation=held)
    assert train(run, overwrite=True, comm=comm) == 0
    out = shared_path / "map.tif"
    asked = Prediction(run.output, str(scenes[1].image), str(out), module=network(WINDOW))
    predict(asked, comm)
    scores = tilenet.evaluate(out, scenes[1].labels)
    last = tilenet.Run(run.output).validation["mean_iou"][-1]
    assert scores.mean_iou == pytest.approx(last, abs=1e-12)


@pytest.mark.ranks(1)
def test_norms_that_do_not_normalise_are_said(
    shared_path: Path, comm: MPI.Intracomm, capsys: pytest.CaptureFixture[str]
) -> None:
    scenes = scenes_of(shared_path, SIZES[:1], comm)
    keys = NetworkKeys(module="attending:Attending", options={"window_px": WINDOW})
    assert train(a_run(shared_path, scenes, network=keys, steps=1), comm=comm) == 0
    said = capsys.readouterr().err
    assert "all batch norms (1) are as made" in said
    assert "so they do not normalise; give trained weights" in said
    assert train(a_run(shared_path, scenes, steps=1), overwrite=True, comm=comm) == 0
    assert "as made" not in capsys.readouterr().err


@pytest.mark.ranks(1, 2)
def test_a_run_on_windows_resumes(shared_path: Path, comm: MPI.Intracomm) -> None:
    scenes = scenes_of(shared_path, SIZES, comm)
    whole, parts = (a_run(shared_path / name, scenes) for name in ("whole", "parts"))
    assert train(whole, comm=comm) == 0
    assert train(replace(parts, steps=1), comm=comm) == 0
    assert train(parts, resume=True, comm=comm) == 0
    assert same_tensors(weights(whole), weights(parts))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no crops": ({"crop_px": None}, "as large as crops"),
    "an odd window": ({"crop_px": 33}, "of an even size"),
    "our own U-Net": ({"network": NetworkKeys(poolings=2)}, "a user module"),
    "tiles": ({"tiles": TileKeys(size_px=64)}, "leave tiles out"),
    "rows of ranks": ({"mesh": MeshKeys(rows=2)}, "mesh.rows: 2"),
    "partitions": ({"partitions": 2}, "partitions: 2"),
    "swapping": ({"swap": "auto"}, "swap: auto"),
    "a halo": ({"halo": 16}, "halo: 16"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_keys_that_need_layers_are_refused(tmp_path: Path, name: str) -> None:
    change, words = REFUSED[name]
    with pytest.raises(TilenetError, match=words):
        a_run(tmp_path, [random_scene(tmp_path, (64, 64), 1, write=False)], **change)


class Counting(nn.Module):
    """Changes a buffer in each forward pass."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.conv(x) * self.seen  # type: ignore[no-any-return]


REFUSED_MODULES: dict[str, tuple[nn.Module, int, str]] = {
    "a coarse map": (nn.Conv2d(3, 3, 2, stride=2), WINDOW, "one cell per pixel"),
    "other windows": (network(WINDOW), 48, "that it was made for"),
    "a buffer that changes": (Counting(), WINDOW, "may not change buffers"),
    "an odd window": (network(WINDOW), 31, "overlap by half"),
    "a small image": (nn.Conv2d(3, 3, 1), 128, "at least as large as a window"),
}


@pytest.mark.parametrize("name", REFUSED_MODULES)
def test_modules_that_do_not_run_on_windows_are_refused(name: str) -> None:
    module, window_px, words = REFUSED_MODULES[name]
    with pytest.raises(TilenetError, match=words):
        tilenet.predict(module, np.ones((3, 96, 200), np.uint8), window_px=window_px)


@pytest.mark.ranks(1)
def test_a_checkpoint_of_windows_names_the_code_that_it_lacks(
    shared_path: Path, comm: MPI.Intracomm, capsys: pytest.CaptureFixture[str]
) -> None:
    scenes = scenes_of(shared_path, SIZES[:1], comm)
    run = a_run(shared_path, scenes, steps=1)
    assert train(run, comm=comm) == 0
    map_of = [run.output, str(scenes[0].image), str(shared_path / "map.tif")]
    assert main(map_of) == 1
    assert "with --network attending:network and its" in capsys.readouterr().err
    assert (
        main([*map_of, "--network", "attending:network", "--options", f"window_px={WINDOW}"]) == 0
    )
    named = ["attending:network", str(scenes[0].image), str(shared_path / "other.tif")]
    weights = str(Path(run.output) / "last" / "weights.safetensors")
    named += ["--options", f"window_px={WINDOW}"]
    assert main([*named, "--window-px", str(WINDOW), "--weights", weights]) == 0
    assert main([*named, "--network", "attending:network"]) == 1


def test_a_tile_of_windows_has_a_map_that_kernels_can_count() -> None:
    layer = Opaque(3, 12, 2048, "nets:Net")
    tiling = tiles_of_windows(layer, (30_000,) * 2, HaloRule(1024, 1024, exact=False), 1 << 40)
    assert tiling.rows[0].own > 2 * 1024
    read_px = max(span.read for span in tiling.rows)
    assert countable((layer,), read_px, read_px)


def test_the_work_ratio_counts_all_windows() -> None:
    layer = Opaque(3, 3, 32, "nets:Net")
    alone = tiles_of_windows(layer, (160, 96), HaloRule(16, 16, exact=False), 1 << 30)
    assert alone.grid == (1, 1)
    assert window_ratio(layer, alone) == 9 * 5 * 32**2 / (160 * 96)
    # A tile of one step in the middle is touched by two windows a side, at an edge by one.
    each = tiles_of_windows(layer, (160, 96), HaloRule(16, 16, exact=False), 1, tile_px=16)
    assert window_ratio(layer, each) == (2 * 10 - 2) * (2 * 6 - 2) * 32**2 / (160 * 96)


@pytest.mark.parametrize("options", [{"window_px": WINDOW, "heads": 3}, None])
def test_a_run_on_windows_goes_on_with_the_module_that_it_began_with(
    tmp_path: Path, comm: MPI.Intracomm, options: dict[str, Any] | None
) -> None:
    run = a_run(tmp_path / "run", scenes_of(tmp_path, SIZES[:1], comm))
    assert train(replace(run, steps=1), comm=comm) == 0
    path = Path(run.output) / "last" / "network.json"
    entry = json.loads(path.read_text())
    (layer,) = entry["layers"]
    assert layer["digest"] == digest_of(network(WINDOW)) == digest_of(network(WINDOW, seed=9))
    if options is None:
        layer["digest"] = ""  # as older versions
    else:
        layer["digest"] = digest_of(torch.nn.Sequential(network(WINDOW)))
    path.write_text(json.dumps(entry))
    (path.parent / "checksums.json").unlink()
    if options is None:
        assert train(run, resume=True, comm=comm) == 0
    else:
        with pytest.raises(TilenetError, match="goes on with the network that it began with"):
            train(run, resume=True, comm=comm)


def test_a_digest_is_of_what_a_module_is_made_of() -> None:
    class Part(nn.Module):
        def __init__(self, **options: Any) -> None:
            super().__init__()
            vars(self).update(options)

    digests = {
        digest_of(nn.Sequential(module))
        for module in (
            Part(), Part(act="relu"), Part(act="tanh"), Part(act=torch.tanh), Part(act=torch.relu),
            Part(sizes=[1, 2]), Part(sizes=[2, 1]), Part(scale=float("nan")), nn.Conv2d(1, 1, 3),
            nn.Conv2d(1, 1, 3, padding=1),
        )
    }  # fmt: skip
    assert len(digests) == 10
    assert digest_of(Part(thing=object())) == digest_of(Part(thing=object()))
