"""Runs and maps of somebody else's networks: the numbers of their module on the whole image."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from safetensors.torch import load_file, save_file
from shared_out import grids
from test_same_as_whole_image import LR, STEPS, outcome_of, read_outcome, run_file, scenes_of
from test_same_as_whole_image import check_same as check_outcomes
from torch import nn
from whole_image import IGNORE, Outcome, Scene, random_scene, standardised
from zoo import SUMS, Sum, network

from tilenet.errors import AgreedError
from tilenet.library.whole_run import train
from tilenet.training.config.keys import MeshKeys, NetworkKeys, SwappingKeys, TileKeys

pytestmark = pytest.mark.ranks(2, (3, 4))

SIZE = 109, 151
# Pixels that the networks' strides divide.
UNITS = {"residual": 8, "gated": 2, "pyramid": 2, "looking": 1, "between": 2, "shared": 8}
UNITS |= {"located": 2}
CLASSES = dict.fromkeys(UNITS, 3) | {"residual": 4}


def keys_of(name: str, batch_norm: str = "frozen", fixed: Sequence[str] = ()) -> NetworkKeys:
    options = {"name": name, "drops": False, "fixed": list(fixed)}
    return NetworkKeys(module="zoo:network", options=options, batch_norm=batch_norm)  # type: ignore[arg-type]


def whole_input(scene: Scene, unit: int) -> torch.Tensor:
    """The standardised image, extended by reflection to a multiple of the strides."""
    image = standardised(scene)
    edges = [(0, -size % unit) for size in image.shape[1:]]
    return torch.from_numpy(np.pad(image, ((0, 0), *edges), mode="reflect"))[None]


def run_whole(module: nn.Module, scene: Scene, unit: int) -> torch.Tensor:
    out = module(whole_input(scene, unit))
    out = out["out"] if isinstance(out, dict) else out
    return out[:, :, : scene.valid.shape[0], : scene.valid.shape[1]]  # type: ignore[no-any-return]


def train_whole(
    scenes: list[Scene], name: str, batch_norm: str, fixed: Sequence[str] = ()
) -> Outcome:
    """Train somebody's module itself on whole images with plain SGD; map the first."""
    module, unit = network(name, drops=False, fixed=fixed).double(), UNITS[name]
    optimizer = torch.optim.SGD(module.parameters(), LR)
    losses = []
    for _ in range(STEPS):
        module.train(batch_norm == "step")
        optimizer.zero_grad()
        logits = run_whole(module, scenes[0], unit)
        target = np.where(scenes[0].valid, scenes[0].classes, IGNORE)
        loss = F.cross_entropy(logits, torch.from_numpy(target)[None], ignore_index=IGNORE)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        final = run_whole(module.eval(), scenes[0], unit)[0].numpy()
    return Outcome(losses, dict(module.state_dict()), final)


@cache
def wanted_of(name: str, batch_norm: str, fixed: tuple[str, ...] = ()) -> Outcome:
    return train_whole([random_scene(Path(), SIZE, 1, write=False)], name, batch_norm, fixed)


def check_same(comm: MPI.Intracomm, found: Outcome, wanted: Outcome, scene: Scene) -> None:
    """Losses, weights under the module's own names, and logits. Collective."""
    check_outcomes(comm, found, wanted, scene.valid, logits=1e-11)


@pytest.mark.ranks((2, 3, 4))
@pytest.mark.parametrize("name", UNITS)
@pytest.mark.parametrize("mode", ["overlap", "exchange"])
@pytest.mark.parametrize("batch_norm", ["frozen", "step"])
def test_a_run_is_that_of_the_module(
    comm: MPI.Intracomm, shared_path: Path, name: str, mode: Any, batch_norm: str
) -> None:
    if name == "pyramid" and batch_norm == "step":
        pytest.skip("the module takes the spread of a single average of its one image")
    (scene,) = scenes_of(shared_path, [SIZE], comm)
    wanted = wanted_of(name, batch_norm)
    assert abs(wanted.losses[-1] - wanted.losses[0]) > 1e-3, "steps must matter"
    mesh = MeshKeys(1, *grids(comm.size)[0])
    run = run_file(shared_path, [scene], keys_of(name, batch_norm), halo_mode=mode, mesh=mesh)
    run = replace(run, classes=CLASSES[name])
    found = outcome_of(run, comm, scene.image, None)
    check_same(comm, found, wanted, scene)
    # The checkpoint is the module's own, and goes back into it.
    module = network(name, drops=False).double()
    module.load_state_dict(load_file(Path(run.output) / "last" / "weights.safetensors"))


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("where", ["overlap", "exchange", "pipeline", "checkpointed"])
def test_fixed_weights_stay_as_they_are(comm: MPI.Intracomm, shared_path: Path, where: str) -> None:
    """Layers at the beginning, in the middle and at the end; `step` norms look at all of them."""
    (scene,) = scenes_of(shared_path, [SIZE], comm)
    fixed = ("stem", "two", "head")
    options: dict[str, Any] = {"halo_mode": "exchange" if where == "exchange" else "overlap"}
    if where in ("pipeline", "checkpointed"):
        options |= {"partitions": 3}
        options |= {"checkpointing": "always"} if where == "checkpointed" else {}
    else:
        options |= {"mesh": MeshKeys(1, *grids(comm.size)[0])}
    run = run_file(shared_path, [scene], keys_of("residual", "step", fixed), **options)
    run = replace(run, classes=CLASSES["residual"])
    wanted = wanted_of("residual", "step", fixed)
    found = outcome_of(run, comm, scene.image, None)
    check_same(comm, found, wanted, scene)
    first = network("residual").state_dict()
    kept = [name for name, tensor in first.items() if found.weights[name].float().equal(tensor)]
    assert {one.split(".")[0] for one in kept if one.endswith("weight")} == {*fixed}


def test_a_norm_of_a_single_average_is_refused(comm: MPI.Intracomm, shared_path: Path) -> None:
    """As torch does, which has no spread of one value."""
    (scene,) = scenes_of(shared_path, [SIZE], comm)
    run = replace(run_file(shared_path, [scene], keys_of("pyramid", "step")), steps=1)
    with pytest.raises(AgreedError, match="for batch norm a larger batch_size"):
        train(run, comm=comm)


@pytest.mark.ranks((2, 4))
@pytest.mark.parametrize("name", UNITS)
def test_more_tiles_than_ranks_and_maps_of_small_tiles(
    comm: MPI.Intracomm, shared_path: Path, name: str
) -> None:
    """Averages of the image are found tile after tile, before the pass that maps."""
    (scene,) = scenes_of(shared_path, [SIZE], comm)
    run = run_file(shared_path, [scene], keys_of(name), tiles=TileKeys(rows=2, columns=4))
    run = replace(run, classes=CLASSES[name], mesh=MeshKeys(1, 1, comm.size))
    wanted = wanted_of(name, "frozen")
    check_same(comm, outcome_of(run, comm, scene.image, None), wanted, scene)
    check_same(comm, read_outcome(run, scene.image, comm, tile_px=40), wanted, scene)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", [name for name in SUMS if " of " in name])
def test_maps_of_small_tiles_of_sums_of_sums(
    comm: MPI.Intracomm, shared_path: Path, name: str
) -> None:
    (scene,) = scenes_of(shared_path, [(61, 83)], comm)
    keys = NetworkKeys(module="zoo:Sum", options={"name": name})
    run = replace(run_file(shared_path, [scene], keys), steps=0, prove=False)
    found = outcome_of(run, comm, scene.image, 40)
    module = Sum(name).double().eval()
    module.load_state_dict(found.weights)
    wanted = run_whole(module, scene, 1)[0].detach().numpy()
    apart = float(np.abs(found.logits - wanted)[:, scene.valid].max())
    assert apart <= 1e-12 * max(1.0, float(np.abs(wanted).max()))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["residual", "gated", "pyramid", "shared"])
@pytest.mark.parametrize("swap", ["off", "all", "auto"])
def test_in_a_pipeline(comm: MPI.Intracomm, shared_path: Path, name: str, swap: Any) -> None:
    (scene,) = scenes_of(shared_path, [SIZE], comm)
    pipeline: dict[str, Any] = {"partitions": 3, "halo_mode": "exchange"}
    if swap == "off":
        pipeline["checkpointing"] = "always"
    else:
        pipeline["swapping"] = SwappingKeys(device_gib=0.004, min_mib=0.01)
    run = run_file(shared_path, [scene], keys_of(name), swap=swap, **pipeline)
    run = replace(run, classes=CLASSES[name])
    check_same(comm, outcome_of(run, comm, scene.image, None), wanted_of(name, "frozen"), scene)


@pytest.mark.ranks(1)
def test_a_run_that_goes_on_is_the_one_that_did_not_stop(
    comm: MPI.Intracomm, shared_path: Path
) -> None:
    """And a run that begins with the weights of another, which `init` names."""
    (scene,) = scenes_of(shared_path, [SIZE], comm)
    whole = run_file(shared_path, [scene], keys_of("gated"))
    assert train(replace(whole, steps=1), overwrite=True, comm=comm) == 0
    assert train(whole, resume=True, comm=comm) == 0
    check_same(comm, read_outcome(whole, scene.image, comm), wanted_of("gated", "frozen"), scene)
    other = replace(whole, steps=0, init=whole.output, output=str(shared_path / "other"))
    assert train(other, comm=comm) == 0
    names = ("last/weights.safetensors",) * 2
    one, two = (load_file(Path(r.output) / n) for r, n in zip((whole, other), names, strict=True))
    assert all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.ranks(1)
def test_pixels_are_standardised_as_the_weights_were_trained(
    comm: MPI.Intracomm, shared_path: Path
) -> None:
    (scene,) = scenes_of(shared_path, [SIZE], comm)
    mean, std = [1800.0, 2000.5, 2500.0], [900.0, 1100.0, 1000.25]
    keys = replace(keys_of("gated"), mean=mean, std=std)
    found = outcome_of(run_file(shared_path, [scene], keys), comm, scene.image, None)
    given = replace(scene, statistics=(np.array(mean), np.array(std)))
    check_same(comm, found, train_whole([given], "gated", "frozen"), scene)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("kind", ["safetensors", "pth", "encoder"])
def test_weights_of_a_file(
    comm: MPI.Intracomm,
    shared_path: Path,
    kind: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (scene,) = scenes_of(shared_path, [SIZE], comm)
    torch.manual_seed(11)
    weights = {
        name: torch.randn_like(tensor) if tensor.is_floating_point() else tensor
        for name, tensor in network("residual").state_dict().items()
    }
    weights = {n: t.abs() + 0.1 if n.endswith("running_var") else t for n, t in weights.items()}
    path, prefix = shared_path / "w.safetensors", ""
    if kind == "encoder":
        prefix = "stem."
        part = {n.removeprefix(prefix): t for n, t in weights.items() if n.startswith(prefix)}
        save_file(part | {"fc.weight": torch.ones(2, 2)}, path)
    elif kind == "pth":
        path = shared_path / "w.pth"
        torch.save({"state_dict": weights}, path)
    else:
        save_file(weights, path)
    keys = replace(keys_of("residual"), weights=str(path))
    run = replace(run_file(shared_path, [scene], keys), classes=4, steps=0)
    assert train(run, comm=comm) == 0
    found = load_file(Path(run.output) / "last" / "weights.safetensors")
    first = network("residual").state_dict()
    for name, tensor in found.items():
        wanted = weights[name] if name.startswith(prefix) else first[name]
        assert torch.equal(tensor, wanted.to(tensor)), name
    said = capfd.readouterr().err
    number = sum(name.startswith(prefix) for name in weights)
    assert f"{path}: {number} of {number + (kind == 'encoder')} tensors" in said
    assert ("1 of the file have no place (fc.weight)" in said) == (kind == "encoder")
