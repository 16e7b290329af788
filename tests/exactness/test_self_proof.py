"""Runs of somebody else's networks prove themselves, or end with a sentence on all ranks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI
from pairwise import pairs
from safetensors.torch import load_file
from shared_out import grids, short_halo
from test_adopted_runs import CLASSES, SIZE, keys_of
from test_same_as_whole_image import run_file, scenes_of
from torch import Tensor, nn

from tilenet.adoption.adopt import adopt
from tilenet.errors import AgreedError
from tilenet.library.whole_run import train
from tilenet.mapping import map_source
from tilenet.mapping.predict import predict
from tilenet.mapping.prediction import Prediction
from tilenet.parallel.exchange import conv, halo, norm
from tilenet.planning import small_image
from tilenet.training.config.keys import MeshKeys, NetworkKeys, TileKeys
from tilenet.training.config.run_file import RunFile
from tilenet.training.proof import run as run_proof
from tilenet.training.proof.alone import prove_over_tiles
from tilenet.training.setup import tile_rule

pytestmark = pytest.mark.ranks(2, (1, 4))

WAYS: dict[str, dict[str, Any]] = {
    "overlap": {},
    "exchange": {"halo_mode": "exchange"},
    "pipeline": {"partitions": 3, "checkpointing": "always"},
}


def grid_of(comm: MPI.Intracomm) -> tuple[int, int]:
    possible = grids(comm.size)
    return possible[len(possible) // 2]


def run_of(
    folder: Path, comm: MPI.Intracomm, name: str, batch_norm: str = "frozen", **more: Any
) -> RunFile:
    (scene,) = scenes_of(folder, [SIZE], comm)
    mesh = MeshKeys(1, *grid_of(comm))
    run = run_file(folder, [scene], keys_of(name, batch_norm), mesh=mesh, **more)
    return replace(run, classes=CLASSES[name], steps=1)


def said_of(capfd: pytest.CaptureFixture[str], comm: MPI.Intracomm) -> str:
    """What rank 0 said; the others say nothing. Collective."""
    said = comm.gather(capfd.readouterr().err)
    return comm.bcast("" if said is None else said[0])


def proof_in(said: str) -> str:
    lines = [line for line in said.splitlines() if "proved" in line]
    assert len(lines) == 1, said
    return lines[0]


@pytest.mark.ranks((1, 2, 4))
@pytest.mark.parametrize(("name", "way", "batch_norm"), pairs(CLASSES, WAYS, ["frozen", "step"]))
def test_a_run_says_how_far_it_is(
    comm: MPI.Intracomm,
    shared_path: Path,
    capfd: pytest.CaptureFixture[str],
    name: str,
    way: str,
    batch_norm: str,
) -> None:
    if name == "pyramid" and batch_norm == "step":
        pytest.skip("the run is refused: a norm of one average")
    run = run_of(shared_path, comm, name, batch_norm, **WAYS[way])
    assert train(run, comm=comm) == 0
    line = proof_in(said_of(capfd, comm))
    rows, cols = grid_of(comm)
    assert line.startswith(f"proved on {rows} × {cols} ranks, {run.halo_mode}")
    assert ("3 partitions, checkpointing always" in line) == (way == "pipeline")
    logits, gradients = line.split(": ")[1].split(";")[0].split(", ")
    assert float(logits.removeprefix("logits ")) < 1e-12
    assert float(gradients.removeprefix("gradients ")) < 1e-12


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(("name", "batch_norm"), [("pyramid", "step"), ("looking", "frozen")])
def test_replicas_have_images_of_their_own_where_norms_sum_over_them(
    comm: MPI.Intracomm,
    shared_path: Path,
    capfd: pytest.CaptureFixture[str],
    name: str,
    batch_norm: str,
) -> None:
    scenes = scenes_of(shared_path, [SIZE, SIZE], comm)
    mesh = MeshKeys(2, 1, comm.size // 2)
    run = run_file(shared_path, scenes, keys_of(name, batch_norm), mesh=mesh)
    assert train(replace(run, classes=CLASSES[name], steps=1), comm=comm) == 0
    line = proof_in(said_of(capfd, comm))
    assert line.startswith(f"proved on 2 × 1 × {comm.size // 2} ranks, overlap: logits ")


WAIT = halo.Pending.wait


def lost_row(pending: halo.Pending) -> list[Tensor]:
    parts = WAIT(pending)
    return [part.index_fill(2, torch.tensor([0], device=part.device), 0.0) for part in parts]


EXCHANGE = {"halo_mode": "exchange"}
BROKEN: dict[str, tuple[str, dict[str, Any], list[tuple[Any, str, Any]]]] = {
    "a short halo": (
        "residual",
        {"tiles": TileKeys(rows=4, columns=2)},
        [(tile_rule, "halo_rule", short_halo)],
    ),
    "a row of a halo": ("residual", EXCHANGE, [(halo.Pending, "wait", lost_row)]),
    "gradients of a halo": (
        "residual",
        EXCHANGE,
        [
            (place, "add_gradients", lambda _, pending, halo: pending.wait())
            for place in (halo, conv)
        ],
    ),
    "a sum of a norm": ("looking", {}, [(norm, "add_over", lambda comm, values: values)]),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", BROKEN)
def test_what_is_broken_is_refused_on_all_ranks(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    name, more, broken = BROKEN[what]
    # Statistics of a step: in a run with fixed ones no norm sums.
    run = run_of(shared_path, comm, name, "step", **more)
    for place, attribute, instead in broken:
        monkeypatch.setattr(place, attribute, instead)
    number = "gradients" if what == "gradients of a halo" else "logits"
    with pytest.raises(AgreedError, match=f"{number} of a small random image.* prove: false"):
        train(run, comm=comm)
    assert not (Path(run.output) / "last").exists()


@pytest.mark.ranks(1)
def test_a_short_halo_of_many_tiles_is_refused(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tile_rule, "halo_rule", short_halo)
    run = run_of(shared_path, comm, "residual", tiles=TileKeys(rows=3, columns=1))
    with pytest.raises(AgreedError, match="logits of a small random image differ by"):
        train(run, comm=comm)


class Chaotic(nn.Module):
    """Makes a difference a hundred times as large in each of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = x * x.mean((2, 3), keepdim=True)  # ranks add up in another order
        for layer in self.convs:
            x = torch.sin(300.0 * layer(x))
        return x


@pytest.mark.ranks(2)
def test_a_network_that_makes_rounding_large_is_named(
    comm: MPI.Intracomm, shared_path: Path
) -> None:
    keys = NetworkKeys(module="test_self_proof:Chaotic")
    (scene,) = scenes_of(shared_path, [SIZE], comm)
    mesh = MeshKeys(1, *grid_of(comm))
    run = replace(run_file(shared_path, [scene], keys, mesh=mesh), classes=3, steps=1)
    with pytest.raises(AgreedError, match=r"a network must not make rounding large .* by 1e-15"):
        train(run, comm=comm)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("batch_norm", ["frozen", "step"])
def test_a_proof_leaves_no_trace(
    comm: MPI.Intracomm,
    shared_path: Path,
    capfd: pytest.CaptureFixture[str],
    batch_norm: str,
) -> None:
    """Weights and running statistics are bit for bit those of a run that proves nothing."""
    weights = []
    for proves in (True, False):
        run = run_of(shared_path, comm, "looking", batch_norm, prove=proves)
        torch.manual_seed(1)
        assert train(replace(run, output=str(shared_path / str(proves))), comm=comm) == 0
        assert ("proved" in said_of(capfd, comm)) == proves
        state = torch.rand(3)
        file = load_file(shared_path / str(proves) / "last" / "weights.safetensors")
        weights.append(file | {"random numbers": state})
    assert all(torch.equal(weights[0][name], tensor) for name, tensor in weights[1].items())


@pytest.mark.ranks(2)
def test_other_devices_are_measured_by_their_own_rounding(
    comm: MPI.Intracomm,
    shared_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_proof, "proof_precision", lambda devices, comm: "float32")
    run = run_of(shared_path, comm, "residual", halo_mode="exchange")
    assert train(run, comm=comm) == 0
    assert "(float32, one device: " in proof_in(said_of(capfd, comm))
    monkeypatch.setattr(halo.Pending, "wait", lost_row)
    with pytest.raises(AgreedError, match="of the largest, rounding is at most 1e-04"):
        train(run, overwrite=True, comm=comm)


@pytest.mark.ranks(2)
def test_a_proof_that_takes_long_is_not_made(
    comm: MPI.Intracomm,
    shared_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(small_image, "SPEED", 1.0)
    monkeypatch.setattr(small_image, "SHARE", 0.0)
    assert train(run_of(shared_path, comm, "residual"), comm=comm) == 0
    line = proof_in(said_of(capfd, comm))
    assert line.startswith("not proved: the smallest image for 2 × 1 tiles (")


@pytest.mark.parametrize(
    ("name", "tile_px", "way"),
    [
        ("residual", None, "tiles"),
        ("residual", 40, "tiles"),
        ("looking", None, "exchange"),
        ("looking", 40, "passes"),
    ],
)
def test_a_map_says_how_far_it_is(
    comm: MPI.Intracomm,
    shared_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    tile_px: int | None,
    way: str,
) -> None:
    run = run_of(shared_path, comm, name, prove=False)
    assert train(replace(run, steps=0), comm=comm) == 0
    out = str(shared_path / "map.tif")
    kinds: dict[str, Any] = {"tile_px": tile_px, "overwrite": True}
    asked = Prediction(run.output, run.image_paths[0], out, "logits", **kinds)
    said_of(capfd, comm)
    predict(asked, comm)
    line = proof_in(said_of(capfd, comm))
    assert float(line.split("logits ")[1].split(";")[0]) < 1e-12
    assert way in line or comm.size == 1
    predict(replace(asked, prove=False), comm)
    assert "proved" not in said_of(capfd, comm)
    if tile_px is not None:
        monkeypatch.setattr(map_source, "halo_rule", short_halo)
        with pytest.raises(AgreedError, match=r"logits of a small random image.* --no-prove"):
            predict(asked, comm)


class Ratio(nn.Module):
    """The ratio of two bands, which has no value where both are zero."""

    def __init__(self, filled: bool) -> None:
        super().__init__()
        self.conv, self.filled = nn.Conv2d(1, 3, 3, padding=1), filled

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x[:, :1] / x[:, 1:2])
        return (y.nan_to_num() if self.filled else y) * x[:, :1].mean((2, 3), keepdim=True)


def all_nan(pending: halo.Pending) -> list[Tensor]:
    """All of a halo where some of it is."""
    return [part + 0.0 * part.sum() for part in WAIT(pending)]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("filled", [False, True])
def test_proofs_have_zeros_where_a_network_has_values_there(
    comm: MPI.Intracomm,
    shared_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    filled: bool,
) -> None:
    """What goes wrong next to nodata alone is refused, and no network is left without a proof."""
    keys = NetworkKeys(module="test_self_proof:Ratio", options={"filled": filled})
    (scene,) = scenes_of(shared_path, [SIZE], comm)
    run = run_file(shared_path, [scene], keys, mesh=MeshKeys(1, 2, 1), halo_mode="exchange")
    run = replace(run, classes=3, steps=0)
    assert train(run, comm=comm) == 0
    assert proof_in(said_of(capfd, comm)).startswith("proved on 2 × 1 ranks, exchange: logits ")
    out = str(shared_path / "map.tif")
    asked = Prediction(run.output, run.image_paths[0], out, "logits", overwrite=True)
    if filled:
        predict(asked, comm)
        monkeypatch.setattr(halo.Pending, "wait", all_nan)
    words = "logits of a small random image.* --no-prove" if filled else "must give finite logits"
    with pytest.raises(AgreedError, match=words):  # of the scene, which has zeros
        predict(asked, comm)
    assert "proved on 1 × 2 ranks, exchange: logits " in said_of(capfd, comm)


class Logarithm(nn.Module):
    """Frozen batch norm over a logarithm, which is infinite at zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 2, 3, padding=1, bias=False), nn.BatchNorm2d(2)
        nn.init.normal_(self.norm.running_mean)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.conv(x.abs().log()))
        return y


@pytest.mark.ranks(1)
def test_frozen_norms_stay_frozen_where_zeros_have_no_value(comm: MPI.Intracomm) -> None:
    module = Logarithm()
    module.norm.eval()
    for proof in prove_over_tiles(module, adopt(module, 3, "step"), "step", comm):
        assert proof.differences
        assert all(difference.apart < 1e-12 for difference in proof.differences)
