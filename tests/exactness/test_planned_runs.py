"""From `tilenet plan` to `train --plan` and `predict --plan`: the result of the whole image."""

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
import yaml
from left_by_runs import losses, rows, weights
from mpi4py import MPI
from test_same_as_whole_image import (
    LR,
    NETWORKS,
    SEED,
    STEPS,
    Outcome,
    check_same,
    differences,
    options_of,
    scenes_of,
    wanted_of,
)
from whole_image import Scene

from tilenet.__main__ import main
from tilenet.cli import plan as plan_command
from tilenet.geometry.unet import unet_layers
from tilenet.planning.memory.device import device_bytes
from tilenet.planning.memory.layer import layer_bytes
from tilenet.planning.memory.partition import partition_bytes

pytestmark = pytest.mark.ranks(2)

SIZE = 157, 211
Capture = pytest.CaptureFixture[str]


def planned(comm: MPI.Intracomm, folder: Path, name: str, ranks: int, *more: str) -> Path:
    """Plan on rank 0 for a node of `ranks` ranks with as many devices as they drive."""
    keys = {key: value for key, value in vars(NETWORKS[name]).items() if value is not None}
    network = [text for key, value in keys.items() for text in (f"--{key}", str(value))]
    path = folder / f"plan{len(list(folder.iterdir()))}.json"
    path = comm.bcast(path)
    if comm.rank == 0:
        with redirect_stdout(StringIO()):
            code = plan_command.main(
                [
                    *(*network, "--bands", "3", "--classes", "3", "--image", "157x211"),
                    *("--machine", "local", "--device-gib", "1", "--precision", "float64"),
                    *("--devices-per-node", str(ranks), "-o", str(path), "--json", *more),
                ]
            )
        assert code == 0
    comm.Barrier()
    return path


def run_file(folder: Path, scene: Scene, name: str, **more: Any) -> list[str]:
    """A run file that leaves everything planned to the plan."""
    keys = {key: value for key, value in vars(NETWORKS[name]).items() if value is not None}
    run = {
        "images": str(scene.image),
        "labels": str(scene.labels),
        "classes": 3,
        "output": str(folder / "run"),
        "network": keys,
        "device": "cpu",
        "seed": SEED,
        "steps": STEPS,
        "optimizer": {"name": "sgd", "lr": LR},
        **more,
    }
    path = folder / f"run{MPI.COMM_WORLD.rank}.yaml"
    path.write_text(yaml.safe_dump(run))
    return ["train", "-c", str(path)]


def trained_and_mapped(
    comm: MPI.Intracomm, folder: Path, scene: Scene, training: list[str], plan: Path
) -> Outcome:
    """Of whole commands."""
    assert main([*training, "--plan", str(plan)]) == 0
    logits = folder / "logits.tif"
    paths = [str(folder / "run"), str(scene.image), str(logits)]
    given = ["--output", "logits", "--plan", str(plan), "--device", "cpu"]
    assert main(["predict", *paths, *given]) == 0
    comm.Barrier()
    with rasterio.open(logits) as file:
        return Outcome(losses(folder / "run"), weights(folder / "run"), file.read())


PLANS = {
    "3x4 tiles": ["--grid", "3x4"],
    "2 partitions": ["--partitions", "2", "--grid", "4x3", "--micro-batches", "2"],
    "6 at once": [
        *("--partitions", "3", "--micro-batches", "6", "--tile", "32", "--checkpointing", "always")
    ],
    "1f1b": ["--partitions", "2", "--grid", "4x3", "--pipeline", "1f1b"],
    "exchange": ["--partitions", "2", "--halo-mode", "exchange"],
    "exchange in 1f1b": ["--partitions", "3", "--halo-mode", "exchange", "--pipeline", "1f1b"],
    "sweep": ["--partitions", "1", "--halo-mode", "sweep"],
    "sweep over 2 partitions": ["--partitions", "2", "--halo-mode", "sweep"],
}


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(
    ("name", "plan"), [*(("same-nearest", plan) for plan in PLANS), ("valid", "2 partitions")]
)
def test_planned_runs_are_those_of_the_whole_image(
    comm: MPI.Intracomm, shared_path: Path, name: str, plan: str
) -> None:
    (scene,) = scenes_of(shared_path, [SIZE], comm)
    options = PLANS[plan]
    partitions = int(options[1]) if options[:1] == ["--partitions"] else 1
    more = options if partitions > 1 else [*options, "--partitions", "1"]
    path = planned(comm, shared_path, name, comm.size * partitions, *more)
    keys = json.loads(path.read_text())["run"]
    assert np.prod(list(keys["mesh"].values())) == comm.size
    assert keys["partitions"] == partitions
    assert keys["pipeline"] == ("1f1b" if "1f1b" in options else "gpipe")
    assert keys["halo_mode"] == (plan.split()[0] if "--halo-mode" in options else "overlap")
    training = run_file(shared_path, scene, name)
    found = trained_and_mapped(comm, shared_path, scene, training, path)
    wanted = wanted_of([scene], NETWORKS[name])
    check_same(comm, found, wanted, scene.valid)


@pytest.mark.parametrize("plan", ["3x4 tiles", "6 at once"])
def test_planned_runs_that_swap_are_those_of_the_whole_image(
    comm: MPI.Intracomm,
    shared_path: Path,
    plan: str,
    capfd: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Devices are too small for the plan without; the run finds the same bytes as the planner."""
    monkeypatch.setattr("tilenet.planning.estimate.MIN_BYTES", 0)  # tensors here are small
    (scene,) = scenes_of(shared_path, [SIZE], comm)
    partitions = 3 if plan == "6 at once" else 1
    ranks = comm.size * partitions
    fixed = [*PLANS[plan], "--partitions", str(partitions), "--optimizer", "sgd"]
    roomy = planned(comm, shared_path, "same-nearest", ranks, *fixed)
    limit = 0.85 * json.loads(roomy.read_text())["answer"]["device_bytes"]
    device = ["--device-gib", f"{limit / 2**30 / 0.9:.9f}"]
    path = planned(comm, shared_path, "same-nearest", ranks, *fixed, *device, "--swap", "auto")
    found = json.loads(path.read_text())
    assert found["run"]["swap"] == "auto"
    assert found["run"]["checkpointing"] == ("never" if partitions == 1 else "always")
    answer, kept = found["answer"], found["run"]["checkpointing"]
    layers = unet_layers(options_of(NETWORKS["same-nearest"]))
    costs = layer_bytes(layers, *answer["tile_read_px"], "float64")
    many = answer["layout"]["micro_batches"]
    parts = partition_bytes(costs, answer["balance"], many, kept, "sgd")
    assert max(part.total for part in parts) == answer["swaps"]["without_bytes"]
    without = device_bytes(parts, [0] * partitions, kept)[0]  # those of a rank share its CPU
    limit = 0.85 * without
    swapping = {"min_mib": 0, "device_gib": limit / 2**30}
    capfd.readouterr()
    keys = run_file(shared_path, scene, "same-nearest", swapping=swapping)
    outcome = trained_and_mapped(comm, shared_path, scene, keys, path)
    said = comm.bcast(capfd.readouterr().err)
    assert f", without {without / 2**20:.2f} MiB, there is {limit / 2**20:.2f} MiB" in said
    assert all(int(row["swap_out_bytes"]) > 0 for row in rows(shared_path / "run"))
    wanted = wanted_of([scene], NETWORKS["same-nearest"])
    check_same(comm, outcome, wanted, scene.valid)


def test_the_comparison_can_fail(comm: MPI.Intracomm, shared_path: Path) -> None:
    """A planned halo that is too narrow is seen."""
    (scene,) = scenes_of(shared_path, [SIZE], comm)
    path = planned(
        comm, shared_path, "same-nearest", comm.size, "--grid", "3x4", "--partitions", "1",
        *("--halo", "16"),
    )  # fmt: skip
    training = run_file(shared_path, scene, "same-nearest")
    found = trained_and_mapped(comm, shared_path, scene, training, path)
    wanted = wanted_of([scene], NETWORKS["same-nearest"])
    assert differences(found, wanted, scene.valid)[1] > 1e-10


def refusal(comm: MPI.Intracomm, capfd: Capture, arguments: list[str]) -> str:
    """What is said, once, where a command ends with exit code 1 on all ranks."""
    comm.Barrier()
    capfd.readouterr()
    assert main(arguments) == 1
    said = "".join(comm.allgather(capfd.readouterr().err))
    assert said.count("tilenet: ") == 1
    assert said.count("\n") == 1
    return said


BROKEN = {
    "missing": (None, "the plan must be a readable file"),
    "no JSON": ("{", r"must be a plan (no JSON"),
    "no version": ("{}", "the key tilenet_plan is missing"),
}


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_is_no_plan(
    comm: MPI.Intracomm, shared_path: Path, capfd: Capture, name: str
) -> None:
    (scene,) = scenes_of(shared_path, [SIZE], comm)
    text, wanted = BROKEN[name]
    path = shared_path / "broken.json"
    if text is not None and comm.rank == 0:
        path.write_text(text)
    comm.Barrier()
    training = run_file(shared_path, scene, "same-nearest")
    assert wanted in refusal(comm, capfd, [*training, "--plan", str(path)])
    assert not (shared_path / "run").exists()
    prediction = ["predict", "run", str(scene.image), str(shared_path / "map.tif")]
    assert wanted in refusal(comm, capfd, [*prediction, "--plan", str(path)])


@pytest.mark.ranks(1, 2)
def test_plans_of_something_else(comm: MPI.Intracomm, shared_path: Path, capfd: Capture) -> None:
    (scene,) = scenes_of(shared_path, [SIZE], comm)
    grid = ["--grid", "2x3", "--partitions", "1"]
    path = planned(comm, shared_path, "same-nearest", comm.size, *grid)
    training = run_file(shared_path, scene, "same-bilinear")
    said = refusal(comm, capfd, [*training, "--plan", str(path)])
    assert "of the network that is trained (poolings" in said
    training = run_file(shared_path, scene, "same-nearest")
    smaller = planned(comm, shared_path, "same-nearest", comm.size, *grid, "--image", "157x210")
    said = refusal(comm, capfd, [*training, "--plan", str(smaller)])
    assert "157 × 210 px, an image or crop: 157 × 211 px); plan for the largest image" in said
    others = planned(
        comm, shared_path, "same-nearest", comm.size + 1, "--grid", "4x4", "--partitions", "1"
    )
    said = refusal(comm, capfd, [*training, "--plan", str(others)])
    assert f"ranks: {comm.size}); start {comm.size + 1} ranks" in said
    assert not (shared_path / "run").exists()


@pytest.mark.parametrize("shard", ["always", "never"])
def test_states_that_the_plan_did_not_count_are_said(
    comm: MPI.Intracomm, shared_path: Path, capfd: Capture, shard: str
) -> None:
    (scene,) = scenes_of(shared_path, [SIZE], comm)
    path = planned(
        comm, shared_path, "same-nearest", comm.size, "--grid", "3x4", "--partitions", "1"
    )
    plan = json.loads(path.read_text())
    comm.Barrier()
    if comm.rank == 0:
        # As of a network whose states are more than 64 MiB.
        plan["answer"]["sharers"] = comm.size
        path.write_text(json.dumps(plan))
    comm.Barrier()
    optimizer = {"name": "adamw", "lr": LR, "shard": shard}
    training = run_file(shared_path, scene, "same-nearest", optimizer=optimizer, steps=1)
    capfd.readouterr()
    assert main([*training, "--plan", str(path)]) == 0
    said = "".join(comm.allgather(capfd.readouterr().err))
    weights = sum(
        layer.num_parameters for layer in unet_layers(options_of(NETWORKS["same-nearest"]))
    )
    more = 2 * 8 * weights * (comm.size - 1) / comm.size / 2**20
    sentence = f"each rank keeps {more:.1f} MiB more of the optimizer's states than planned"
    assert said.count(sentence) == (shard == "never")
