"""A run that was stopped goes on to the same numbers, on another number of ranks too."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from left_by_runs import check_close, on_first, rows, same_tensors, stop_in, weights, whole
from mpi4py import MPI
from test_same_as_whole_image import NETWORKS, run_file, scenes_of
from whole_image import random_scene

import tilenet.library.whole_run
import tilenet.training.folder.run_folder
from tilenet.errors import AgreedError, TilenetError
from tilenet.geometry.layers import Conv
from tilenet.library.whole_run import train
from tilenet.model.network import build_network
from tilenet.training.config.keys import MeshKeys, NetworkKeys, OptimizerKeys, TileKeys
from tilenet.training.config.run_file import RunFile
from tilenet.training.config.validation_keys import ValidationKeys
from tilenet.training.states import fill_optimizer, optimizer_tensors
from tilenet.training.step import Step

pytestmark = pytest.mark.ranks(1, 2)


def a_run(comm: MPI.Intracomm, path: Path, keys: NetworkKeys, optimizer: OptimizerKeys) -> RunFile:
    run = run_file(path, scenes_of(path, [(90, 121)], comm), keys, tiles=TileKeys(2, 3))
    return replace(run, steps=5, optimizer=optimizer, checkpoint_every=2)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "optimizer",
    [OptimizerKeys("adamw", 0.01, weight_decay=0.1), OptimizerKeys("sgd", 0.05, momentum=0.9)],
    ids=["adamw", "sgd with momentum"],
)
def test_one_rank_goes_on_where_many_stopped(
    comm: MPI.Intracomm, shared_path: Path, optimizer: OptimizerKeys
) -> None:
    norm = replace(NETWORKS["same-nearest"], norm="batch", norm_scope="tile")
    run = a_run(comm, shared_path, norm, optimizer)
    wanted = whole(run, comm)
    assert train(replace(run, steps=3), comm=comm) == 0
    on_first(run, comm, resume=True)
    check_close(run, wanted)


@pytest.mark.ranks(2, 4)
def test_every_checkpoint_is_continued_in_another_way(
    comm: MPI.Intracomm, shared_path: Path
) -> None:
    """Ranks, grid, halo mode, partitions and balance change each time; scores stay as well."""
    run = a_run(comm, shared_path, NETWORKS["same-bilinear"], OptimizerKeys("adamw", 0.01))
    held = random_scene(shared_path, (53, 70), 2, write=comm.rank == 0)
    comm.Barrier()
    keys = ValidationKeys(images=str(held.image), labels=str(held.labels), every=1)
    run = replace(run, validation=keys)
    wanted = whole(run, comm)
    exchange = {"tiles": TileKeys(), "halo_mode": "exchange"}
    ways: list[tuple[bool, dict[str, Any]]] = [
        (True, {"tiles": TileKeys(3, 2)}),
        (False, exchange | {"mesh": MeshKeys(1, comm.size, 1)}),
        (True, {"partitions": 3, "micro_batches": 2, "checkpointing": "always"}),
        (False, exchange | {"mesh": MeshKeys(1, 1, comm.size), "balance": [9, 30]}),
        (False, {"tiles": TileKeys(size_px=24), "balance": [30, 5, 4], "micro_batches": 4}),
    ]
    for steps, (one_rank, way) in enumerate(ways, start=1):
        part = replace(run, steps=steps, **way)
        if one_rank:
            on_first(part, comm, resume=True)
        else:
            assert train(part, resume=True, comm=comm) == 0
        comm.Barrier()
    check_close(run, wanted)
    assert rows(run, "confusion.csv") == rows(wanted, "confusion.csv")
    scored = [rows(one, "validation.csv") for one in (run, wanted)]
    assert [row["step"] for row in scored[0]] == [str(step) for step in range(1, 6)]
    for ours, theirs in zip(*scored, strict=True):
        assert abs(float(ours["loss"]) - float(theirs["loss"])) <= 1e-12
        assert ours["mean_iou"] == theirs["mean_iou"]


@pytest.mark.ranks(2, 3)
def test_all_ranks_go_on_from_the_checkpoint_before_a_broken_one(
    comm: MPI.Intracomm, shared_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = a_run(comm, shared_path, NETWORKS["valid"], OptimizerKeys("adamw", 0.01))
    wanted = whole(run, comm)
    assert train(run, comm=comm) == 0
    comm.Barrier()
    last = Path(run.output) / "last"
    if comm.rank == 0:
        content = bytearray((last / "state.safetensors").read_bytes())
        content[-9] ^= 1  # only its checksum tells
        (last / "state.safetensors").write_bytes(content)
    comm.Barrier()
    capfd.readouterr()
    assert train(run, resume=True, comm=comm) == 0
    said = comm.gather(capfd.readouterr().err)
    if said is not None:
        warnings = [line for one in said for line in one.splitlines() if "broken" in line]
        assert len(warnings) == 1
        assert "state.safetensors is not what checksums.json says" in warnings[0]
        assert warnings[0].endswith(f"goes on from {run.output}/checkpoints/step-00000004")
    check_close(run, wanted)
    if comm.rank == 0:
        for one in last.parent.glob("checkpoints/step-*"):
            (one / "network.json").unlink()
    comm.Barrier()
    with pytest.raises(AgreedError, match=r"from a whole checkpoint \(.*network.json is missing"):
        train(run, resume=True, comm=comm)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("fails", [2, 5], ids=["first", "last"])
def test_a_save_that_fails_in_the_background_is_raised_by_all(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch, fails: int
) -> None:
    run = a_run(comm, shared_path, NETWORKS["valid"], OptimizerKeys("adamw", 0.01))
    wanted = whole(run, comm)
    real, take = tilenet.training.folder.run_folder.save_checkpoint, Step.take
    folders: list[Any] = []

    def full(folder: Path, step: int, *rest: Any, **more: Any) -> Path:
        if step == fails:
            raise TilenetError(f"a checkpoint must be writable to its end (step {step})")
        return real(folder, step, *rest, **more)

    def noted(self, *arguments):  # type: ignore[no-untyped-def]
        for one in folders:  # so that it is known when the step asks
            one._saving.finish()
        return take(self, *arguments)

    original = tilenet.training.folder.run_folder.RunFolder.__init__

    def made(self, *arguments, **options):  # type: ignore[no-untyped-def]
        original(self, *arguments, **options)
        folders.append(self)

    with monkeypatch.context() as patch:
        patch.setattr(tilenet.training.folder.run_folder, "in_background", lambda parameter: True)
        patch.setattr(tilenet.training.folder.run_folder, "save_checkpoint", full)
        patch.setattr(tilenet.training.folder.run_folder.RunFolder, "__init__", made)
        patch.setattr(Step, "take", noted)
        with pytest.raises(AgreedError, match=rf"writable to its end \(step {fails}\)"):
            train(run, comm=comm)
    assert len(rows(run)) == min(fails + 1, 5)  # at the next step's agreement, and not later
    assert train(run, resume=True, comm=comm) == 0
    check_close(run, wanted)


@pytest.mark.ranks(2, 4)
def test_many_ranks_go_on_where_one_was_killed_between_checkpoints(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = a_run(comm, shared_path, NETWORKS["valid"], OptimizerKeys("adamw", 0.01))
    wanted = whole(run, comm)
    if comm.rank == 0:
        original = Step.take

        def dies_in_the_fourth(self, step, *rest):  # type: ignore[no-untyped-def]
            if step == 3:
                raise KeyboardInterrupt
            return original(self, step, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(Step, "take", dies_in_the_fourth)
            with pytest.raises(KeyboardInterrupt):
                train(run, comm=MPI.COMM_SELF)
        assert len(rows(run)) == 3  # one more than the checkpoint knows of
    comm.Barrier()
    assert train(run, resume=True, comm=comm) == 0
    check_close(run, wanted)


def test_a_signal_on_one_rank_stops_all_with_a_checkpoint(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = a_run(comm, shared_path, NETWORKS["same-bilinear"], OptimizerKeys("sgd", 0.05))
    run = replace(run, checkpoint_every=100)
    wanted = whole(run, comm)
    with monkeypatch.context() as patch:
        stop_in(patch, comm, 3)
        assert train(run, comm=comm) == 75
    assert len(rows(run)) == 3
    assert train(run, resume=True, comm=comm) == 0
    check_close(run, wanted)


@pytest.mark.parametrize("done", [0, 2])
def test_a_signal_before_the_first_step_is_not_lost(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch, done: int
) -> None:
    """MPICH catches SIGUSR1 by itself, and does nothing."""
    run = a_run(comm, shared_path, NETWORKS["valid"], OptimizerKeys("sgd", 0.05))
    wanted = whole(run, comm)
    if done:
        assert train(replace(run, steps=done), comm=comm) == 0
    original = tilenet.library.whole_run.open_images

    def asked(*arguments: Any) -> Any:
        if comm.rank == comm.size - 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(tilenet.library.whole_run, "open_images", asked)
        assert train(run, resume=True, comm=comm) == 75
    assert (Path(run.output) / "history.csv").exists() == bool(done)
    assert not done or len(rows(run)) == done
    assert train(run, resume=True, comm=comm) == 0
    check_close(run, wanted)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"network": NETWORKS["same-nearest"]}, "with the network that it began with"),
        ({"optimizer": OptimizerKeys("adamw", 0.01)}, "optimizer of .*: sgd, .*: adamw"),
        ({"precision": "float32"}, "precision of .*: float64, of the run file: float32"),
        ({"seed": 6}, "seed of .*: 5, of the run file: 6"),
        ({"nodata": 7.0}, "nodata of .*: None, of the run file: 7.0"),
        ({"resolution": 4.0}, "resolution of .*: None, of the run file: 4.0"),
    ],
    ids=["network", "optimizer", "precision", "seed", "nodata", "resolution"],
)
def test_a_run_goes_on_as_it_began(
    comm: MPI.Intracomm, shared_path: Path, change: dict[str, Any], said: str
) -> None:
    run = a_run(comm, shared_path, NETWORKS["valid"], OptimizerKeys("sgd", 0.05, momentum=0.9))
    assert train(replace(run, steps=1), comm=comm) == 0
    with pytest.raises(AgreedError, match=said):
        train(replace(run, **change), resume=True, comm=comm)


@pytest.mark.ranks(1)
def test_losses_that_choose_the_best_are_those_of_one_loss(
    comm: MPI.Intracomm, shared_path: Path
) -> None:
    run = a_run(comm, shared_path, NETWORKS["valid"], OptimizerKeys("sgd", 0.05))
    by_loss = replace(run, validation=ValidationKeys(share=0.3, block_px=16, score="loss"))
    classes = len(run.class_names)
    for first in (by_loss, replace(by_loss, class_weights=[2.0] * classes)):
        assert train(replace(first, steps=1), comm=comm, overwrite=True) == 0
        with pytest.raises(AgreedError, match=r"validation\.score by class_weights of"):
            train(replace(first, class_weights=[3.0] * classes), resume=True, comm=comm)
        said = first.class_weights or [1.0] * classes  # as without
        assert train(replace(first, class_weights=said, loss="ce"), resume=True, comm=comm) == 0
    by_iou = replace(by_loss, validation=replace(by_loss.validation, score="mean_iou"))
    assert train(replace(by_iou, steps=1), comm=comm, overwrite=True) == 0
    assert train(replace(by_iou, class_weights=[3.0] * classes), resume=True, comm=comm) == 0


@pytest.mark.ranks(1)
def test_a_module_goes_on_with_its_mean_and_std(comm: MPI.Intracomm, shared_path: Path) -> None:
    keys = NetworkKeys(module="zoo:Residual")
    run = replace(a_run(comm, shared_path, keys, OptimizerKeys("sgd", 0.05)), classes=4)
    assert train(replace(run, steps=1), comm=comm) == 0
    given = replace(keys, mean=[10.0, 20.0, 30.0], std=[4.0, 5.0, 6.0])
    with pytest.raises(AgreedError, match=r"network\.mean of .*: None, .*: \[10\.0, 20\.0, 30"):
        train(replace(run, network=given), resume=True, comm=comm)


@pytest.mark.ranks(1)
def test_a_checkpoint_of_an_earlier_version_names_fewer_terms(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = a_run(comm, shared_path, NETWORKS["valid"], OptimizerKeys("sgd", 0.05))
    run = replace(run, nodata=float("nan"))
    wanted = whole(run, comm)
    names = "optimizer", "ema", "precision", "seed", "batch_size", "crop_px", "held_out", "part"
    with monkeypatch.context() as patch:
        patch.setattr(RunFile, "terms", {name: run.terms[name] for name in names})
        assert train(replace(run, steps=1), comm=comm) == 0
    for steps in (3, 5):  # from an earlier version's, and from one of this version
        assert train(replace(run, steps=steps), resume=True, comm=comm) == 0
    check_close(run, wanted)


def test_a_refused_request_to_overwrite_leaves_the_run(
    comm: MPI.Intracomm, shared_path: Path
) -> None:
    run = a_run(comm, shared_path, NETWORKS["valid"], OptimizerKeys("sgd", 0.05))
    assert train(replace(run, steps=2), comm=comm) == 0
    before = weights(run)
    with pytest.raises(AgreedError, match="files must be whole"):
        train(replace(run, init="/nowhere.safetensors"), overwrite=True, comm=comm)
    comm.Barrier()
    assert len(rows(run)) == 2
    assert same_tensors(weights(run), before)
    # its own weights may begin the run that replaces it
    again = replace(run, steps=0, init=run.output)
    assert train(again, overwrite=True, comm=comm) == 0
    assert same_tensors(weights(run), before)


@pytest.mark.parametrize("last", [2, 3])
def test_weights_that_are_not_finite_end_a_run(
    comm: MPI.Intracomm, shared_path: Path, last: int
) -> None:
    """Before they are saved, and where the loss of the next step shows them."""
    run = a_run(comm, shared_path, NETWORKS["valid"], OptimizerKeys("sgd", 0.05))
    assert train(replace(run, steps=1), comm=comm) == 0
    optimizer = OptimizerKeys("sgd", 1.7e308, weight_decay=1e3)
    explodes = replace(run, steps=last, checkpoint_every=last, optimizer=optimizer)
    with pytest.raises(AgreedError, match=r"weights must stay finite \(step 2: "):
        train(explodes, resume=True, comm=comm)
    assert all(tensor.isfinite().all() for tensor in weights(run).values())


@pytest.mark.parametrize(("fused", "steps_on"), [(True, "meta"), (False, "cpu")])
def test_an_optimizers_states_go_where_it_looks_for_them(fused: bool, steps_on: str) -> None:
    """Fused it counts its steps on the device, else on the host."""
    network = build_network((Conv(1, 1),)).to("meta")
    optimizer = torch.optim.AdamW(network.parameters())
    optimizer.defaults["fused"] = fused
    names = [name for name, _ in network.named_parameters()]
    state = {f"{name}.step": torch.tensor(1.0) for name in names}
    for name, parameter in network.named_parameters():
        state |= {f"{name}.{key}": torch.ones(parameter.shape) for key in ("exp_avg", "exp_avg_sq")}
    fill_optimizer(network, optimizer, state, "a file")
    found = {key: value.device.type for key, value in optimizer_tensors(network, optimizer).items()}
    assert found == {key: steps_on if key.endswith(".step") else "meta" for key in state}
