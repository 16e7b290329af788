"""A user module is imported and made by rank 0 alone; all ranks have its layers and weights."""

import os
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI
from test_same_as_whole_image import outcome_of, run_file, scenes_of, weights_of_saves
from whole_image import Scene

from tilenet.adoption.adopt import Adopted
from tilenet.errors import AgreedError
from tilenet.library.whole_run import train
from tilenet.parallel.ranks.abort import run_as_rank
from tilenet.parallel.ranks.together import RankControl
from tilenet.training.config.keys import NetworkKeys
from tilenet.training.config.run_file import RunFile
from tilenet.training.setup.architecture import Architecture
from tilenet.training.setup.share import share_architecture

pytestmark = pytest.mark.ranks(2)

SOURCE = """
import os
from pathlib import Path

import numpy as np
import torch
from mpi4py import MPI
from safetensors.torch import save_file
from torch import nn

HERE = Path(__file__).parent
(HERE / f"imported-{os.getpid()}").touch()
torch.set_default_dtype(torch.float64)


class Net(nn.Module):
    def __init__(self, turned=False, fails="never", classes=3):
        super().__init__()
        if fails == "import" and MPI.COMM_WORLD.rank == 0:
            raise OSError("no weights on this node")
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.one, self.two = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.head = nn.BatchNorm2d(4), nn.Conv2d(4, classes, 1)
        self.turned = turned
        entropy = np.random.default_rng()
        for weight in self.parameters():
            weight.data = torch.from_numpy(entropy.normal(0, 0.3, weight.shape)).float()
        drawn = HERE / f"drawn-{os.getpid()}.safetensors"
        if not drawn.exists():
            save_file(self.state_dict(), drawn)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        for part in (self.two, self.one) if self.turned else (self.one, self.two):
            x = torch.relu(part(x))
        return self.head(self.norm(x))
"""


@pytest.fixture
def user_module(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Name of a class in a file that no process has imported. Collective."""
    name = f"drawn_{shared_path.name.replace('-', '_')}"
    if comm.rank == 0:
        (shared_path / f"{name}.py").write_text(SOURCE)
    comm.Barrier()
    monkeypatch.syspath_prepend(shared_path)
    yield f"{name}:Net"
    sys.modules.pop(name, None)
    torch.set_default_dtype(torch.float32)


def run_of(shared_path: Path, scene: Scene, module: str, **options: Any) -> RunFile:
    return run_file(shared_path, [scene], NetworkKeys(module=module, options=options))


def test_all_of_an_adopted_network_goes_to_all_ranks(comm: MPI.Intracomm) -> None:
    keys = NetworkKeys(module="zoo:Residual"), 3, 4, 5
    made = Architecture.of(*keys).adopted
    shared = share_architecture(*keys, RankControl(comm)).adopted
    assert made is not None
    assert shared is not None
    assert list(shared.state) == list(made.state)
    assert all(torch.equal(shared.state[name], tensor) for name, tensor in made.state.items())
    for part in fields(Adopted):
        assert part.name == "state" or getattr(shared, part.name) == getattr(made, part.name)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("mode", ["overlap", "exchange"])
def test_weights_of_entropy_are_those_of_one_rank(
    comm: MPI.Intracomm,
    shared_path: Path,
    user_module: str,
    mode: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (scene,) = scenes_of(shared_path, [(61, 83)], comm)
    held = weights_of_saves(monkeypatch)
    run = replace(run_of(shared_path, scene, user_module), halo_mode=mode)
    found = outcome_of(run, comm, scene.image, None)
    here = {name: tensor for name, tensor in held[-1].items() if "num_batches" not in name}
    for other in comm.allgather(here):
        assert all(torch.equal(tensor, other[name]) for name, tensor in here.items())
    drawn = str(shared_path / f"drawn-{comm.bcast(os.getpid())}.safetensors")
    alone = replace(
        run,
        network=replace(run.network, weights=drawn),
        output=str(shared_path / f"alone{comm.rank}"),
    )
    wanted = outcome_of(alone, MPI.COMM_SELF, scene.image, None)
    apart = max(abs(a - b) for a, b in zip(found.losses, wanted.losses, strict=True))
    assert comm.allreduce(apart, op=MPI.MAX) <= 1e-12


def test_rank_0_alone_imports_a_user_module(
    comm: MPI.Intracomm, shared_path: Path, user_module: str
) -> None:
    (scene,) = scenes_of(shared_path, [(61, 83)], comm)
    assert train(replace(run_of(shared_path, scene, user_module), steps=1), comm=comm) == 0
    imported = [path.name for path in shared_path.glob("imported-*")]
    assert comm.bcast(imported) == [f"imported-{comm.bcast(os.getpid())}"]
    # What its import sets does not make ranks unlike each other.
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"fails": "import"}, r"OSError: no weights on this node"),
        ({"classes": 5}, r"one channel per class .* gives 5, classes: 3"),
        ({"depth": 5}, r"TypeError.*depth"),
    ],
    ids=["raises", "classes", "options"],
)
def test_what_rank_0_refuses_all_ranks_refuse(
    comm: MPI.Intracomm,
    shared_path: Path,
    user_module: str,
    options: dict[str, Any],
    said: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (scene,) = scenes_of(shared_path, [(61, 83)], comm)
    run = run_of(shared_path, scene, user_module, **options)
    with pytest.raises(AgreedError, match=said) as caught:
        train(run, comm=comm)
    assert len(set(comm.allgather(str(caught.value)))) == 1
    assert run_as_rank(lambda: train(run, comm=comm)) == 1
    assert capfd.readouterr().err.count("tilenet: ") == (comm.rank == 0)
    assert not Path(run.output).exists()


def test_a_run_goes_on_with_the_names_that_it_began_with(
    comm: MPI.Intracomm, shared_path: Path, user_module: str
) -> None:
    """Two equal parts in the other order: the list of layers is the same."""
    (scene,) = scenes_of(shared_path, [(61, 83)], comm)
    run = run_of(shared_path, scene, user_module)
    assert train(replace(run, steps=1), comm=comm) == 0
    turned = replace(run, network=replace(run.network, options={"turned": True}))
    with pytest.raises(AgreedError, match=r"weight: one.weight in .*, two.weight in the module"):
        train(turned, resume=True, comm=comm)
    assert train(run, resume=True, comm=comm) == 0
