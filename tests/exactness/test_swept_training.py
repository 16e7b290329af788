"""`halo_mode: sweep`: the numbers of the whole image, in the memory of a strip and its states."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI
from sweeps import whole
from test_adopted_runs import CLASSES, SIZE, check_same, keys_of, run_file, scenes_of, wanted_of
from test_kept_maps import Gates, rows_computed
from test_same_as_whole_image import outcome_of
from test_same_recipe import KEYS, check
from test_same_recipe import scenes_of as recipe_scenes
from zoo import network

from tilenet.adoption.adopt import Adopted, adopt
from tilenet.errors import AgreedError, TilenetError
from tilenet.geometry.halo_rule import HaloRule
from tilenet.geometry.layers import Layer
from tilenet.geometry.sweep import Sweeps, strip_edges
from tilenet.geometry.tiles import Cut, cut
from tilenet.geometry.unet import UNetOptions, unet_layers
from tilenet.geometry.windows import Window
from tilenet.library.whole_run import train
from tilenet.model.network import Network, build_network
from tilenet.model.origin import Origin
from tilenet.parallel.exchange import swept_backward, swept_training
from tilenet.parallel.exchange.swept import Sweep
from tilenet.parallel.exchange.swept_training import SweptPipe
from tilenet.planning.memory.live import LiveBytes
from tilenet.planning.memory.sweeps.trained_sweeps import ALL_CELLS, maps_to_keep
from tilenet.training import swept
from tilenet.training.config.keys import MeshKeys, TileKeys
from tilenet.training.setup.decide import plan_run

COMPARED_SIZE = 96, 32
STRIPS = (1, 7, 32, 61, 500)
HIGH = STRIPS[1:]  # a row at a time takes longer than all others together
SWEPT = "residual", "shifted", "between", "gated", "pyramid", "shared"


@pytest.fixture
def strip_px(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Strips of runs."""
    pixels: int = request.param
    monkeypatch.setattr(
        swept,
        "plan_sweeps",
        lambda layers, height, width, *_: Sweeps(
            strip_edges(height, pixels), maps_to_keep(layers, height, width)
        ),
    )
    return pixels


@cache
def adopted_of(name: str) -> Adopted:
    return adopt(Gates() if name == "gates" else network(name, drops=False), 3)


def origin_of(height: int, width: int) -> Origin:
    """Of an image that is one tile."""
    return Origin((0,), cut(height, width, Cut(grid=(1, 1)), HaloRule(0, 1)), (0,))


def small_pipe(first: int = 0) -> tuple[SweptPipe, torch.Tensor]:
    """Two strips of a small network, and an image; `first` layers in a partition of their own."""
    layers = unet_layers(UNetOptions(1, base=2, bands=2, classes=2))
    balance = (first, len(layers) - first) if first else ()
    cpus, edges = [torch.device("cpu")] * max(len(balance), 1), strip_edges(8, 4)
    net, image = build_network(layers).double().train(), torch.randn(1, 2, 8, 8).double()
    pipe = SweptPipe(net, layers, cpus, "float64", lambda rows, _: Sweeps(edges), balance=balance)
    return pipe, image


def gradients(
    layers: tuple[Layer, ...],
    net: Network,
    image: torch.Tensor,
    weight: torch.Tensor,
    strip: int,
    most_cells: int,
    balance: tuple[int, ...] = (),
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    size = image.shape[2], image.shape[3]
    kept = maps_to_keep(layers, *size, most_cells) if most_cells else {}
    sweeps = Sweeps(strip_edges(size[0], strip), kept)
    cpus = [torch.device("cpu")] * max(len(balance), 1)
    pipe = SweptPipe(net, layers, cpus, "float64", lambda rows, _: sweeps, balance=balance)
    net.zero_grad()
    out = pipe(image, origin_of(*size), whole(size))
    (out * weight).sum().backward()  # type: ignore[no-untyped-call]
    return out.detach(), [one.grad.clone() for one in net.trained]  # type: ignore[union-attr]


def compare(
    layers: tuple[Layer, ...],
    net: Network,
    bands: int,
    most_cells: int = 0,
    balance: tuple[int, ...] = (),
    strips: tuple[int, ...] = STRIPS,
) -> None:
    """Logits and gradients of strips of these heights with those of the whole image."""
    generator = torch.Generator().manual_seed(3)
    image = torch.randn(1, bands, *COMPARED_SIZE, generator=generator, dtype=torch.float64)
    wanted = net(image.clone())
    weight = torch.randn(wanted.shape, generator=generator, dtype=torch.float64)
    net.zero_grad()
    (wanted * weight).sum().backward()
    plain = [one.grad.clone() for one in net.trained]  # type: ignore[union-attr]
    most = max(float(one.abs().max()) for one in plain)
    for strip in strips:
        found, grads = gradients(layers, net, image, weight, strip, most_cells, balance)
        apart = float((found - wanted).detach().abs().max() / wanted.detach().abs().max())
        assert apart <= 1e-12
        for one, other in zip(grads, plain, strict=True):
            assert float((one - other).abs().max()) <= 1e-10 * max(
                float(other.abs().max()), 1e-3 * most
            )


@pytest.mark.parametrize("name", SWEPT)
def test_gradients_of_adopted_networks(name: str) -> None:
    adopted = adopted_of(name)
    strips = STRIPS if name in ("shifted", "between", "gated") else HIGH
    compare(adopted.layers, adopted.network(torch.float64).train(), 3, strips=strips)


@pytest.mark.parametrize(
    ("name", "strips"), [("gates", HIGH), ("gated", STRIPS), ("pyramid", HIGH)]
)
def test_gradients_through_maps_that_are_kept(
    name: str, strips: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward compute each row of each layer twice, in one sweep."""
    adopted = adopted_of(name)
    rows = rows_computed(monkeypatch)
    compare(adopted.layers, adopted.network(torch.float64).train(), 3, ALL_CELLS, strips=strips)
    assert max(rows.values()) == 2 * len(strips)


@pytest.mark.parametrize(
    ("name", "most_cells", "strips"),
    [("gates", 19_393, HIGH), ("gates", 4_848, STRIPS), ("pyramid", 9_077, HIGH)],
)
def test_gradients_where_not_all_maps_are_kept(
    name: str, most_cells: int, strips: tuple[int, ...]
) -> None:
    adopted = adopted_of(name)
    sets = [maps_to_keep(adopted.layers, *COMPARED_SIZE, most) for most in (most_cells, ALL_CELLS)]
    assert any(sets[0].values())
    assert sets[0] != sets[1]
    compare(adopted.layers, adopted.network(torch.float64).train(), 3, most_cells, strips=strips)


UPSAMPLINGS = [("nearest", HIGH), ("bilinear", STRIPS), ("transposed", HIGH)]


@pytest.mark.parametrize(("upsampling", "strips"), UPSAMPLINGS)
def test_gradients_of_our_own(upsampling: Any, strips: tuple[int, ...]) -> None:
    layers = unet_layers(UNetOptions(3, base=4, bands=2, classes=3, upsampling=upsampling))
    compare(layers, build_network(layers, 4, torch.float64).train(), 2, strips=strips)


@pytest.mark.parametrize(("upsampling", "strips"), UPSAMPLINGS)
def test_backward_is_the_adjoint(upsampling: Any, strips: tuple[int, ...]) -> None:
    """⟨Fw, y⟩ = ⟨w, F*y⟩ of the convolutions that all ways pass, the first and the last.

    Without biases and norms logits are homogeneous in each (Euler): a rectifier and a pool's
    maximum choose the same cells for all multiples of the weights.
    """
    layers = unet_layers(UNetOptions(3, base=4, bands=2, classes=3, upsampling=upsampling))
    net = build_network(layers, 6, torch.float64).train()
    generator = torch.Generator().manual_seed(7)
    image = torch.randn(1, 2, *COMPARED_SIZE, generator=generator, dtype=torch.float64)
    weight = torch.randn(1, 3, *COMPARED_SIZE, generator=generator, dtype=torch.float64)
    names = [name for name, _ in net.named_parameters() if name.endswith("weight")]
    for strip in strips:
        out, grads = gradients(layers, net, image, weight, strip, False)
        of = dict(zip(net.state_dict(), grads, strict=True))
        for name in (names[0], names[-1]):
            forward = float((out * weight).sum())
            backward = float((net.state_dict()[name] * of[name]).sum())
            assert backward == pytest.approx(forward, rel=1e-11), (strip, name)


@pytest.mark.parametrize("strip", STRIPS)
def test_logits_have_the_dtype_of_layers(strip: int) -> None:
    """Low strips complete no rows at first."""
    layers = unet_layers(UNetOptions(3, base=4, bands=2, classes=3))
    net, image = build_network(layers, 4).train(), torch.ones(1, 2, *COMPARED_SIZE)
    pipe = SweptPipe(
        net,
        layers,
        [torch.device("cpu")],
        "bfloat16",
        lambda rows, _: Sweeps(strip_edges(rows, strip)),
    )
    seen = set()

    def measure(logits: torch.Tensor, window: Window) -> torch.Tensor:
        seen.add(logits.dtype)
        return logits.sum()

    pipe(image, origin_of(*COMPARED_SIZE), measure)
    assert seen == {torch.bfloat16}


@pytest.mark.parametrize("balance", [(), (1, 5), (3, 3), (2, 2, 2)])
@pytest.mark.parametrize("kind", [torch.nn.Dropout, torch.nn.Dropout2d])
def test_masks_are_those_of_the_image(kind: Any, balance: tuple[int, ...]) -> None:
    torch.manual_seed(2)
    convs = [torch.nn.Conv2d(wide, out, 3, padding=1) for wide, out in ((3, 4), (4, 5), (5, 2))]
    more = [convs[1], kind(0.2), torch.nn.ReLU(), convs[2]]
    adopted = adopt(torch.nn.Sequential(convs[0], kind(0.4), *more), 3)
    net = adopted.network(torch.float64).train()
    net.mask_key.images, net.mask_key.step = (0,), 2
    strips = HIGH if balance or kind is torch.nn.Dropout2d else STRIPS
    compare(adopted.layers, net, 3, balance=balance, strips=strips)


@pytest.mark.parametrize("wrong", ["a state's gradient is lost", "a state of the wrong strip"])
def test_what_is_wrong_is_seen(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = swept_backward.as_leaves

    def lost(state: Any) -> Any:
        fresh, leaves = right(state)
        return fresh, [*leaves[:-1], *(one.detach().requires_grad_() for one in leaves[-1:])]

    if wrong == "a state's gradient is lost":
        monkeypatch.setattr(swept_backward, "as_leaves", lost)
    else:
        monkeypatch.setattr(
            swept_training.Sweep, "state", swept_training.Sweep.state.setter(lambda self, state: 0)
        )
    for test in (test_gradients_of_our_own, test_backward_is_the_adjoint):
        with pytest.raises(AssertionError):
            test("nearest", HIGH)


@pytest.mark.parametrize("first", [0, 4])
def test_backward_passes_once(first: int) -> None:
    pipe, image = small_pipe(first)
    total = pipe(image, origin_of(8, 8), lambda logits, _: logits.sum())
    total.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    with pytest.raises(AssertionError, match="once"):
        total.backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("keeps", [True, False])
def test_states_wait_for_backward_only_where_they_are_asked_for(keeps: bool) -> None:
    pipe, image = small_pipe()
    part = swept_training._Part(pipe, image, origin_of(8, 8))
    node: Any = part.sweep(len(pipe.layers), {}, lambda x, _: x.sum(), keeps_states=keeps).grad_fn
    assert len(node.plans) > 1
    assert len(node.states) == (len(node.plans) if keeps else 0)


RUNS = [
    ("residual", TileKeys(), 1, 8),
    ("between", TileKeys(), 1, 40),
    ("gated", TileKeys(), 1, 8),
    ("pyramid", TileKeys(), 1, 40),
    ("shared", TileKeys(), 1, 8),
    ("residual", TileKeys(rows=2, columns=2), 1, 40),
    ("between", TileKeys(rows=2, columns=2), 1, 8),
    ("residual", TileKeys(), 3, 8),
    ("between", TileKeys(), 2, 40),
    ("residual", TileKeys(rows=2, columns=2), 2, 8),
]
ALONE, IN_PARTITIONS = pytest.mark.ranks((1, 2, 3)), pytest.mark.ranks(2, (1, 3))


@pytest.mark.parametrize(
    ("name", "tiles", "partitions", "strip_px"),
    [pytest.param(*run, marks=IN_PARTITIONS if run[2] > 1 else ALONE) for run in RUNS],
    indirect=["strip_px"],
)
def test_a_run_is_that_of_the_module(
    comm: MPI.Intracomm,
    shared_path: Path,
    strip_px: int,
    name: str,
    tiles: TileKeys,
    partitions: int,
) -> None:
    (scene,) = scenes_of(shared_path, [SIZE], comm)
    mesh = MeshKeys(1, 1, comm.size)
    run = run_file(shared_path, [scene], keys_of(name), halo_mode="sweep", mesh=mesh, tiles=tiles)
    run = replace(run, classes=CLASSES[name], partitions=partitions)
    found = outcome_of(run, comm, scene.image, None)
    check_same(comm, found, wanted_of(name, "frozen"), scene)


def test_a_proof_has_many_strips(
    comm: MPI.Intracomm,
    shared_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Of the rows that take the least memory a small image is one."""
    seen: list[tuple[int, ...]] = []

    def kept(layers: Any, network: Any, part: Any, *more: Any, **keys: Any) -> Sweep:
        seen.append(part.edges)
        return Sweep(layers, network, part, *more, **keys)

    monkeypatch.setattr(swept_training, "Sweep", kept)
    scenes = scenes_of(shared_path, [SIZE], comm)
    run = run_file(shared_path, scenes, keys_of("residual"), halo_mode="sweep")
    assert train(replace(run, classes=CLASSES["residual"], steps=1), comm=comm) == 0
    assert "proved on 1 × 1 ranks, sweep" in capfd.readouterr().err
    assert seen[0] == strip_edges(64, 8)


@pytest.mark.ranks((1, 2))
@pytest.mark.parametrize("crops", [False, True])
@pytest.mark.parametrize(
    ("partitions", "upsampling", "clips", "loss", "strip_px"),
    [
        (1, "nearest", (0.12, 0.1), "focal", 8),
        (1, "transposed", (None, None), "ce+dice", 40),
        (2, "nearest", (0.12, 0.1), "ce+dice", 8),
    ],
    indirect=["strip_px"],
)
def test_all_of_the_recipe(
    comm: MPI.Intracomm,
    shared_path: Path,
    strip_px: int,
    partitions: int,
    upsampling: Any,
    clips: tuple[float | None, float | None],
    loss: str,
    crops: bool,
) -> None:
    """Augmentation, dropout, losses, class weights, clipping; of images and of crops."""
    scenes = recipe_scenes(shared_path, [(51, 83), (62, 45)], comm)
    keys = replace(KEYS, norm="none", upsampling=upsampling)
    more: dict[str, Any] = {"halo_mode": "sweep", "mesh": MeshKeys(1, 1, comm.size), "loss": loss}
    more |= {"crop_px": 40, "batch_size": 3} if crops else {}
    more |= {"partitions": partitions, "micro_batches": 2 + crops}
    check(comm, shared_path, scenes, keys, clips[crops], **more)


@pytest.mark.ranks(2, 3)
def test_ranks_hold_columns_of_an_image(
    comm: MPI.Intracomm, shared_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Unless a mesh or tiles are asked for."""
    scenes = scenes_of(shared_path, [SIZE], comm)
    run = run_file(shared_path, scenes, keys_of("residual"), halo_mode="sweep")
    run = replace(run, classes=CLASSES["residual"], steps=1)
    assert train(run, comm=comm) == 0
    words = capfd.readouterr().err
    if comm.rank == 0:
        assert f"1 × 1 × {comm.size} ranks" in words
        assert f"1 × {comm.size} tiles, halo exchanged, swept, work ratio 1.0" in words
        assert f"proved on 1 × {comm.size} ranks, sweep" in words
    narrow = replace(run, crop_px=8, output=str(shared_path / "narrow"))
    with pytest.raises(AgreedError, match="fewer ranks per image"):
        train(narrow, comm=comm)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"network": keys_of("gated"), "partitions": 2}, "partitions: 2\\); set partitions: 1"),
        ({"checkpointing": "always"}, "set checkpointing: never"),
        ({"swap": "auto"}, "set swap: off"),
        ({"halo": 96}, "set halo: exact"),
        ({"network": replace(KEYS, norm="instance")}, "instance norm"),
        ({"network": replace(KEYS, padding="valid", norm="none")}, "padding: same"),
        ({"network": keys_of("gated"), "tiles": TileKeys(rows=2, columns=1)}, "leave tiles"),
        ({"network": keys_of("residual", "step")}, "batch norm"),
    ],
)
def test_what_is_not_swept_is_refused(
    comm: MPI.Intracomm, shared_path: Path, more: dict[str, Any], words: str
) -> None:
    scenes = scenes_of(shared_path, [SIZE], comm)
    given = {"network": replace(KEYS, norm="none"), **more}
    run = run_file(shared_path, scenes, given.pop("network"), halo_mode="sweep", **given)
    if more.get("network") == keys_of("residual", "step"):
        run = replace(run, classes=CLASSES["residual"])
    with pytest.raises(AgreedError, match=words):
        train(run, comm=comm)


def test_maps_of_a_strip_may_be_wide_where_those_of_the_image_are_too_large(
    shared_path: Path, comm: MPI.Intracomm
) -> None:
    (scene,) = scenes_of(shared_path, [SIZE], comm)
    run = run_file(shared_path, [scene], replace(KEYS, base=32, norm="none"))
    shapes = (((1, 2, 3), (12_000, 12_000)),)
    with pytest.raises(TilenetError, match="2³¹"):
        plan_run(run, shapes, 1)
    assert plan_run(replace(run, halo_mode="sweep"), shapes, 1).swept


@pytest.mark.parametrize("strip_rows", [64, 128])
def test_memory_is_that_of_a_strip_and_the_states(strip_rows: int) -> None:
    layers = unet_layers(UNetOptions(3, base=8, bands=4, classes=2))
    net, size = build_network(layers).train(), (1024, 128)
    image = torch.randn(1, 4, *size)

    def peak(loss: Callable[[], torch.Tensor]) -> int:
        net.zero_grad()
        with LiveBytes() as live:
            loss().backward()  # type: ignore[no-untyped-call]
        return live.peak

    device = torch.device("cpu")
    pipe = SweptPipe(
        net, layers, [device], "float32", lambda rows, _: Sweeps(strip_edges(rows, strip_rows))
    )
    found = peak(lambda: pipe(image, origin_of(*size), lambda logits, _: logits.square().sum()))
    assert found < 0.6 * peak(lambda: net(image.clone()).square().sum())
