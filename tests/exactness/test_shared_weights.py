"""Runs of a module whose layers share weights: in partitions, over ranks, and gone on elsewhere."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from safetensors.torch import load_file
from shared_out import grids
from test_adopted_runs import SIZE, check_same, keys_of, run_whole
from test_same_as_whole_image import LR, outcome_of, read_outcome, run_file, scenes_of
from whole_image import IGNORE, Outcome, Scene
from zoo import network

from tilenet.errors import AgreedError
from tilenet.library.whole_run import train
from tilenet.training.config.keys import MeshKeys, OptimizerKeys
from tilenet.training.config.run_file import RunFile

pytestmark = pytest.mark.ranks(1, 2)

SGD = OptimizerKeys("sgd", LR, momentum=0.9, weight_decay=0.01, clip_norm=2.5)
SIZES, STEPS = [SIZE, (83, 64)], 4


def run_of(folder: Path, scenes: list[Scene], **more: Any) -> RunFile:
    run = run_file(folder, scenes, keys_of("shared"), **more)
    return replace(run, optimizer=SGD, steps=STEPS)


def train_module(scenes: list[Scene]) -> tuple[Outcome, list[float]]:
    """Train the module itself on the whole images; and the norms of its gradients."""
    module = network("shared").double().eval()
    optimizer = torch.optim.SGD(module.parameters(), LR, momentum=0.9, weight_decay=0.01)
    targets = [np.where(scene.valid, scene.classes, IGNORE) for scene in scenes]
    count = sum(int((target != IGNORE).sum()) for target in targets)
    losses, norms = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        for scene, target in zip(scenes, targets, strict=True):
            of, logits = torch.from_numpy(target)[None], run_whole(module, scene, 8)
            loss = loss + F.cross_entropy(logits, of, ignore_index=IGNORE, reduction="sum") / count
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        norms.append(float(torch.cat([g.flatten() for g in gradients]).norm()))
        for gradient in gradients:  # torch's own clipping adds 1e-6 to the norm
            gradient *= min(1.0, 2.5 / norms[-1])
        optimizer.step()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        final = run_whole(module, scenes[0], 8)[0].numpy()
    return Outcome(losses, dict(module.state_dict()), final), norms


@pytest.mark.parametrize("where", ["overlap", "exchange", "sweep", "partitions", "checkpointed"])
def test_steps_are_those_of_the_module(comm: MPI.Intracomm, shared_path: Path, where: str) -> None:
    """Clipping counts each weight once, and so do momentum and the sum over ranks."""
    scenes = scenes_of(shared_path, SIZES, comm)
    options: dict[str, Any] = {"mesh": MeshKeys(1, *grids(comm.size)[0])}
    if where in ("partitions", "checkpointed"):
        options |= {"partitions": 2, "micro_batches": 2}
        options |= {"checkpointing": "always"} if where == "checkpointed" else {}
    else:
        options |= {"halo_mode": where}
    wanted, norms = train_module(scenes)
    assert min(norms) < 2.5 < max(norms)
    run = run_of(shared_path, scenes, **options)
    check_same(comm, outcome_of(run, comm, scenes[0].image, None), wanted, scenes[0])


def test_a_run_goes_on_over_other_ranks_and_partitions(
    comm: MPI.Intracomm, shared_path: Path
) -> None:
    scenes = scenes_of(shared_path, SIZES, comm)
    run = run_of(shared_path, scenes)
    if comm.rank == 0:
        begun = replace(run, steps=2, partitions=2)
        assert train(begun, overwrite=True, comm=MPI.COMM_SELF) == 0
    comm.Barrier()
    assert train(run, resume=True, comm=comm) == 0
    check_same(comm, read_outcome(run, scenes[0].image, comm), train_module(scenes)[0], scenes[0])
    state = load_file(Path(run.output) / "last" / "state.safetensors")
    momenta = [name for name in state if name.endswith("momentum_buffer")]
    assert len(momenta) == len(list(network("shared").parameters()))


def test_a_balance_that_parts_a_shared_weight_is_refused(
    comm: MPI.Intracomm, shared_path: Path
) -> None:
    scenes = scenes_of(shared_path, SIZES, comm)
    run = run_of(shared_path, scenes, balance=[6, 39], partitions=2)
    with pytest.raises(AgreedError, match=r"stay in one partition .*encoder\.0\.weight: layers"):
        train(run, comm=comm)
    parts = replace(run, balance=None, partitions=40)
    with pytest.raises(AgreedError, match=r"stay in one partition .*ask for at most \d+ part"):
        train(parts, comm=comm)
