"""Run a rank's tiles of the small image forward and backward, with the code of the run."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from tilenet.geometry.tiles import owned
from tilenet.geometry.windows import Window
from tilenet.model.origin import Origin
from tilenet.mpi import Intracomm
from tilenet.parallel.exchange.halo import part_of
from tilenet.parallel.exchange.swept_training import SweptPipe
from tilenet.parallel.pipeline.flow import MicroBatch
from tilenet.parallel.pipeline.pipe import Pipe
from tilenet.parallel.proof import largest, scale_of
from tilenet.planning.mesh import tiles_of
from tilenet.planning.micro_batches import mini_batch_sizes, stacks
from tilenet.training.network import RunNetwork
from tilenet.training.proof.reference import Problem, without_dropout
from tilenet.training.setup.run_plan import RunPlan


def run_tiles(
    plan: RunPlan, problem: Problem, network: RunNetwork, logits: Tensor, comm: Intracomm
) -> float:
    """Run the rank's tiles forward and backward; return the largest difference of logits over all
    ranks. Collective.
    """
    from mpi4py import MPI

    place, tiling = plan.mesh.place(comm.rank), problem.tiling
    numbers = problem.chosen or tiles_of(place, plan.mesh, tiling.grid)
    work = [(image, number) for image in problem.of(place.replica) for number in numbers]
    batches = stacks(plan.record.layers, work, [image for image, _ in work])
    without_dropout(network.network.train())
    apart, like = 0.0, next(network.network.parameters())

    def measured(image: int, own: Tensor, window: Window) -> Tensor:
        nonlocal apart
        apart = max(apart, largest(own, _of(logits, image, window)))
        return (own * _of(problem.weights, image, window).to(own)).sum()

    def of_stack(parts: Sequence[tuple[int, int]], output: Tensor) -> Tensor:
        loss = output.new_zeros(())
        for row, (image, number) in enumerate(parts):
            tile = tiling.tiles[number]
            own = owned(output[row : row + 1], tile, plan.rule.offset_px)
            loss = loss + measured(image, own, tile.own)
        return loss

    if plan.pipeline == "1f1b":
        assert isinstance(network.pipe, Pipe)
        feed = (_micro_batch(problem, *pair, like) for pair in enumerate(batches))
        network.pipe.train_in_flow(
            feed, lambda number, output: of_stack(batches[number], output), plan.micro_batches
        )
    sizes = mini_batch_sizes(len(batches), plan.micro_batches)
    for size in sizes if plan.pipeline == "gpipe" else ():
        batch, batches = batches[:size], batches[size:]
        micro_batches = [_micro_batch(problem, *pair, like) for pair in enumerate(batch)]
        images, origins = [m.image for m in micro_batches], [m.origin for m in micro_batches]
        if isinstance(network.pipe, SweptPipe):
            for read, origin in zip(images, origins, strict=True):
                network.pipe(read, origin, partial(measured, origin.images[0])).backward()  # type: ignore[no-untyped-call]
            continue
        loss = sum(map(of_stack, batch, network.pipe(images, origins)))
        if isinstance(loss, Tensor) and loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
    # Logits of tiles that are not computed may be much larger.
    like_these = [_of(logits, image, tiling.tiles[number].own) for image, number in work]
    scale = scale_of(like_these if problem.chosen else [logits])
    most: float = comm.allreduce(apart / scale, op=MPI.MAX)
    return most


def _micro_batch(
    problem: Problem, micro_batch: int, parts: Sequence[tuple[int, int]], like: Tensor
) -> MicroBatch:
    """Tiles of the problem's images, which are computed together."""
    images, numbers = zip(*parts, strict=True)
    reads = [problem.tiling.tiles[number].read for number in numbers]
    stacked = torch.cat(
        [_of(problem.images, image, read) for image, read in zip(images, reads, strict=True)]
    )
    origin = Origin(images, problem.tiling, numbers, micro_batch)
    return MicroBatch(stacked.to(like), origin, micro_batch)


def _of(maps: Tensor, image: int, window: Window) -> Tensor:
    return part_of(maps[image : image + 1], window, 0, 0)
