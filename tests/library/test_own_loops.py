"""A loop of one's own makes the run of `tilenet.train`, bit for bit, and refuses what would not."""

import copy
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from scenes import Net
from shared_out import short_halo
from torch import nn

import tilenet
from tilenet.parallel.exchange import conv, halo
from tilenet.parallel.pipeline.pipe import Pipe
from tilenet.training.setup import tile_rule

SEEN: dict[str, Any] = {"images": "i.tif", "labels": "l.tif", "steps": 3, "seed": 4}


PIPELINE = {"partitions": 2, "checkpointing": "always"}


def net_of(rank: int) -> Net:
    """Each rank's own: that of rank 0 counts."""
    torch.manual_seed(7 + rank)
    return Net().double()


class Again(Net):
    """With a convolution that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Conv2d(6, 6, 3, padding=1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.again(torch.relu(self.again(torch.relu(self.stem(image)))))
        found: torch.Tensor = F.interpolate(self.head(x), image.shape[-2:], mode="nearest")
        return found


def sums(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    each = F.cross_entropy(logits, labels, ignore_index=255, reduction="none")
    return each.sum(), (labels != 255).sum()


def loop(local: nn.Module, optimizer: Any, steps: Iterator[Any]) -> list[float]:
    losses = []
    for step in steps:
        for tile in step:
            step.add(*sums(local(tile.image)[tile.own], tile.labels))
        losses.append(step.apply(optimizer))
    return losses


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("mode", ["overlap", "exchange"])
@pytest.mark.parametrize(
    "more", [{}, PIPELINE, {"crop_px": 64, "batch_size": 3, "augment": {"flips": True}}]
)
def test_a_loop_is_a_run(scene: Path, mode: Any, more: dict[str, Any]) -> None:
    comm = MPI.COMM_WORLD
    run = tilenet.train(
        net_of(comm.rank), output="run", classes=3, halo_mode=mode, precision="float64",
        optimizer={"lr": 0.01}, **SEEN, **more,
    )  # fmt: skip
    job = tilenet.Job()
    local = job.split(net_of(comm.rank), halo_mode=mode)
    optimizer = torch.optim.AdamW(local.parameters(), 0.01, weight_decay=0, fused=True)
    losses = loop(local, optimizer, job.steps(**SEEN, **more))
    assert losses == list(run.history["loss"])
    wanted = run.weights()
    found = local.module_state()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    assert (job.predict("i.tif") == tilenet.predict(run, "i.tif")).all()


def test_a_map_holds_a_weight_that_layers_share_for_each(
    scene: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may lie on other devices there."""
    monkeypatch.setattr(
        import_module("tilenet.library.predict"), "_predicted", lambda source, *_: source("i.tif")
    )
    given, local = tilenet.predict(Again(), "i.tif"), tilenet.Job().split(Again())
    networks = given.network, local.copy_for_maps(), local
    assert [len(list(network.parameters())) for network in networks] == [8, 8, 6]


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("net", [Net, Again])
def test_a_loop_goes_on_from_what_it_saved(scene: Path, net: type[Net]) -> None:
    comm = MPI.COMM_WORLD

    def begun() -> tuple[tilenet.Job, Any, Any]:
        job = tilenet.Job()
        torch.manual_seed(7 + comm.rank)
        local = job.split(net().double())
        return job, local, torch.optim.SGD(local.parameters(), 0.05, momentum=0.9)

    job, local, optimizer = begun()
    whole = loop(local, optimizer, job.steps(**{**SEEN, "steps": 4}))
    job, local, optimizer = begun()
    first = loop(local, optimizer, job.steps(**{**SEEN, "steps": 2}))
    job.save("kept", optimizer)
    maps = job.predict("i.tif", output="logits")
    job, local, optimizer = begun()
    assert job.load("kept", optimizer) == 2
    assert np.array_equal(maps, job.predict("i.tif", output="logits"), equal_nan=True)
    # Of another part of the scene, other statistics would be found: those of the weights stay.
    next(iter(job.steps(**{**SEEN, "steps": 4, "window": [0, 0, 64, 96]})))
    assert np.array_equal(maps, job.predict("i.tif", output="logits"), equal_nan=True)
    assert first + loop(local, optimizer, job.steps(**{**SEEN, "steps": 4})) == whole
    assert np.array_equal(maps, tilenet.predict("kept", "i.tif", output="logits"), equal_nan=True)


def bent(pipe: Pipe, *arguments: Any) -> list[torch.Tensor]:
    """What the pipe gives, of gradients that are off by some 1e-6."""
    outputs = PIPED(pipe, *arguments)
    for output in outputs:
        output.register_hook(lambda gradient: gradient * (1 + 1e-6))
    return outputs


PIPED = Pipe.__call__
EXCHANGED = [
    (place, "add_gradients", lambda _, pending, halo: pending.wait()) for place in (halo, conv)
]
BROKEN: dict[str, tuple[str, Any, list[tuple[Any, str, Any]]]] = {
    "a short halo": ("logits", "overlap", [(tile_rule, "halo_rule", short_halo)]),
    "gradients of a tile": ("gradients", "overlap", [(Pipe, "__call__", bent)]),
    "gradients of a halo": ("gradients", "exchange", EXCHANGED),
}


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("what", BROKEN)
def test_what_is_broken_is_refused_at_the_start(
    scene: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Of a module, and of what `tilenet.adopt` made of one; steps that prove nothing go on."""
    number, mode, broken = BROKEN[what]
    if mode == "exchange" and MPI.COMM_WORLD.size == 1:
        pytest.skip("one rank exchanges nothing")
    for place, attribute, instead in broken:
        monkeypatch.setattr(place, attribute, instead)
    tiles = {} if mode == "exchange" else {"tiles": {"rows": 4, "columns": 2}}
    for net in (Net(), tilenet.adopt(Net(), 2)):
        job = tilenet.Job()
        job.split(net, halo_mode=mode)
        with pytest.raises(tilenet.TilenetError, match=f"{number} of a small .* prove: false"):
            next(job.steps(**SEEN, **tiles))
        assert next(job.steps(**SEEN, **tiles, prove=False)).number == 0


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("mode", ["overlap", "exchange"])
def test_a_loop_says_how_far_it_is(
    scene: Path, capfd: pytest.CaptureFixture[str], mode: Any
) -> None:
    comm = MPI.COMM_WORLD
    job = tilenet.Job()
    job.split(Net(), halo_mode=mode)
    next(job.steps(**SEEN))
    lines = [line for line in capfd.readouterr().err.splitlines() if "proved" in line]
    assert len(lines) == (comm.rank == 0)
    for line in lines:
        assert line.startswith(f"proved on 1 × {comm.size} ranks, {mode}: logits ")
        assert all(float(part.split()[-1]) < 1e-12 for part in line.split(": ")[1].split(", "))
    next(job.steps(**SEEN, prove=False))
    assert "proved" not in capfd.readouterr().err


@pytest.mark.ranks(1, 2)
def test_gradients_that_were_thrown_away_are_summed_all_the_same(scene: Path) -> None:
    """As `optimizer.zero_grad()` does it, which own loops are used to."""
    job = tilenet.Job()
    local = job.split(net_of(0))
    optimizer = torch.optim.SGD(local.parameters(), 0.05)
    losses = []
    for step in job.steps(**SEEN):
        for tile in step:
            step.add(*sums(local(tile.image)[tile.own], tile.labels))
        losses.append(step.apply(optimizer))
        optimizer.zero_grad()
    job = tilenet.Job()
    local = job.split(net_of(0))
    assert losses == loop(local, torch.optim.SGD(local.parameters(), 0.05), job.steps(**SEEN))


def first_tile(**keys: Any) -> tuple[Any, Any, Any, Any]:
    job = tilenet.Job()
    local = job.split(Net())
    step = next(steps := job.steps(**{**SEEN, "tiles": {"rows": 1, "columns": 2}, **keys}))
    tiles = iter(step)
    return steps, step, tiles, local(next(tiles).image)


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (lambda y: y.mean(), "found: a mean, MeanBackward0"),
        (lambda y: F.cross_entropy(y, y.argmax(1)), "found: a mean, NllLoss2DBackward0"),
        (lambda y: F.mse_loss(y, y.detach() + 1) * 3, "found: a mean, MseLossBackward0"),
        (lambda y: y.sum(1), r"one number, the sum over its pixels \(shape: \(1, "),
        (lambda y: y.detach().sum(), "it requires no gradient"),
    ],
)
def test_a_loss_that_is_no_sum_is_refused(scene: Path, loss: Any, sentence: str) -> None:
    _, step, _, found = first_tile()
    with pytest.raises(tilenet.TilenetError, match=sentence):
        step.add(loss(found), 9)
    step.add(F.cross_entropy(found, found.argmax(1), reduction="sum"), 9)


def test_a_step_that_is_not_whole_is_refused(scene: Path) -> None:
    _, step, tiles, found = first_tile()
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)

    def refused(call: Any, sentence: str) -> None:
        with pytest.raises(tilenet.TilenetError, match=sentence):
            call()

    refused(lambda: step.add(found.sum()), "weight: None")
    refused(lambda: step.add(found.sum(), -1), "finite number from 0 on")
    refused(lambda: step.apply(optimizer), "one was not")
    steps, step, tiles, found = first_tile()
    step.add(found.sum(), 1)
    refused(lambda: step.add(found.sum(), 1), "added twice")
    refused(lambda: step.apply(optimizer), "some are left")
    steps, step, tiles, found = first_tile()
    refused(lambda: next(tiles), "one was not")
    steps, step, tiles, found = first_tile()
    refused(lambda: next(steps), "step 1 was not")
    steps, step, tiles, found = first_tile(tiles={"rows": 1, "columns": 1})
    step.add(found.sum(), 1)
    assert list(tiles) == []
    refused(lambda: list(step), "computed once")
    refused(lambda: step.apply(optimizer), "thaw weights before the first step")
    optimizer = torch.optim.SGD(step._means.local.parameters(), 0.1)
    step.apply(optimizer)
    refused(lambda: step.apply(optimizer), "applied twice")


def test_what_a_job_lacks_is_said(scene: Path) -> None:
    job = tilenet.Job()
    with pytest.raises(tilenet.TilenetError, match="steps before split"):
        next(job.steps(**SEEN))
    local = job.split(Net())
    for call, sentence in (
        (lambda: job.predict("i.tif"), "begin with job.steps"),
        (lambda: local(torch.zeros(1, 2, 9, 9)), "called outside of a step"),
        (lambda: next(job.steps(**SEEN, losses="ce")), "unknown: losses"),
        (lambda: next(job.steps(**SEEN, classes=4)), "network: 3, classes: 4"),
        (lambda: next(job.steps(**{**SEEN, "images": "i.tif+i.tif"})), "network: 2, i.tif.*: 4"),
        (lambda: job.split(Net(), halo_mode="windows"), "use overlap, exchange, sweep or auto"),
    ):
        with pytest.raises(tilenet.TilenetError, match=sentence):
            call()


@pytest.mark.ranks(2, 3)
def test_ranks_that_ask_for_different_maps_end_in_a_sentence(scene: Path) -> None:
    rank = MPI.COMM_WORLD.rank
    array = np.random.default_rng(2).normal(size=(2, 90, 70))
    for more in ({"tile_px": 32 + 2 * rank}, {"std": [1.0, 2.0 + rank]}):
        with pytest.raises(tilenet.TilenetError, match="give each the same arguments"):
            tilenet.predict(Net(), array, **more)


def test_a_loop_does_not_go_on_from_spoilt_weights(scene: Path) -> None:
    job = tilenet.Job()
    local = job.split(Net().double())
    optimizer = torch.optim.SGD(local.parameters(), 0.05)
    loop(local, optimizer, job.steps(**{**SEEN, "steps": 1}))
    job.save("kept", optimizer)
    path = Path("kept/last/weights.safetensors")
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(content)
    with pytest.raises(tilenet.TilenetError, match="a loop goes on from a whole checkpoint"):
        job.load("kept", optimizer)
    with pytest.raises(tilenet.TilenetError, match="files must be whole"):
        tilenet.Run("kept").weights()


def plainly(job: Any, local: Any, optimizer: Any, act: Any, **keys: Any) -> list[float]:
    losses = []
    for step in job.steps(**{**SEEN, **keys}):
        act("begin", step.number)
        for tile in step:
            act("tile", step.number)
            step.add(*sums(local(tile.image)[tile.own], tile.labels))
            act("added", step.number)
        losses.append(step.apply(optimizer))
        act("applied", step.number)
    return losses


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("when", ["begin", "applied"])
def test_gradients_may_be_set_to_zero_where_torchs_loops_do(scene: Path, when: str) -> None:
    losses = []
    for own in (True, False):
        job = tilenet.Job()
        torch.manual_seed(3)
        local = job.split(Net())
        optimizer = torch.optim.SGD(local.parameters(), 0.05, momentum=0.9)

        def act(now: str, _: int, optimizer: Any = optimizer, own: bool = own) -> None:
            if own and now == when:
                optimizer.zero_grad()

        losses.append(plainly(job, local, optimizer, act))
    assert losses[0] == losses[1]
    assert losses[0][0] != losses[0][-1]


def test_weights_that_are_fixed_in_the_loop_stay_and_others_are_refused(scene: Path) -> None:
    job = tilenet.Job()
    local = job.split(Net())
    optimizer = torch.optim.AdamW(local.parameters(), 0.05)
    first = next(iter(local.parameters()))
    seen = []

    def act(now: str, number: int) -> None:
        if now == "applied":
            first.requires_grad_(number != 0)
            seen.append(first.detach().clone())
            assert job.step == number + 1

    plainly(job, local, optimizer, act)
    assert torch.equal(seen[0], seen[1])  # neither momentum nor decay moves it
    assert not torch.equal(seen[1], seen[2])
    other = torch.nn.Parameter(torch.ones(1))
    for wrong in (
        torch.optim.SGD([*local.parameters(), other], 0.1),
        torch.optim.SGD(Net().parameters(), 0.1),
        torch.optim.lr_scheduler.StepLR(optimizer, 1),
        torch.optim.LBFGS(local.parameters()),
    ):
        job = tilenet.Job()
        with pytest.raises(tilenet.TilenetError, match="optimizer"):
            plainly(job, job.split(Net()), wrong, lambda *_: None)
    net = Net()
    next(net.parameters()).requires_grad_(False)
    job = tilenet.Job()
    local = job.split(net)
    optimizer = torch.optim.SGD(local.parameters(), 0.1)

    def thaw(now: str, number: int) -> None:
        for weight in local.parameters():
            weight.requires_grad_(True)

    with pytest.raises(tilenet.TilenetError, match="thaw weights before the first step"):
        plainly(job, local, optimizer, thaw)


@pytest.mark.parametrize("norm", [-1.0, 0.0, float("nan"), float("inf")])
def test_a_length_is_above_0(scene: Path, norm: float) -> None:
    job = tilenet.Job()
    local = job.split(Net())
    step = next(steps := job.steps(**SEEN))
    for tile in step:
        step.add(*sums(local(tile.image)[tile.own], tile.labels))
    with pytest.raises(tilenet.TilenetError, match="clip_norm is a length above 0"):
        step.apply(torch.optim.SGD(local.parameters(), 0.1), clip_norm=norm)
    steps.close()


def test_a_loop_in_evaluation_drops_nothing(scene: Path) -> None:
    losses = {}
    for mode in (True, False):
        job = tilenet.Job()
        torch.manual_seed(3)
        local = job.split(nn.Sequential(Net(), nn.Dropout2d(0.5)))
        local.train(mode)
        optimizer = torch.optim.SGD(local.parameters(), 0.0)
        losses[mode] = plainly(job, local, optimizer, lambda *_: None)
    assert losses[True] != losses[False]
    job = tilenet.Job()
    torch.manual_seed(3)
    local = job.split(Net())
    wanted = plainly(job, local, torch.optim.SGD(local.parameters(), 0.0), lambda *_: None)
    assert np.allclose(losses[False], wanted, rtol=1e-6, atol=0)


OPTIMIZERS: dict[str, Any] = {
    "amsgrad": lambda weights: torch.optim.AdamW(weights, 0.01, amsgrad=True),
    "NAdam": lambda weights: torch.optim.NAdam(weights, 0.01),
    "RMSprop": lambda weights: torch.optim.RMSprop(weights, 0.01),
    "RMSprop, of a group": lambda weights: torch.optim.RMSprop(
        [{"params": list(weights), "momentum": 0.9}], 0.01
    ),
    "Adagrad": lambda weights: torch.optim.Adagrad(weights, 0.01),
    "SGD": lambda weights: torch.optim.SGD(weights, 0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_loop_goes_on_with_the_states_of_its_own_optimizer(scene: Path, name: str) -> None:
    def begun() -> tuple[Any, Any, Any]:
        job = tilenet.Job()
        torch.manual_seed(3)
        local = job.split(Net().double())
        return job, local, OPTIMIZERS[name](local.parameters())

    job, local, optimizer = begun()
    wanted = loop(local, optimizer, job.steps(**{**SEEN, "steps": 4}))
    job, local, optimizer = begun()
    first = loop(local, optimizer, job.steps(**{**SEEN, "steps": 2}))
    job.save("kept", optimizer)
    job, local, optimizer = begun()
    assert job.load("kept", optimizer) == 2
    assert first + loop(local, optimizer, job.steps(**{**SEEN, "steps": 4})) == wanted
    other = torch.optim.Adam(local.parameters(), 0.01)
    with pytest.raises(tilenet.TilenetError, match="with the states of one of its kind"):
        job.load("kept", other)
    job.save("bare")
    with pytest.raises(tilenet.TilenetError, match="saved without an optimizer"):
        job.load("bare", optimizer)
    assert job.load("bare") == 4


def test_a_job_makes_one_step_at_a_time(scene: Path) -> None:
    job = tilenet.Job()
    job.split(Net())
    first = job.steps(**SEEN)
    next(first)
    with pytest.raises(tilenet.TilenetError, match="one loop at a time"):
        next(job.steps(**SEEN))
    first.close()
    next(second := job.steps(**SEEN))
    second.close()


def test_averages_of_the_weights_may_be_copies_made_in_the_loop(scene: Path) -> None:
    job = tilenet.Job()
    torch.manual_seed(3)
    local = job.split(Net())
    optimizer = torch.optim.SGD(local.parameters(), 0.05)
    copies = []

    def act(now: str, _: int) -> None:
        if now == "applied":
            copies.append(copy.deepcopy(local))

    plainly(job, local, optimizer, act)
    assert len(copies) == 3
    wanted = [weight.detach() for weight in local.parameters()]
    found = [weight.detach() for weight in copies[-1].parameters()]
    assert all(map(torch.equal, found, wanted))
    assert not all(map(torch.equal, (w.detach() for w in copies[0].parameters()), wanted))
