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

import numpy as np
import torch
from torch import Tensor

from tilenet.geometry.windows import Window
from tilenet.model.loss import Loss, dice
from tilenet.model.upload import upload
from tilenet.mpi import Intracomm
from tilenet.parallel.health.exchange_clock import EXCHANGING
from tilenet.parallel.health.peak_memory import measure_peak_bytes
from tilenet.parallel.sums.all_reduce import sum_with_gradient
from tilenet.parallel.sums.gradients import GradientSum
from tilenet.parallel.sums.running_statistics import RunningStatistics
from tilenet.parallel.swap.statistics import SwapCounts
from tilenet.planning.micro_batches import mini_batch_sizes
from tilenet.training.images.tile_task import ReadTile
from tilenet.training.network import RunNetwork
from tilenet.training.tile_sums import add_in_flow, on_device, tile_sums
from tilenet.training.update import Update, check_loss


@dataclass(frozen=True)
class StepResult:
    """Figures of a step.

    Attributes:
        loss: Mean over the labelled pixels before the update; 0 where no pixel is labelled.
        weight: Sum of the weights of the labelled pixels.
        rate: Learning rate of the update.
        seconds: Duration of the whole step.
        read_seconds: Time that this rank waited for pixels.
        reduce_seconds: Time of waiting for the sum of gradients after the last backward.
        swaps: Swapped tensors and bytes of this rank; zeros if nothing is swapped.
        exchange_seconds: Time that this rank waited for others inside of layers and losses.
        peak_bytes: Most memory that this rank has held so far.
        stop: Whether any rank was asked to stop.
        overflowed: Whether float16 overflowed, so that no weight changed.
    """

    loss: float
    weight: float
    rate: float
    seconds: float
    read_seconds: float
    reduce_seconds: float
    swaps: SwapCounts
    exchange_seconds: float
    peak_bytes: int
    stop: bool
    overflowed: bool = False


class Step:
    """Steps of a run on one rank. Collective to make, to run and to close.

    Args:
        network: The network over this rank's devices; each step resets its swap statistics.
        loss: The loss, summed over the pixels that tiles own.
        update: Update of the weights.
        gradients: The sum of gradients over ranks; `close` closes it.
        folder: Folder of the run; errors name its checkpoint.
        comm: All ranks.
    """

    def __init__(
        self,
        network: RunNetwork,
        loss: Loss,
        update: Update,
        gradients: GradientSum,
        folder: Path,
        comm: Intracomm,
    ) -> None:
        self.pipe, self.loss, self.update = network.pipe, loss, update
        self.gradients = gradients
        plan = network.plan
        self.offset_px, self.micro_batches = plan.rule.offset_px, plan.micro_batches
        self.flows = plan.pipeline == "1f1b"
        self.folder, self.comm, self.image_comm = folder, comm, network.image_comm
        self.statistics = network.swap_statistics
        self.dtype = self.pipe.network.trained[0].dtype
        self.device = self.pipe.devices[-1]
        self.running = RunningStatistics(self.pipe.network, comm)
        self._peak_bytes, self._read_seconds = 0, 0.0

    @torch.enable_grad()  # a callback may have switched it off
    def take(
        self,
        step: int,
        reads: Iterator[list[ReadTile]],
        num_reads: int,
        images: Sequence[int],
        stop: Callable[[], bool],
    ) -> StepResult:
        """Make one step.

        Args:
            step: Its number, from 0.
            reads: This rank's micro-batches, of this step and those after it; empty ones do not
                count.
            num_reads: Number of micro-batches of this step.
            images: Numbers of the images or crops that this rank's replica computes tiles of.
            stop: Whether this rank was asked to stop; asked once, after the last tile.

        Raises:
            AgreedError: The loss or weights are not finite, or float16 cannot hold the gradients.
            TilenetError: On one rank: a file cannot be read.
        """
        began = time.perf_counter()
        EXCHANGING.take()  # of what was computed between steps
        self.gradients.zero()
        self.running.begin()
        self.pipe.network.train()
        self.pipe.network.mask_key.step = step
        sums = np.zeros(3)  # loss, weight, requests to stop
        sums[:2] = self._add_up(reads, num_reads, images)
        self.gradients.finish()
        self.running.finish()
        sums[2] = stop()
        self.comm.Allreduce(np.copy(sums), sums)
        loss, weight, overflowed = float(sums[0]), float(sums[1]), False
        if weight > 0:
            check_loss(loss, self.pipe.network, step, self.folder)
            loss /= weight
            overflowed = self.update.apply(self.gradients, weight, step)
        self._peak_bytes = max(self._peak_bytes, measure_peak_bytes(self.pipe.devices))
        return StepResult(
            loss=loss,
            weight=weight,
            rate=self.update.rates.at(step),
            seconds=time.perf_counter() - began,
            read_seconds=self._read_seconds,
            reduce_seconds=self.gradients.wait_seconds,
            swaps=SwapCounts() if self.statistics is None else self.statistics.take(),
            exchange_seconds=EXCHANGING.take(),
            peak_bytes=self._peak_bytes,
            stop=bool(sums[2]),
            overflowed=overflowed,
        )

    def _add_up(
        self, reads: Iterator[list[ReadTile]], num_reads: int, images: Sequence[int]
    ) -> tuple[float, float]:
        """Add this rank's gradients; return its summed loss and the sum's weight."""
        self._read_seconds, loss, weight = 0.0, 0.0, 0.0
        if self.flows:
            return self._flow(reads, num_reads)
        left, sizes = num_reads, mini_batch_sizes(num_reads, self.micro_batches)
        # A loss of whole images takes all ranks, those without tiles too.
        for size in sizes or (0,) * self.loss.of_images:
            start = time.perf_counter()
            batch = [parts for parts in islice(reads, size) if parts]
            left -= size
            self._read_seconds += time.perf_counter() - start
            if batch and not left:
                self.gradients.arm(self.pipe.passes(len(batch)))
            if batch or self.loss.of_images:
                of_batch = self._forward_backward(batch, images)
                loss, weight = loss + of_batch[0], weight + of_batch[1]
        return loss, weight

    def _flow(self, reads: Iterator[list[ReadTile]], num_reads: int) -> tuple[float, float]:
        """The same, of micro-batches that go back while others go forward."""
        added = torch.zeros(2, dtype=torch.float64, device=self.device)
        if num_reads:
            # Those without pixels that count are left out, and `finish` does not wait for them.
            self.gradients.arm(num_reads)

        def batch() -> Iterator[list[ReadTile]]:
            for _ in range(num_reads):
                start = time.perf_counter()
                parts = next(reads)
                self._read_seconds += time.perf_counter() - start
                if parts:
                    yield parts

        def add(sums: Tensor) -> Tensor:
            added.add_(sums[:2].detach())
            return sums[0] * self.update.scale.value

        add_in_flow(self.pipe, batch(), self.micro_batches, self.offset_px, self._of_window, add)
        loss, weight = added.tolist()
        return loss, weight

    def _forward_backward(
        self, batch: list[list[ReadTile]], images: Sequence[int]
    ) -> tuple[float, float]:
        """Add the gradient of a mini-batch's summed loss; return the sum and its weight.

        The host reads the numbers at the end, since it waits for the device; for Dice earlier too.
        """
        # Labels are copied first, before the device is busy and they would have to wait.
        batch = [[on_device(part, self.device) for part in parts] for parts in batch]
        added = torch.zeros(2, dtype=torch.float64, device=self.device)
        of_images = torch.zeros(
            (len(images), 3, self.loss.num_classes),
            dtype=torch.float64,
            device=self.device,
            requires_grad=True,
        )
        for part, sums in tile_sums(self.pipe, batch, self.offset_px, self._of_window):
            added = added + sums[:2]
            if self.loss.of_images:
                row = torch.tensor([images.index(part.work.sample.number)])
                row = upload(row, self.device)
                of_images = of_images.index_add(0, row, sums[2:].view(1, *of_images.shape[1:]))
        total, weight = added.unbind()
        if self.loss.of_images:
            added_dice, divisor = self._dice(of_images, float(weight.detach()))
            total, weight = total + added_dice, torch.full_like(weight, divisor)
        (total * self.update.scale.value).backward()  # type: ignore[no-untyped-call]
        loss, weights = torch.stack([total, weight]).tolist()
        return loss, weights

    def _of_window(self, part: ReadTile, logits: Tensor, window: Window) -> Tensor:
        """The sums that the logits of a window, which the tile owns, add to the step."""
        return self.loss.sums(logits.to(self.dtype), part.labels_of(window))

    def _dice(self, sums: Tensor, weight: float) -> tuple[Tensor, float]:
        """This rank's share of the mean Dice loss of the step's images, times the step's weight.

        Times the weight, since the step divides by it: a loss of pixels can be added.

        Args:
            sums: Sums of this rank's pixels, (images, 3, K).
            weight: Sum of their weights.

        Returns:
            The share, and this rank's part of the weight: the number of its labelled pixels where
            all classes that are labelled have the weight 0, which Dice does not know of.
        """
        labelled = float(sums.detach()[:, 2].sum())
        step = np.array([weight, labelled, len(sums) / self.image_comm.size])
        self.comm.Allreduce(np.copy(step), step)
        if step[0] == 0:
            weight, step[0] = labelled, step[1]
        losses = dice(sum_with_gradient(sums, self.image_comm)).sum()
        share: Tensor = losses * (step[0] / step[2] / self.image_comm.size)
        return share, weight

    def close(self) -> None:
        """Free threads and communicators. Collective."""
        self.gradients.close()
