"""One step of training: mini-batches of tiles in, updated weights out.

The result does not depend on ranks, tiles, partitions or micro-batches, because a step is one sum:
the loss and its gradient are sums over own, labelled pixels, added over tiles and ranks and divided
once by the sum of weights.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tilenet.data.schedule import mini_batch_sizes
from tilenet.errors import AgreedError, TilenetError
from tilenet.geometry.tiles import owned
from tilenet.model.loss import LossScale, cross_entropy, dice, dice_sums, focal, pixel_weight
from tilenet.model.network import Network
from tilenet.model.skips import Origin
from tilenet.parallel.health.progress import EXCHANGING, peak_bytes
from tilenet.parallel.pipeline.pipe import Pipe
from tilenet.parallel.sums.gradients import GradientSum
from tilenet.parallel.sums.values import RunningStatistics, global_sum
from tilenet.parallel.swap.statistics import SwapCounts, SwapStatistics
from tilenet.planning.learning_rate import LearningRate
from tilenet.storage.checkpoints import kept_checkpoint
from tilenet.storage.network_json import NetworkRecord
from tilenet.training.config import RunFile
from tilenet.training.reader import Part

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Step", "StepResult"]


@dataclass(frozen=True)
class StepResult:
    """What a step says of itself.

    Attributes:
        loss: Before the update; 0 where no pixel of the step is labelled.
        weight: Sum of the weights of the labelled pixels.
        seconds: Of the whole step.
        read_seconds: In which this rank waited for pixels.
        reduce_seconds: Of waiting for the sum of gradients after the last backward.
        swaps: What went out and came back on this rank; zeros where nothing is swapped.
        exchange_seconds: In which this rank waited for others inside of layers and losses.
        peak_bytes: Most memory that this rank has held so far.
        stop: Whether any rank was asked to stop.
    """

    loss: float
    weight: float
    seconds: float
    read_seconds: float
    reduce_seconds: float
    swaps: SwapCounts
    exchange_seconds: float
    peak_bytes: int
    stop: bool


class Step:
    """Steps of a run on one rank. Collective to make, to run and to close.

    Args:
        statistics: Of what the pipe swaps, reset by each step; None: it swaps nothing.
    """

    def __init__(
        self,
        run: RunFile,
        record: NetworkRecord,
        pipe: Pipe,
        offset_px: int,
        optimizer: torch.optim.Optimizer,
        rates: LearningRate,
        scale: LossScale,
        comm: "MPI.Intracomm",
        image_comm: "MPI.Intracomm",
        statistics: SwapStatistics | None = None,
    ) -> None:
        self.statistics = statistics
        self.run, self.record, self.pipe, self.comm = run, record, pipe, comm
        self.image_comm = image_comm
        self.offset_px, self.scale = offset_px, scale
        self.optimizer, self.rates = optimizer, rates
        self.network: Network = pipe.network
        parameters = list(self.network.parameters())
        self.dtype = parameters[0].dtype
        self.device = pipe.devices[-1]
        self.weights = (
            torch.tensor(run.class_weights, dtype=self.dtype, device=self.device)
            if isinstance(run.class_weights, list)
            else None
        )
        piece_bytes = int(run.gradients.piece_mb * 2**20)
        self.gradients = GradientSum(parameters, comm, piece_bytes, run.gradients.transport)
        self.running = RunningStatistics(self.network, comm)
        self._peak_bytes = 0

    def take(
        self,
        step: int,
        reads: Iterator[list[Part]],
        num_reads: int,
        images: Sequence[int],
        stop: Callable[[], bool],
    ) -> StepResult:
        """Make one step.

        Args:
            step: Its number, from 0.
            reads: This rank's micro-batches, of this step and those after it; empty ones do not
                count.
            num_reads: How many of them are this step's.
            images: Numbers of the images or crops of which this rank's replica computes tiles.
            stop: Whether this rank was asked to stop; asked once, after the last tile.

        Raises:
            AgreedError: The loss is not finite, or float16 cannot hold the gradients.
            TilenetError: On one rank: a file cannot be read.
        """
        began = time.perf_counter()
        EXCHANGING.take()  # of what was computed between steps
        self.gradients.zero()
        self.running.begin()
        self.network.train()
        self.network.mask_key.step = step
        sums = np.zeros(3)  # loss, weight, requests to stop
        read_seconds = 0.0
        left, sizes = num_reads, mini_batch_sizes(num_reads, self.run.micro_batches)
        # A loss of whole images takes all ranks, those without tiles too.
        for size in sizes or (0,) * ("dice" in self.run.loss_terms):
            start = time.perf_counter()
            batch = [parts for parts in islice(reads, size) if parts]
            left -= size
            read_seconds += time.perf_counter() - start
            if batch and not left:
                self.gradients.arm(self.pipe.passes(len(batch)))
            if batch or "dice" in self.run.loss_terms:
                sums[:2] += self._forward_backward(batch, images)
        self.gradients.finish()
        self.running.finish()
        sums[2] = stop()
        self.comm.Allreduce(np.copy(sums), sums)
        loss, weight = float(sums[0]), float(sums[1])
        if weight > 0:
            if not np.isfinite(loss):
                raise AgreedError(
                    f"the loss must stay finite (step {step + 1}: {loss}); lower optimizer.lr, or "
                    f"look for extreme pixel values: {kept_checkpoint(Path(self.run.output))}"
                )
            loss /= weight
            self._update(weight, step)
        self._peak_bytes = max(self._peak_bytes, peak_bytes(self.pipe.devices))
        return StepResult(
            loss=loss,
            weight=weight,
            seconds=time.perf_counter() - began,
            read_seconds=read_seconds,
            reduce_seconds=self.gradients.wait_seconds,
            swaps=SwapCounts() if self.statistics is None else self.statistics.take(),
            exchange_seconds=EXCHANGING.take(),
            peak_bytes=self._peak_bytes,
            stop=bool(sums[2]),
        )

    def _forward_backward(
        self, batch: list[list[Part]], images: Sequence[int]
    ) -> tuple[float, float]:
        """Add the gradient of a mini-batch's summed loss; return the sum and its weight."""
        origins = [
            Origin(
                images=tuple(part.work.sample.number for part in parts),
                tiling=parts[0].work.tiling,
                tiles=tuple(part.work.number for part in parts),
                micro_batch=number,
            )
            for number, parts in enumerate(batch)
        ]
        images_of = [torch.cat([part.image for part in parts]) for parts in batch]
        outputs = self.pipe(images_of, origins) if batch else []
        total, weights = torch.zeros((), dtype=torch.float64, device=self.device), 0.0
        of_images = torch.zeros(
            (len(images), 3, len(self.record.classes)),
            dtype=torch.float64,
            device=self.device,
            requires_grad=True,
        )
        for parts in batch:
            # Taken off the list, so that a micro-batch's logits go as soon as its loss is taken.
            stacked = outputs.pop(0).to(self.dtype)
            for place, part in enumerate(parts):
                logits = owned(stacked[place : place + 1], part.work.tile, self.offset_px)
                target = part.labels.to(self.device)
                weights += pixel_weight(target, self.run.ignore_index, self.weights)
                total = total + self._pixel_loss(logits, target)
                if "dice" in self.run.loss_terms:
                    sums = dice_sums(logits, target, self.run.ignore_index)
                    row = torch.tensor([images.index(part.work.sample.number)]).to(self.device)
                    of_images = of_images.index_add(0, row, sums[None])
        if "dice" in self.run.loss_terms:
            total = total + self._dice(of_images, weights)
        (total * self.scale.value).backward()  # type: ignore[no-untyped-call]
        return float(total.detach()), weights

    def _pixel_loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """The part of a tile's loss that is a sum over pixels."""
        ignored = self.run.ignore_index
        if "ce" in self.run.loss_terms:
            return cross_entropy(logits, target, ignored, self.weights)
        if "focal" in self.run.loss_terms:
            return focal(logits, target, ignored, self.run.focal_gamma, self.weights)
        return torch.zeros((), dtype=torch.float64, device=self.device)

    def _dice(self, sums: Tensor, weight: float) -> Tensor:
        """This rank's share of the mean Dice loss of the step's images, times the step's weight.

        Times the weight, since the step divides by it: a loss of pixels can be added.
        """
        step = np.array([weight, len(sums) / self.image_comm.size])
        self.comm.Allreduce(np.copy(step), step)
        losses = dice(global_sum(sums, self.image_comm)).sum()
        share: Tensor = losses * (step[0] / step[1] / self.image_comm.size)
        return share

    def _update(self, weight: float, step: int) -> None:
        """Divide the gradient once, clip, and step; throw it away where float16 overflowed."""
        self.gradients.divide(weight * self.scale.value)
        if self.scale.most > 1:
            if not self.gradients.finite:
                try:
                    self.scale.overflowed()
                except TilenetError as error:
                    raise AgreedError(str(error)) from error
                return
            self.scale.went_well()
        if self.run.optimizer.clip_norm is not None:
            self.gradients.clip(self.run.optimizer.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rates.at(step)
        self.optimizer.step()

    def close(self) -> None:
        """Give threads and communicators back. Collective."""
        self.gradients.close()
