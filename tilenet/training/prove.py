"""A run's proof: a small image over its own ranks, next to the user's module on the whole image.

Tiles, exchanges, partitions, checkpointing and devices are the run's own; nothing is dropped.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tilenet.adoption.adopt import Adopted
from tilenet.data.schedule import mini_batch_sizes
from tilenet.errors import TilenetError, one_line
from tilenet.geometry.tiles import Tile, Tiling, owned
from tilenet.model.dropout import KeyedDropout
from tilenet.model.network import Network
from tilenet.model.skips import Origin
from tilenet.parallel.health.progress import say
from tilenet.parallel.health.signals import StopRequests
from tilenet.parallel.proof import Difference, largest, no_trace, proof_precision, say_or_refuse
from tilenet.parallel.ranks.layout import RunDevices
from tilenet.parallel.ranks.share import share_tensors
from tilenet.parallel.ranks.together import together
from tilenet.planning.compatibility import stacks, whole_image
from tilenet.planning.mesh import most_tiles, tiles_of
from tilenet.planning.small_image import (
    ImageQuestion,
    choose_small_image,
    proof_grid,
    untested_halo,
)
from tilenet.training.config.run_file import RunFile
from tilenet.training.network import RunNetwork
from tilenet.training.setup import RunPlan

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["prove_run"]


@dataclass(frozen=True)
class _Problem:
    """What is computed twice.

    Attributes:
        tiling: Tiling of the small image.
        images: Random images (N, bands, H, W).
        weights: Weights (N, classes, H, W) of the outputs; the loss is their sum.
        each: Images of a replica, of its own where the network takes statistics of a step.
        replicas: Replicas that have images of their own.
    """

    tiling: Tiling
    images: Tensor
    weights: Tensor
    each: int
    replicas: int

    def of(self, replica: int) -> list[int]:
        """Numbers of a replica's images."""
        first = replica % self.replicas * self.each
        return list(range(first, first + self.each))


@dataclass(frozen=True)
class _Answer:
    """Logits and the gradients of weights, by the module's names; on rank 0."""

    logits: Tensor
    gradients: Mapping[str, Tensor]


def prove_run(
    run: RunFile,
    plan: RunPlan,
    module: nn.Module | None,
    devices: RunDevices,
    size: tuple[int, int],
    pixels: int,
    comm: "MPI.Intracomm",
    stop: StopRequests | None = None,
) -> None:
    """Compare the run's ranks with the module, and say how far they are. Collective.

    Args:
        module: On rank 0 the network itself, which is used up; elsewhere None.
        size: Height and width of an image or crop of the run.
        pixels: Pixels of all its steps.

    Raises:
        AgreedError: The ranks do not give the module's numbers.
        StopAgreed: A rank was asked to stop.
    """
    reason = ""
    if run.prove and plan.adopted is not None:
        try:  # all ranks decide the same
            problem = _problem(plan, size, pixels / comm.size)
        except TilenetError as error:
            reason = str(error)
        else:
            with no_trace(devices.partitions):
                reason = _prove(run, plan, problem, module, devices, comm, stop)
    if reason and comm.rank == 0:
        say(f"not proved: {reason}")
    if module is not None:
        with suppress(Exception):  # a user's module may have its own ideas of moving
            module.to("meta")  # frees its memory


def _problem(plan: RunPlan, size: tuple[int, int], run_pixels: float) -> _Problem:
    """Choose it.

    Raises:
        TilenetError: There is none that takes little time.
    """
    mesh, layers, rule = plan.mesh, plan.record.layers, plan.rule
    if not rule.exact:
        raise TilenetError(f"the halo that was asked for ({rule.halo_px} px) is not the exact one")
    like = plan.tiling(*size)
    grid = like.grid if rule.exchanged else proof_grid(like.grid, (mesh.rows, mesh.columns))
    together = whole_image(layers) == "batch norm"
    asked = ImageQuestion(
        layers,
        rule,
        grid,
        like,
        most_tiles(mesh, grid),
        replicas=mesh.replicas if together else 1,
        backward=True,
        run_pixels=run_pixels,
    )
    try:
        tiling = choose_small_image(asked)
    except TilenetError:
        if not together:
            raise
        asked = replace(asked, images=2)  # of one average a norm has no spread
        tiling = choose_small_image(asked)
    generator = torch.Generator().manual_seed(0)
    number, dtype = asked.images * asked.replicas, torch.float64
    images, weights = (
        torch.randn((number, channels, *tiling.extended), generator=generator, dtype=dtype)
        for channels in (layers[0].in_channels, layers[-1].out_channels)
    )
    return _Problem(tiling, images, weights, asked.images, asked.replicas)


def _prove(
    run: RunFile,
    plan: RunPlan,
    problem: _Problem,
    module: nn.Module | None,
    devices: RunDevices,
    comm: "MPI.Intracomm",
    stop: StopRequests | None,
) -> str:
    """Compute, compare and say it; returns why it cannot be done."""
    precision = proof_precision(devices.partitions, comm)
    own = replace(plan, record=replace(plan.record, precision=precision))
    answer, rounding = None, (inf, inf)
    reason: str = ""
    with together(comm, stop):  # ranks that wait leave the cores to rank 0
        if module is not None and plan.adopted is not None:
            answer, reason = _of_module(run, plan.adopted, module, problem)
            if answer is not None and precision == "float32":
                rounding = _rounding(plan.adopted, problem, answer, devices.partitions[0])
    reason, rounding = comm.bcast((reason, rounding))
    if reason:
        return reason
    logits = share_tensors({} if answer is None else {"logits": answer.logits}, comm)["logits"]
    kinds = run.swapping, run.optimizer.kind
    network = RunNetwork(own, devices, "off", *kinds, (), run.seed, run.exchange_from, comm, stop)
    apart = _run(own, problem, network, logits, comm)
    sums = _gradients(own, problem, network, answer, comm)
    network.close()
    of_device = rounding if precision == "float32" else (None, None)
    differences = [
        Difference("logits", apart, of_device[0]),
        Difference("gradients", sums[0], of_device[1], sums[1]),
    ]
    say_or_refuse(differences, _how(plan), untested_halo(problem.tiling), "prove: false", comm)
    return ""


def _how(plan: RunPlan) -> str:
    """Ranks, mode and pipeline, for people."""
    mesh, parts = plan.mesh, len(plan.balance)
    replicas = f"{mesh.replicas} × " * (mesh.replicas > 1)
    return (
        f"{replicas}{mesh.rows} × {mesh.columns} ranks, {plan.halo_mode}"
        + f", {parts} partitions" * (parts > 1)
        + f", checkpointing {plan.checkpointing}" * (plan.checkpointing != "never")
    )


def _of_module(
    run: RunFile, adopted: Adopted, module: nn.Module, problem: _Problem
) -> tuple[_Answer | None, str]:
    """The module's answer in float64, or why there is none."""
    try:
        training = {part.training for part in module.modules()}
        norms = [
            part
            for part in module.modules()
            if isinstance(part, nn.modules.batchnorm._BatchNorm)
            and (part.training or len(training) == 1)
        ]
        module = module.cpu().double().eval()
        if run.network.batch_norm == "step":
            for part in norms:
                part.train()
        answer = _answer(module, problem, adopted.names.values())
    except Exception as error:  # whatever somebody's forward may raise on an image this small
        height, width = problem.tiling.extended
        return None, (
            f"{adopted.name} cannot take {height} × {width} px in float64 "
            f"({type(error).__name__}: {one_line(str(error))[:200]})"
        )
    if answer.logits.shape != problem.weights.shape:
        return None, f"{adopted.name} gives a map of the shape {tuple(answer.logits.shape)}"
    finite = [bool(one.isfinite().all()) for one in (answer.logits, *answer.gradients.values())]
    return (answer, "") if all(finite) else (None, f"{adopted.name} gives values without end")


def _rounding(
    adopted: Adopted, problem: _Problem, answer: _Answer, device: torch.device
) -> tuple[float, float]:
    """How far the whole image on one device in float32 is from float64, as `Difference.apart`."""
    network = _without_dropout(adopted.network(torch.float32).to(device).train())
    found = _answer(network, problem, adopted.names.values(), adopted.names)
    gradients = [
        largest(found.gradients[name], wanted)
        for name, wanted in answer.gradients.items()
        if name in found.gradients
    ]
    scale = _scale(answer.gradients.values())
    logits = largest(found.logits, answer.logits) / _scale([answer.logits])
    return logits, max(gradients, default=0.0) / scale


def _scale(tensors: Any) -> float:
    return max(max((float(one.abs().max()) for one in tensors), default=0.0), 1e-30)


def _without_dropout(network: Network) -> Network:
    for part in network.modules():
        if isinstance(part, KeyedDropout):
            part.probability = 0.0
    return network


def _answer(
    network: nn.Module,
    problem: _Problem,
    trained: Any,
    names: Mapping[str, str] | None = None,
) -> _Answer:
    """Run forward and backward on the whole images.

    Args:
        trained: Names in the module of weights whose gradients count.
        names: Name in the module of each of the network's weights; None: its own.
    """
    like = next(network.parameters())
    network.zero_grad()
    with _Plainly():
        out = network(problem.images.to(like, copy=True))
        while not isinstance(out, Tensor):
            out = next(iter(out.values())) if isinstance(out, dict) else out[0]
        (out * problem.weights.to(out)).sum().backward()  # type: ignore[no-untyped-call]
    wanted, gradients = set(trained), {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        name = name if names is None else names[name]
        if name in wanted and parameter.grad is not None:
            gradients[name] = parameter.grad.double().cpu()
    return _Answer(out.detach().double().cpu(), gradients)


class _Plainly(TorchFunctionMode):
    """Nothing is dropped, and instance norm has its right gradient.

    torch 2.13 takes a wrong one on CPUs for one image whose incoming gradient has channels last.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name.rstrip("_123d").endswith("dropout"):
            return args[0] if args else kwargs["input"]
        out = func(*args, **(kwargs or {}))
        if name == "instance_norm" and out.requires_grad:
            out.register_hook(Tensor.contiguous)
        return out


def _run(
    plan: RunPlan, problem: _Problem, network: RunNetwork, logits: Tensor, comm: "MPI.Intracomm"
) -> float:
    """Run the rank's tiles forward and backward; how far logits of any rank are. Collective."""
    from mpi4py import MPI

    place, tiling = plan.mesh.place(comm.rank), problem.tiling
    numbers = tiles_of(place, plan.mesh, tiling.grid)
    work = [(image, number) for image in problem.of(place.replica) for number in numbers]
    batches = stacks(plan.record.layers, work, [image for image, _ in work])
    _without_dropout(network.network.train())
    apart = 0.0
    for size in mini_batch_sizes(len(batches), plan.micro_batches):
        batch, batches = batches[:size], batches[size:]
        origins = [
            Origin(tuple(i for i, _ in parts), tiling, tuple(n for _, n in parts), micro_batch)
            for micro_batch, parts in enumerate(batch)
        ]
        like = next(network.network.parameters()).dtype
        images = [
            torch.cat([_read(problem.images, i, tiling.tiles[n]) for i, n in parts]).to(like)
            for parts in batch
        ]
        loss: Tensor | float = 0.0
        for output, parts in zip(network.pipe(images, origins), batch, strict=True):
            for row, (image, number) in enumerate(parts):
                tile = tiling.tiles[number]
                own = owned(output[row : row + 1], tile, plan.rule.offset_px)
                apart = max(apart, largest(own, _own(logits, image, tile)))
                loss = loss + (own * _own(problem.weights, image, tile).to(own)).sum()
        if isinstance(loss, Tensor):
            loss.backward()  # type: ignore[no-untyped-call]
    most: float = comm.allreduce(apart / _scale([logits]), op=MPI.MAX)
    return most


def _read(images: Tensor, image: int, tile: Tile) -> Tensor:
    read = tile.read
    rows, cols = slice(read.row, read.row + read.height), slice(read.col, read.col + read.width)
    return images[image : image + 1, :, rows, cols].clone()


def _own(maps: Tensor, image: int, tile: Tile) -> Tensor:
    return owned(maps[image : image + 1], Tile(replace(tile.read, row=0, col=0), tile.own))


def _gradients(
    plan: RunPlan,
    problem: _Problem,
    network: RunNetwork,
    answer: _Answer | None,
    comm: "MPI.Intracomm",
) -> tuple[float, str]:
    """How far the sums of gradients over all ranks are, and in which weight. Collective."""
    from mpi4py import MPI

    assert plan.adopted is not None
    times = plan.mesh.replicas / problem.replicas  # replicas of the same image
    worst, where = 0.0, ""
    scale = 1.0 if answer is None else _scale(answer.gradients.values())
    for name, parameter in network.network.named_parameters():
        if not parameter.requires_grad:
            continue
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        total = gradient.double().cpu().contiguous()
        comm.Allreduce(MPI.IN_PLACE, total.numpy())
        parameter.grad = None
        if answer is not None:
            known = plan.adopted.names[name]
            wanted = answer.gradients.get(known, torch.zeros(()).expand(total.shape))
            apart = largest(total / times, wanted.reshape(total.shape)) / scale
            if apart > worst:
                worst, where = apart, f" ({known})"
    found: tuple[float, str] = comm.bcast((worst, where))
    return found
