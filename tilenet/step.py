"""One step of training: mini-batches of tiles in, updated weights out.

The result does not depend on ranks, tiles, partitions or micro-batches, because a step is one sum:
the loss and its gradient are sums over own, labelled pixels, added over tiles and ranks and divided
once by the sum of weights.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tilenet.errors import AgreedError, TilenetError
from tilenet.files.labels import Labels
from tilenet.files.network_record import NetworkRecord
from tilenet.files.raster import Raster
from tilenet.geometry.tiles import Tile, owned
from tilenet.model.inputs import standardise
from tilenet.model.loss import cross_entropy
from tilenet.model.loss_scale import LossScale
from tilenet.model.network import Network
from tilenet.model.skips import Origin
from tilenet.parallel.gradients import GradientSum
from tilenet.parallel.pipeline import Pipe
from tilenet.parallel.running import RunningStatistics
from tilenet.planning.schedule import Sample, mini_batch_sizes
from tilenet.run_file import RunFile

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Step", "StepResult"]

Work = tuple[Sample, Tile]


@dataclass(frozen=True)
class StepResult:
    """What a step says of itself.

    Attributes:
        loss: Before the update; 0 where no pixel of the step is labelled.
        weight: Sum of the weights of the labelled pixels.
        seconds: Of the whole step.
        read_seconds: Of reading, on this rank.
        reduce_seconds: Of waiting for the sum of gradients after the last backward.
        stop: Whether any rank was asked to stop.
    """

    loss: float
    weight: float
    seconds: float
    read_seconds: float
    reduce_seconds: float
    stop: bool


@dataclass(frozen=True)
class MicroBatch:
    """A tile on its way through the pipeline."""

    sample: Sample
    tile: Tile
    image: Tensor
    labels: NDArray[np.int64]


class Step:
    """Steps of a run on one rank. Collective to make, to run and to close."""

    def __init__(
        self,
        run: RunFile,
        record: NetworkRecord,
        pipe: Pipe,
        files: tuple[list[Raster], list[Labels]],
        offset_px: int,
        optimizer: torch.optim.Optimizer,
        scale: LossScale,
        comm: "MPI.Intracomm",
    ) -> None:
        self.run, self.record, self.pipe, self.comm = run, record, pipe, comm
        self.images, self.labels = files
        self.offset_px, self.optimizer, self.scale = offset_px, optimizer, scale
        self.network: Network = pipe.network
        parameters = list(self.network.parameters())
        self.dtype = parameters[0].dtype
        self.device = pipe.devices[-1]
        self.weights = (
            torch.tensor(run.class_weights, dtype=self.dtype, device=self.device)
            if run.class_weights
            else None
        )
        piece_bytes = int(run.gradients.piece_mb * 2**20)
        self.gradients = GradientSum(parameters, comm, piece_bytes, run.gradients.transport)
        self.running = RunningStatistics(self.network, comm)

    def take(self, step: int, work: Sequence[Work], stop: Callable[[], bool]) -> StepResult:
        """Make one step.

        Args:
            step: Its number, from 0.
            work: This rank's tiles.
            stop: Whether this rank was asked to stop; asked once, after the last tile.

        Raises:
            AgreedError: The loss is not finite, or float16 cannot hold the gradients.
        """
        began = time.perf_counter()
        self.gradients.zero()
        self.running.begin()
        self.network.train()
        self.network.mask_key.step = step
        sums = np.zeros(3)  # loss, weight, requests to stop
        read_seconds = 0.0
        left = list(work)
        for size in mini_batch_sizes(len(work), self.run.micro_batches):
            start = time.perf_counter()
            tiles, left = left[:size], left[size:]
            batch = [made for sample, tile in tiles if (made := self._read(sample, tile))]
            read_seconds += time.perf_counter() - start
            if batch:
                if not left:
                    self.gradients.arm(self.pipe.passes(len(batch)))
                sums[:2] += self._forward_backward(batch)
        self.gradients.finish()
        self.running.finish()
        sums[2] = stop()
        self.comm.Allreduce(np.copy(sums), sums)
        loss, weight = float(sums[0]), float(sums[1])
        if weight > 0:
            if not np.isfinite(loss):
                raise AgreedError(
                    f"the loss must stay finite (step {step + 1}: {loss}); lower optimizer.lr, or "
                    "look for extreme pixel values: the last checkpoint is whole"
                )
            loss /= weight
            self._update(weight)
        return StepResult(
            loss=loss,
            weight=weight,
            seconds=time.perf_counter() - began,
            read_seconds=read_seconds,
            reduce_seconds=self.gradients.wait_seconds,
            stop=bool(sums[2]),
        )

    def _read(self, sample: Sample, tile: Tile) -> MicroBatch | None:
        """A tile's pixels and labels; None where it owns no labelled pixel."""
        pixels = self.images[sample.image].read(tile.read, sample.region)
        labels = self.labels[sample.image].read(tile.own, sample.region)
        labels[~owned(pixels.valid, tile)] = self.run.ignore_index
        if (labels == self.run.ignore_index).all():
            return None
        mean, std = self.record.mean, self.record.std
        image = standardise(pixels.values, pixels.valid, mean, std, self.dtype)
        return MicroBatch(sample, tile, image, labels)

    def _forward_backward(self, batch: list[MicroBatch]) -> tuple[float, float]:
        """Add the gradient of a mini-batch's summed loss; return the sum and its weight."""
        numbers = [Origin((part.sample.number,)) for part in batch]
        outputs = self.pipe([part.image for part in batch], numbers)
        total, weights = torch.zeros((), dtype=torch.float64, device=self.device), 0.0
        for part in batch:
            # Taken off the list, so that a micro-batch's logits go as soon as its loss is taken.
            logits = owned(outputs.pop(0).to(self.dtype), part.tile, self.offset_px)
            target = torch.from_numpy(part.labels)[None].to(self.device)
            loss, weight = cross_entropy(logits, target, self.run.ignore_index, self.weights)
            total = total + loss
            weights += weight
        (total * self.scale.value).backward()  # type: ignore[no-untyped-call]
        return float(total.detach()), weights

    def _update(self, weight: float) -> None:
        """Divide the gradient once, and step; throw it away where float16 overflowed."""
        self.gradients.divide(weight * self.scale.value)
        if self.scale.most > 1:
            if not self.gradients.finite:
                try:
                    self.scale.overflowed()
                except TilenetError as error:
                    raise AgreedError(str(error)) from error
                return
            self.scale.went_well()
        self.optimizer.step()

    def close(self) -> None:
        """Give threads and communicators back. Collective."""
        self.gradients.close()
