"""Loops of one's own in which ranks, weights or gradients go apart end in a sentence."""

from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI
from scenes import Net
from test_own_loops import SEEN, Again, plainly, sums

import tilenet


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("mode", ["overlap", "exchange"])
@pytest.mark.parametrize("when", ["step", "keys"])
def test_ranks_that_part_end_in_a_sentence(scene: Path, when: str, mode: Any) -> None:
    """One leaves the loop, or asks for more steps: none hangs."""
    comm = MPI.COMM_WORLD
    last = comm.rank == comm.size - 1
    job = tilenet.Job()
    local = job.split(Net(), halo_mode=mode)
    optimizer = torch.optim.SGD(local.parameters(), 0.05)
    more = {"steps": 5} if last and when == "keys" else {}
    words = "give each the same arguments" if when == "keys" else "let no rank leave a loop"

    def loop_that_the_last_leaves() -> None:
        for step in job.steps(**{**SEEN, **more}):
            if last:
                break
            for tile in step:
                step.add(local(tile.image)[tile.own].sum(), 1)
            step.apply(optimizer)
        job.predict("i.tif")

    with pytest.raises(tilenet.TilenetError, match=words):
        loop_that_the_last_leaves()


OTHERWISE = r"all options ([0-9a-f]{8}), rank 1: .* (?!\1)[0-9a-f]{8}\)"
PARTED = [
    ("weights", r"stem.bias is [0-9a-f]{8}, trained, rank 0: [0-9a-f]{8}, trained\)"),
    ("fixed", r"stem.weight is ([0-9a-f]{8}), rank 0: \1, trained\); load, change and fix"),
    ("mode", "the network is in evaluation, rank 0: in training"),
    ("lr", r"rank 0: an update of 4 weights, SGD, lr 0.1, clip_norm None, .*, rank 1: .* lr 0.2, "),
    ("clip", "clip_norm None, .*, rank 1: an update of 4 weights, SGD, lr 0.1, clip_norm 1.0"),
    ("fixed later", "rank 0: an update of 4 weights, .*, rank 1: an update of 3 weights, "),
    ("another fixed", rf"of 3 weights, .* {OTHERWISE}"),
    ("decay", rf"lr 0.1, clip_norm None, {OTHERWISE}"),
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("what", "words"), PARTED)
def test_ranks_that_train_otherwise_end_in_a_sentence(scene: Path, what: str, words: str) -> None:
    """They would end with different weights, after gradients that fit none of them."""
    other = MPI.COMM_WORLD.rank == 1
    job = tilenet.Job()
    local = job.split(Net())
    weights = list(local.parameters())
    if what == "weights" and other:
        with torch.no_grad():
            weights[1][0] += 1e-6
    if what == "fixed" and other:
        weights[0].requires_grad_(False)
    local.train(not (what == "mode" and other))
    optimizer = torch.optim.SGD(weights, 0.2 if what == "lr" and other else 0.1)
    optimizer.param_groups[0]["weight_decay"] = 0.1 * (what == "decay" and other)

    def one_step() -> None:
        step = next(steps := job.steps(**SEEN, prove=False))
        for tile in step:
            step.add(*sums(local(tile.image)[tile.own], tile.labels))
        weights[0].requires_grad_(not (what.startswith("fixed") and other))
        weights[2 * other].requires_grad_(what != "another fixed")
        step.apply(optimizer, clip_norm=1.0 if what == "clip" and other else None)
        steps.close()

    with pytest.raises(tilenet.TilenetError, match=words):
        one_step()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", ["data", "numpy", "state"])
@pytest.mark.parametrize("saved", [False, True])
def test_weights_that_go_apart_in_a_loop_are_refused(scene: Path, how: str, saved: bool) -> None:
    """At the end of the loop, and before a checkpoint is written."""
    job = tilenet.Job()
    local = job.split(Net())
    weights = list(local.parameters())
    optimizer = torch.optim.SGD(weights, 0.05, momentum=0.9)

    def act(now: str, number: int) -> None:
        if now == "applied" and number == 1 and MPI.COMM_WORLD.rank == 1:
            if how == "data":
                weights[1].data[0] += 1e-6
            elif how == "numpy":
                weights[1].detach().numpy()[0] += 1e-6
            else:
                optimizer.state.pop(weights[1])
        if now == "applied" and number == (2 if how == "state" else 1) and saved:
            job.save("out", optimizer)

    words = r"keep the same weights \(rank 1: stem.bias is ([0-9a-f]{8}), rank 0: (?!\1)"
    with pytest.raises(tilenet.TilenetError, match=words):
        plainly(job, local, optimizer, act)
    assert not (scene / "out").exists()


def test_weights_that_a_run_cannot_train_so_are_refused(scene: Path) -> None:
    """Thawed where layers share one, which fixed ones are copies of; cast to another dtype."""
    net = Again()
    net.again.requires_grad_(False)
    job = tilenet.Job()
    local = job.split(net)
    steps = job.steps(**SEEN)
    next(steps).measure(sums)  # fixed, they may be copies
    steps.close()
    local.requires_grad_(True)
    with pytest.raises(tilenet.TilenetError, match=r"\(again.weight: fixed then, trained now\)"):
        next(job.steps(**SEEN))
    job = tilenet.Job()
    job.split(Net()).double()
    with pytest.raises(tilenet.TilenetError, match=r"stem.weight: torch.float64, split: float32"):
        next(job.steps(**SEEN))


@pytest.mark.parametrize("when", ["tile", "added"])
@pytest.mark.parametrize(
    "change",
    [
        lambda weights: torch.nn.utils.clip_grad_norm_(weights, 1e-3),
        lambda weights: torch.optim.SGD(weights).zero_grad(),
        lambda weights: weights[-1].grad.mul_(2),
    ],
)
def test_gradients_that_a_program_changes_within_a_step_are_refused(
    scene: Path, when: str, change: Any
) -> None:
    """They are no gradients yet: sums over some tiles, of this rank."""
    job = tilenet.Job()
    local = job.split(Net())
    weights, tiles = list(local.parameters()), []

    def act(now: str, _: int) -> None:
        tiles.append(now)
        if now == when and len(tiles) > 2:  # also where the first tile of a step is behind it
            change(weights)

    with pytest.raises(tilenet.TilenetError, match="step 1: they were changed, as by zero_grad"):
        plainly(job, local, torch.optim.SGD(weights, 0.1), act, tiles={"rows": 1, "columns": 3})


@pytest.mark.ranks(1, 2)
def test_gradients_of_something_else_are_refused(scene: Path) -> None:
    """Each rank would add them, also one without a tile."""
    job = tilenet.Job()
    local = job.split(Net())
    weights = list(local.parameters())

    def act(now: str, _: int) -> None:
        if now == "begin":
            sum(weight.square().sum() for weight in weights).backward()  # type: ignore[union-attr]

    with pytest.raises(tilenet.TilenetError, match="zero before the first tile"):
        plainly(job, local, torch.optim.SGD(weights, 0.1), act, tiles={"rows": 1, "columns": 1})


def test_an_optimizer_may_have_no_learning_rate(scene: Path) -> None:
    job = tilenet.Job()
    local = job.split(Net())
    optimizer = torch.optim.SGD(local.parameters(), 0.1)
    optimizer.param_groups[0]["lr"] = None
    optimizer.step = lambda: None  # type: ignore[assignment, misc]
    assert len(plainly(job, local, optimizer, lambda *_: None)) == 3


@pytest.mark.ranks(1, 2)
def test_weights_do_not_become_nan(scene: Path) -> None:
    """A finite loss may have a gradient of 0 · NaN, of what lies around a tile."""
    job = tilenet.Job()
    local = job.split(Net())
    weights = [weight.detach().clone() for weight in local.parameters()]
    optimizer = torch.optim.SGD(local.parameters(), 0.1)
    step = next(steps := job.steps(**SEEN))
    for tile in step:
        logits = local(tile.image)
        spoilt = logits[..., -1, -1, -1] * torch.nan
        loss, weight = sums(logits[tile.own], tile.labels)
        step.add(loss + torch.where(torch.tensor(True), 0.0, spoilt).sum(), weight)
    with pytest.raises(tilenet.TilenetError, match=r"finite, as the loss is \(step 1\); look for"):
        step.apply(optimizer)
    assert all(map(torch.equal, weights, local.parameters()))
    steps.close()
