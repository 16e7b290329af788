"""Scores while training: those of the map, what is refused, the best checkpoint, and stops."""

import os
import signal
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
import torch
from left_by_runs import check_bits, stop_in, whole
from mpi4py import MPI
from validated_runs import (
    LAYERS,
    NETWORK,
    SHAPES,
    a_run,
    check_row,
    held_out,
    kept,
    scripted,
    small_tiles,
    table,
    wanted_row,
)
from whole_image import IGNORE, Scene

import tilenet.library.whole_run
import tilenet.mapping.choose
import tilenet.mapping.job
import tilenet.mapping.scoring_sinks
from tilenet.data.labels.raster import Labels
from tilenet.data.rasters.raster import Raster
from tilenet.errors import AgreedError, TilenetError
from tilenet.geometry.windows import Window
from tilenet.library.whole_run import train
from tilenet.mapping.mapper import Mapper
from tilenet.mapping.predict import predict
from tilenet.mapping.prediction import Prediction
from tilenet.parallel.health.watchdog import Watchdog
from tilenet.parallel.ranks.together import RankControl
from tilenet.scores import scores
from tilenet.training.config.keys import OptimizerKeys, ScheduleKeys, SwappingKeys
from tilenet.training.config.run_file import RunFile
from tilenet.training.config.validation_keys import ValidationKeys
from tilenet.training.images.held_out import hold_out
from tilenet.training.images.open import RunImages, open_images
from tilenet.training.scoring import Validation
from tilenet.training.step import Step
from tilenet.training.validation import RunValidation

pytestmark = pytest.mark.ranks(2)


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


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    "optimizer", [OptimizerKeys("sgd"), OptimizerKeys("sgd", 0.01, 0.9), OptimizerKeys()], ids=str
)
def test_the_budget_leaves_room_for_gradients_and_the_optimizers_states(
    comm: MPI.Intracomm,
    shared_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    optimizer: OptimizerKeys,
) -> None:
    """Of a device's free memory: validation is planned before they are there."""
    device, free, close = torch.device("cuda", 0), 1 << 30, Step.close
    left, taken = [], []

    def memory(_: torch.device, later_bytes: int) -> tuple[int, int]:
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "mem_get_info", lambda _: (free, free))
            patch.setattr(torch.cuda, "memory_reserved", lambda _: 0)
            patch.setattr(torch.cuda, "memory_allocated", lambda _: 0)
            left.append(free - 4 * of_device(device, later_bytes)[0])
        return tilenet.mapping.choose.CPU_BYTES, 1024

    def closed(step: Step) -> None:
        held = [flat.nbytes for flat in step.gradients._flats]
        for state in step.update.optimizer.state.values():
            held += [one.nbytes for one in state.values() if one is not None and one.ndim]
        taken.append(sum(held))
        close(step)

    of_device = tilenet.mapping.choose._memory
    monkeypatch.setattr(tilenet.mapping.choose, "_memory", memory)
    monkeypatch.setattr(Step, "close", closed)
    run, held = a_run(comm, shared_path, optimizer=optimizer)
    assert train(run, comm=comm) == 0
    (bytes_taken,) = taken
    assert left == [pytest.approx(bytes_taken, abs=4)] * len(held)


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
    right = tilenet.mapping.scoring_sinks.cross_entropy

    def apart(logits: Any, target: Any, *rest: Any) -> Any:
        """Losses of tiles that are orders apart, so that the order of their sum would show."""
        return right(logits, target, *rest) * 10.0 ** (int(target.sum()) % 13)

    monkeypatch.setattr(tilenet.mapping.scoring_sinks, "cross_entropy", apart)
    run, _ = a_run(comm, shared_path, steps=1, optimizer=OptimizerKeys("sgd", 0.0))
    alone = replace(run, output=str(shared_path / f"alone{comm.rank}"))
    assert train(alone, comm=MPI.COMM_SELF) == 0
    assert train(run, comm=comm) == 0
    assert table(run) == table(alone)


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
    check_bits(run, without)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Tiles that this rank computes."""
    found: list[Any] = []
    original = Mapper.tiles

    def counting(self: Mapper, pipe: Any, tiles: Any, inputs: Any) -> Any:
        found.extend(tiles)
        return original(self, pipe, tiles, inputs)

    monkeypatch.setattr(Mapper, "tiles", counting)
    return found


@pytest.mark.ranks(3)
def test_only_tiles_that_hold_something_are_computed(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch, computed: list[Any]
) -> None:
    small_tiles(monkeypatch)
    monkeypatch.setattr(tilenet.mapping.choose, "SWEEP_TIMES", 0)  # whole images in tiles too
    run, held = a_run(comm, shared_path, steps=1)
    windows = (Window(0, 85, 3, 6), Window(45, 0, 4, 40))
    scene = held[0]
    kept = np.full(scene.valid.shape, IGNORE, np.uint8)
    for one in windows:
        place = np.s_[one.row : one.row + one.height, one.col : one.col + one.width]
        kept[place] = 1
    if comm.rank == 0:
        with rasterio.open(scene.labels, "r+") as file:
            file.write(kept, 1)
    comm.Barrier()
    armed: list[str] = []
    monkeypatch.setattr(Watchdog, "arm", lambda self, doing, times=1.0: armed.append(doing))
    tables = []
    for asked in (None, windows):

        def opened(
            run: RunFile, stack: ExitStack, control: RankControl, asked: Any = asked
        ) -> RunImages:
            found = open_images(run, stack, control)
            first = found.validation[0]
            return replace(found, validation=[replace(first, windows=asked)])

        monkeypatch.setattr(tilenet.library.whole_run, "open_images", opened)
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
        control = RankControl(comm)
        opened = hold_out(open_images(run, stack, control), keys, 3, run.seed, 21, control)
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
def test_ranks_share_images_of_one_tile_and_speak_once(
    comm: MPI.Intracomm, shared_path: Path, computed: list[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    held = held_out(comm, shared_path)
    run, _ = a_run(comm, shared_path, held=held + held[::-1], steps=1)
    assert train(run, comm=comm) == 0
    assert comm.allgather(len(computed)) == [2, 1, 1]
    said = "".join(comm.allgather(capfd.readouterr().err))
    assert said.count("validation after step 1: mean IoU ") == 1


def spoiled(comm: MPI.Intracomm, scene: Scene, what: str) -> dict[str, str]:
    """Validation keys of a scene of which something is wrong."""
    if comm.rank == 0:
        if what == "labels":
            with rasterio.open(scene.labels, "r+") as file:
                file.write(np.where(scene.classes == 1, 3, scene.classes).astype(np.uint8), 1)
        elif what == "unlabelled":
            with rasterio.open(scene.labels, "r+") as file:
                file.write(np.full(scene.classes.shape, IGNORE, np.uint8), 1)
        elif what == "bands":
            with rasterio.open(scene.image) as file:
                profile, pixels = file.profile, file.read()[:2]
            with rasterio.open(scene.image, "w", **(profile | {"count": 2})) as file:
                file.write(pixels)
        elif what == "broken":
            whole = scene.image.read_bytes()
            scene.image.write_bytes(whole[: len(whole) // 2])
        elif what == "missing":
            scene.labels.unlink()
    comm.Barrier()
    return {"images": str(scene.image), "labels": str(scene.labels)}


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("labels", "labels must be 0 to classes − 1"),
        ("unlabelled", "at least one pixel with data must be labelled"),
        ("bands", r"band"),
        ("broken", "must be readable everywhere"),
        ("missing", "labels must be a raster or a vector file"),
    ],
)
def test_what_is_wrong_is_said_before_the_first_step(
    comm: MPI.Intracomm, shared_path: Path, what: str, said: str
) -> None:
    run, held = a_run(comm, shared_path)
    run = replace(run, validation=ValidationKeys(**spoiled(comm, held[1], what)))
    with pytest.raises(AgreedError, match=said):
        train(run, comm=comm)
    assert not (Path(run.output) / "history.csv").exists()


@pytest.mark.parametrize(
    ("kind", "gives", "said"),
    [
        (Labels, 3, "labels must be 0 to classes − 1"),
        (Labels, None, "is broken"),
        (Raster, None, "is broken"),
        (Labels, IGNORE, "at least one pixel with data must be labelled in what validation holds"),
    ],
    ids=["no class", "labels", "image", "unlabelled"],
)
@pytest.mark.parametrize("mode", ["overlap", "exchange"])
def test_what_breaks_later_ends_all_ranks_alike(
    comm: MPI.Intracomm,
    shared_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: Any,
    gives: int | None,
    said: str,
    mode: Any,
) -> None:
    network = replace(NETWORK, norm="instance" if mode == "exchange" else None)
    run, _ = a_run(comm, shared_path, network, held_out(comm, shared_path)[1:], halo_mode=mode)
    take, read, begun = Step.take, kind.read, []

    def begins(self: Step, *rest: Any) -> Any:
        begun.append(1)
        return take(self, *rest)

    def breaks(self: Any, window: Window, region: Window | None = None) -> Any:
        # One rank finds it, of a file that is wrong all over each.
        found = read(self, window, region)
        if begun and "held1" in self.path and (gives == IGNORE or comm.rank == 0):
            if gives is None:
                raise TilenetError(f"{self.path} is broken")
            found[:] = gives
        return found

    monkeypatch.setattr(Step, "take", begins)
    monkeypatch.setattr(kind, "read", breaks)
    with pytest.raises(AgreedError, match=said):
        train(run, comm=comm)
    assert not table(run)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("score", ["accuracy", "loss"])
def test_the_best_checkpoint_is_kept_and_of_equals_the_earlier_one(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch, score: Any
) -> None:
    run, held = a_run(comm, shared_path, steps=5)
    run = replace(run, validation=replace(run.validation, score=score))
    scripted(monkeypatch, [0.25, 0.75, 0.75, 0.5, 0.5])
    assert train(run, comm=comm) == 0
    names = [f"step-0000000{step}" for step in range(10)]
    assert kept(run) == (names[2], names[5], [names[2], *names[4:6]])
    scripted(monkeypatch, [0.7, 0.7, 0.75])
    assert train(replace(run, steps=8), resume=True, comm=comm) == 0
    assert kept(run) == (names[2], names[8], [names[2], *names[7:9]])
    scripted(monkeypatch, [0.9])
    rarely = replace(run, steps=9, checkpoint_every=100)
    assert train(rarely, resume=True, comm=comm) == 0
    assert kept(run) == (names[9], names[9], names[8:])
    asked = Prediction(f"{run.output}/best", str(held[0].image), str(shared_path / "map.tif"))
    assert predict(asked, comm)["size"] == list(SHAPES[0])


def stops_in_validation(comm: MPI.Intracomm, run: RunFile, patch: pytest.MonkeyPatch) -> None:
    original = Validation.score

    def asked(self: Validation, network: Any) -> Any:
        if comm.rank == comm.size - 1 and len(seen) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        seen.append(1)
        return original(self, network)

    seen: list[int] = []
    patch.setattr(Validation, "score", asked)
    assert train(run, comm=comm) == 75
    assert [row["step"] for row in table(run)] == ["2", "4"]  # it is made to its end
    assert len(table(run, "history.csv")) == 4


def stops_before_validation(comm: MPI.Intracomm, run: RunFile, patch: pytest.MonkeyPatch) -> None:
    stop_in(patch, comm, 4)
    assert train(run, comm=comm) == 75
    assert [row["step"] for row in table(run)] == ["2"]  # who is asked to stop has little time


def dies_after_validation(comm: MPI.Intracomm, run: RunFile, patch: pytest.MonkeyPatch) -> None:
    original = RunValidation.make

    def dies(self: RunValidation, step: int, *rest: Any) -> Any:
        found = original(self, step, *rest)
        if step == 4:
            raise AgreedError("killed")
        return found

    patch.setattr(RunValidation, "make", dies)
    with pytest.raises(AgreedError, match="killed"):
        train(run, comm=comm)
    assert [row["step"] for row in table(run)] == ["2", "4"]


@pytest.mark.parametrize(
    "stop", [stops_in_validation, stops_before_validation, dies_after_validation]
)
def test_a_run_that_was_stopped_leaves_what_an_undisturbed_one_does(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch, stop: Any
) -> None:
    run, _ = a_run(comm, shared_path, steps=5, checkpoint_every=100)
    schedule = ScheduleKeys("poly", power=2.0)
    run = replace(run, validation=replace(run.validation, every=2), schedule=schedule)
    scripted(monkeypatch, [0.25, 0.75, 0.5])
    wanted = whole(run, comm)
    monkeypatch.undo()
    scripted(monkeypatch, [0.25, 0.75, 0.75, 0.5] if "dies" in stop.__name__ else [0.25, 0.75, 0.5])
    with monkeypatch.context() as patch:
        stop(comm, run, patch)
    comm.Barrier()
    assert train(run, resume=True, comm=comm) == 0
    comm.Barrier()
    assert [row["step"] for row in table(run)] == ["2", "4", "5"]
    assert table(run) == table(wanted)
    assert table(run, "confusion.csv") == table(wanted, "confusion.csv")
    rates = [float(row["learning_rate"]) for row in table(run, "history.csv")]
    assert rates == pytest.approx([run.optimizer.lr * (1 - t / 5) ** 2 for t in range(5)])
    assert kept(run)[:2] == kept(wanted)[:2] == ("step-00000004", "step-00000005")
