"""Scores while training are those of the map that is made of the same checkpoint."""

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
from validated_runs import (
    LAYERS,
    NETWORK,
    a_run,
    check_row,
    held_out,
    small_tiles,
    table,
    wanted_row,
)
from whole_image import IGNORE

import tilenet.mapping.choose
import tilenet.mapping.count
import tilenet.mapping.job
import tilenet.train
from tilenet.geometry.windows import Window
from tilenet.mapping.mapper import Mapper
from tilenet.parallel.health.watchdog import Watchdog
from tilenet.predict import Prediction, predict
from tilenet.scores import scores
from tilenet.train import train
from tilenet.training.config.keys import OptimizerKeys, SwappingKeys
from tilenet.training.config.run_file import RunFile
from tilenet.training.config.validation_keys import ValidationKeys
from tilenet.training.images.held_out import hold_out
from tilenet.training.images.open import RunImages, open_images
from tilenet.training.scoring import Validation


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    ("norm", "mode", "tiles"),
    [
        (None, "overlap", "small"),
        (None, "exchange", "whole"),
        ("instance", "overlap", "small"),
        ("instance", "exchange", "whole"),
        ("batch", "exchange", "small"),
        ("unpadded", "overlap", "small"),
    ],
)
def test_scores_are_those_of_the_map(
    comm: MPI.Intracomm,
    shared_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    norm: Any,
    mode: Any,
    tiles: str,
) -> None:
    if tiles == "small":
        small_tiles(monkeypatch, 250_000 if norm == "instance" else 1 << 20)
    network = replace(NETWORK, norm=norm)
    if norm == "unpadded":
        network = replace(NETWORK, padding="valid")
    run, held = a_run(comm, shared_path, network, halo_mode=mode)
    assert train(run, comm=comm) == 0
    rows = table(run)
    assert [row["step"] for row in rows] == ["1", "2"]
    check_row(rows[-1], wanted_row(Path(run.output) / "last", held, comm))
    # Both images count, and pixels without data or label do not.
    counted = sum(int((one.valid & (one.classes != IGNORE)).sum()) for one in held)
    assert [int(row["num_pixels"]) for row in rows] == [counted] * 2
    cells = table(run, "confusion.csv")
    for step in ("1", "2"):
        matrix = np.zeros((3, 4), np.int64)
        for cell in cells:
            if cell["step"] == step:
                matrix[int(cell["label"]), int(cell["predicted"])] += int(cell["pixels"])
        assert f"{scores(matrix)['mean_iou']:.17g}" == rows[int(step) - 1]["mean_iou"]


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(
    "more",
    [
        {"balance": [9, LAYERS - 9], "micro_batches": 2, "validation.batch_size": 3},
        {"halo_mode": "exchange"},
    ],
    ids=["two partitions", "exchange"],
)
def test_ranks_partitions_and_tiles_at_a_time_do_not_show(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    small_tiles(monkeypatch)
    # Steps would differ by roundings, so the weights stay what they are.
    run, _ = a_run(comm, shared_path, steps=1, optimizer=OptimizerKeys("sgd", 0.0))
    alone = replace(run, output=str(shared_path / f"alone{comm.rank}"))
    assert train(alone, comm=MPI.COMM_SELF) == 0
    more = dict(more)
    keys = replace(run.validation, batch_size=more.pop("validation.batch_size", 1))
    assert train(replace(run, validation=keys, **more), comm=comm) == 0
    found, wanted = table(run), table(alone)
    for one, other in zip(found, wanted, strict=True):
        # More tiles at a time are smaller ones, whose sums are rounded in other places.
        assert abs(float(one.pop("loss")) - float(other.pop("loss"))) <= 1e-12
    assert found == wanted
    assert table(run, "confusion.csv") == table(alone, "confusion.csv")


@pytest.mark.ranks(3)
def test_any_number_of_ranks_gives_the_same_bits(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_tiles(monkeypatch, 1)
    right = tilenet.mapping.count.cross_entropy

    def apart(logits: Any, target: Any, *rest: Any) -> Any:
        """Losses of tiles that are orders apart, so that the order of their sum would show."""
        return right(logits, target, *rest) * 10.0 ** (int(target.sum()) % 13)

    monkeypatch.setattr(tilenet.mapping.count, "cross_entropy", apart)
    run, _ = a_run(comm, shared_path, steps=1, optimizer=OptimizerKeys("sgd", 0.0))
    alone = replace(run, output=str(shared_path / f"alone{comm.rank}"))
    assert train(alone, comm=MPI.COMM_SELF) == 0
    assert train(run, comm=comm) == 0
    assert table(run) == table(alone)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mode", ["overlap", "exchange"])
def test_training_goes_on_with_the_same_bits(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Any
) -> None:
    more: dict[str, Any] = {"partitions": 2, "swap": "all", "swapping": SwappingKeys(min_mib=0)}
    if mode == "exchange":
        more = {"halo_mode": mode, "network": replace(NETWORK, norm="batch")}
    run, _ = a_run(comm, shared_path, **{"network": NETWORK, "steps": 3, **more})
    without = replace(run, validation=ValidationKeys(), output=str(shared_path / "without"))
    assert train(without, comm=comm) == 0
    original = Validation.score

    def watched(self: Validation, network: Any) -> Any:
        before = torch.random.get_rng_state(), [m.training for m in network.modules()]
        found = original(self, network)
        assert torch.equal(torch.random.get_rng_state(), before[0])
        assert [m.training for m in network.modules()] == before[1]
        assert all(p.requires_grad for p in network.parameters())
        return found

    monkeypatch.setattr(Validation, "score", watched)
    assert train(run, comm=comm) == 0
    assert len(table(run)) == 3
    losses = [[row["loss"] for row in table(one, "history.csv")] for one in (run, without)]
    assert losses[0] == losses[1]
    found, wanted = (
        load_file(Path(one.output) / "last" / "weights.safetensors") for one in (run, without)
    )
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in found)


@pytest.mark.ranks(3)
def test_only_tiles_that_hold_something_are_computed(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_tiles(monkeypatch)
    monkeypatch.setattr(tilenet.mapping.choose, "SWEEP_TIMES", 0)  # whole images in tiles too
    run, held = a_run(comm, shared_path, steps=1)
    windows = (Window(0, 85, 3, 6), Window(45, 0, 4, 40))
    scene, computed = held[0], []
    kept = np.full(scene.valid.shape, IGNORE, np.uint8)
    for one in windows:
        place = np.s_[one.row : one.row + one.height, one.col : one.col + one.width]
        kept[place] = 1
    if comm.rank == 0:
        with rasterio.open(scene.labels, "r+") as file:
            file.write(kept, 1)
    comm.Barrier()
    original = Mapper.tiles

    def counting(self: Mapper, pipe: Any, tiles: Any) -> Any:
        computed.extend(tiles)
        return original(self, pipe, tiles)

    armed: list[str] = []
    monkeypatch.setattr(Mapper, "tiles", counting)
    monkeypatch.setattr(Watchdog, "arm", lambda self, doing, times=1.0: armed.append(doing))
    tables = []
    for asked in (None, windows):

        def opened(run: RunFile, stack: ExitStack, *more: Any, asked: Any = asked) -> RunImages:
            found = open_images(run, stack, *more)
            first = found.validation[0]
            return replace(found, validation=[replace(first, windows=asked)])

        monkeypatch.setattr(tilenet.train, "open_images", opened)
        computed.clear()
        assert train(run, overwrite=True, comm=comm) == 0
        tables.append((table(run), comm.allreduce(len(computed))))
    (all_rows, all_tiles), (rows, tiles) = tables
    assert [{**row, "loss": ""} for row in rows] == [{**row, "loss": ""} for row in all_rows]
    assert float(rows[0]["loss"]) == float(all_rows[0]["loss"])
    assert (all_tiles, tiles) == (6, 3)
    rounds = -(-6 // comm.size) + -(-3 // comm.size)
    assert sum(doing.startswith("the round of tile") for doing in armed) == rounds
    assert armed.count("the sum of a validation") == 2


@pytest.mark.ranks(2)
def test_held_out_blocks_are_scored_as_their_part_of_the_map(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_tiles(monkeypatch, 1)  # smaller than blocks
    keys = ValidationKeys(share=0.3, block_px=24)
    run, _ = a_run(comm, shared_path, steps=1, validation=keys)
    assert train(run, comm=comm) == 0
    path = run.image_paths[0]
    out = shared_path / "map.tif"
    predict(Prediction(run.output, path, str(out)), comm)
    with ExitStack() as stack:
        opened = hold_out(open_images(run, stack), keys, 3, run.seed, 21, comm)
        (block,) = opened.validation
        truth = block.labels.read(block.image.whole)
        with rasterio.open(out) as file:
            found = file.read(1)
    counted = (truth != IGNORE) & (found != IGNORE)
    assert 0 < counted.sum() < 0.5 * counted.size
    matrix = np.zeros((3, 4), np.int64)
    np.add.at(matrix, (truth[counted], found[counted]), 1)
    (row,) = table(run)
    check_row(row, scores(matrix) | {"loss": float(row["loss"])})


@pytest.mark.ranks(3)
def test_ranks_share_images_of_one_tile(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[int] = []
    original = Mapper.tiles

    def counting(self: Mapper, pipe: Any, tiles: Any) -> Any:
        computed.append(len(tiles))
        return original(self, pipe, tiles)

    monkeypatch.setattr(Mapper, "tiles", counting)
    held = held_out(comm, shared_path)
    run, _ = a_run(comm, shared_path, held=held + held[::-1], steps=1)
    assert train(run, comm=comm) == 0
    assert comm.allgather(sum(computed)) == [2, 1, 1]


@pytest.mark.ranks(3)
def test_what_is_said(
    comm: MPI.Intracomm, shared_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, _ = a_run(comm, shared_path, steps=1)
    assert train(run, comm=comm) == 0
    said = "".join(comm.allgather(capfd.readouterr().err))
    assert said.count("validation after step 1: mean IoU ") == 1
    bar = said[said.rindex("1/1 [") :]
    row = table(run, "history.csv")[0]
    assert f"loss={float(row['loss']):.4f}" in bar
    assert "Mpx/s=" in bar
    assert "image" in bar
    # The images' tiles have bars of their own only where they take long.
    assert "tile/s" not in said
