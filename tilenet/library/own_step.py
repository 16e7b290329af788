"""One step of a loop of one's own: tiles to compute, sums, one division, one update."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tilenet.errors import AgreedError, TilenetError
from tilenet.geometry.tiles import Tile, owned
from tilenet.geometry.windows import Window
from tilenet.library.local_network import LocalNetwork
from tilenet.library.own_data import OwnData
from tilenet.model.skips import Origin
from tilenet.model.summed import check_summed
from tilenet.model.upload import upload
from tilenet.parallel.health.watchdog import SLOW
from tilenet.parallel.ranks.meeting import Meeting
from tilenet.parallel.ranks.tf32 import tf32_if_asked
from tilenet.parallel.sums.gradients import GradientSum
from tilenet.parallel.sums.values import RunningStatistics
from tilenet.training.images.work import ReadTile
from tilenet.training.tile_sums import tile_sums

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["OwnStep", "OwnTile", "StepMeans", "Sums"]

# Σ w·ℓ and Σ w of logits (1, classes, h, w) and their labels (1, h, w).
Sums = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | float]]


@dataclass(frozen=True)
class OwnTile:
    """A tile of a step.

    Attributes:
        image: Standardised pixels of what it reads, (1, bands, H, W).
        labels: Of the pixels that it owns, (1, h, w), int64; `ignore_index` (255) does not count.
        own: Index of these in the network's output: `local(tile.image)[tile.own]`.
    """

    image: Tensor
    labels: Tensor
    own: tuple[Any, slice, slice]

    @classmethod
    def of(cls, part: ReadTile, offset_px: int, device: torch.device) -> "OwnTile":
        """The tile that was read."""
        tile: Tile = part.work.tile
        top = tile.own.row - tile.read.row - offset_px
        left = tile.own.col - tile.read.col - offset_px
        own = ..., slice(top, top + tile.own.height), slice(left, left + tile.own.width)
        labels = _wide(upload(part.labels, device))
        return cls(upload(part.image, device), labels, own)


@dataclass(frozen=True)
class StepMeans:
    """What all steps of a loop work with.

    Attributes:
        local: The network.
        own: What the loop opened; its watchdog rests when a step is applied.
        gradients: Sums its gradients.
        running: Its running statistics.
        comm: All ranks.
        meeting: Where they meet.
    """

    local: LocalNetwork
    own: OwnData
    gradients: GradientSum
    running: RunningStatistics
    comm: "MPI.Intracomm"
    meeting: Meeting

    def begin(self, number: int, *, slow: bool) -> None:
        """Make ready for a step; the first takes longer."""
        self.own.watchdog.arm(f"step {number + 1}", SLOW if slow else 1.0)
        self.gradients.zero()
        self.running.begin()


class OwnStep:
    """A step: iterate over its tiles, `add` each one's sums, `apply` once.

        for tile in step:
            logits = local(tile.image)[tile.own]
            step.add(cross_entropy(logits, tile.labels, reduction="sum", ignore_index=255), weight)
        loss = step.apply(optimizer)

    Or `measure` all of them, in place of the loop over tiles.

    Args:
        number: Its number, from 0.
        tiles: What was read of each of `count` places: a tile, or nothing where it has no label.
        count: How many of them.
        means: What it works with.
    """

    def __init__(
        self, number: int, tiles: Iterator[list[ReadTile]], count: int, means: StepMeans
    ) -> None:
        self.number, self._tiles, self._count, self._means = number, tiles, count, means
        self._sums = np.zeros(2)  # loss, weight
        self._begun = self._waits = self._last = self._over = self._applied = False

    def __iter__(self) -> Iterator[OwnTile]:
        """This rank's tiles; those without a label are left out where nothing needs them.

        Raises:
            TilenetError: They are not handed out one by one, or were before.
        """
        own = self._means.own
        if own.at_once:
            raise TilenetError(
                "tiles that the network takes together, or strip by strip, are measured where they "
                f"are computed ({own.at_once}); call step.measure in place of a loop over them"
            )
        offset_px, device = own.plan.rule.offset_px, own.network.pipe.devices[-1]
        for (part,) in self._places():
            work, self._waits = part.work, True
            self._means.local.at(Origin((work.sample.number,), work.tiling, (work.number,)))
            yield OwnTile.of(part, offset_px, device)
            self._check_added()
        self._means.local.at(None)

    def _places(self) -> Iterator[list[ReadTile]]:
        """What was read of each place, but for those where nothing counts."""
        if self._begun:
            raise TilenetError(
                f"the tiles of a step are computed once (step {self.number + 1}: iterated again); "
                "keep what you need of them"
            )
        self._begun = True
        for place in range(self._count):
            parts = next(self._tiles)
            self._last = place + 1 == self._count
            if parts:
                yield parts
        self._over = True

    def measure(self, sums: Sums) -> None:
        """Add all tiles of this rank: forward, what is measured, backward. Collective.

            step.measure(lambda y, t: (cross_entropy(y, t, reduction="sum"), t.numel()))

        Args:
            sums: Takes logits (1, classes, h, w) of pixels that a tile owns, and their labels
                (1, h, w), and returns Σ w·ℓ and Σ w over them, as `add` takes them. It is called
                for each tile; with `halo_mode="sweep"` for each strip, in backward once more, and
                only what the network computes gets gradients.

        Raises:
            TilenetError: As `add`, or tiles were handed out before.
        """
        means, own = self._means, self._means.own
        pipe, offset_px = own.network.pipe, own.plan.rule.offset_px

        def of_window(part: ReadTile, logits: Tensor, window: Window) -> Tensor:
            labels = owned(part.labels, Tile(part.work.tile.own, window))
            found = sums(logits, _wide(labels))
            loss, weight = found if isinstance(found, tuple) else (found, None)
            if torch.is_grad_enabled():  # a sweep measures without, and once more with gradients
                check_summed(loss)
            value = loss.new_tensor(_checked(weight), dtype=torch.float64)
            return torch.stack([loss.double().sum(), value])

        for parts in self._places():
            there = [replace(one, labels=upload(one.labels, pipe.devices[-1])) for one in parts]
            if self._last:
                means.gradients.arm()
            with tf32_if_asked(means.local.adopted.precision):
                tiles = [found for _, found in tile_sums(pipe, [there], offset_px, of_window)]
                total = torch.stack(tiles).sum(0)
                total[0].backward()  # type: ignore[no-untyped-call]
            self._sums += total.tolist()

    def add(self, loss_sum: Tensor, weight: Tensor | float | None = None) -> None:
        """Add the tile under way: backward of its loss. Collective where tiles exchange halos.

        Args:
            loss_sum: Σ w·ℓ over the labelled pixels that the tile owns, a number with a graph;
                float64 keeps digits that float32 loses over 10⁸ pixels.
            weight: Σ w; the step divides by the sum over all tiles and ranks.

        Raises:
            TilenetError: The loss is a mean, the weight is missing, or the tile was added before.
        """
        if not self._waits:
            raise TilenetError(
                f"each tile of a step counts once (step {self.number + 1}: added twice, or before "
                "the first); call step.add once for each tile"
            )
        value = _checked(weight)
        check_summed(loss_sum)
        self._waits = False
        if self._last:
            self._means.gradients.arm()
        with tf32_if_asked(self._means.local.adopted.precision):
            loss_sum.reshape(()).backward()  # type: ignore[no-untyped-call]
        self._sums += float(loss_sum.detach()), value

    def apply(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        clip_norm: float | None = None,
    ) -> float:
        """Sum gradients over all ranks, divide once, update. Collective.

        Args:
            optimizer: Of `local.parameters()`.
            clip_norm: Largest norm of the gradient; a longer one is scaled down to it.

        Returns:
            The mean loss Σ w·ℓ / Σ w over all ranks; 0, without an update, where no pixel counts.

        Raises:
            AgreedError: On all ranks: a rank has not added all of its tiles, or is at another step,
                or the loss is not finite.
        """
        self._check_done()
        self._means.meeting.at(f"step {self.number + 1}")
        self._applied = True
        self._means.gradients.finish()
        self._means.running.finish()
        sums = np.empty(2)
        self._means.comm.Allreduce(self._sums, sums)
        self._means.own.watchdog.rest()  # what comes behind a step is somebody else's
        loss, weight = map(float, sums)
        if not weight > 0:
            return 0.0
        if not np.isfinite(loss):
            raise AgreedError(
                f"the loss must stay finite (step {self.number + 1}: {loss}); lower the learning "
                "rate, or look for extreme pixel values"
            )
        self._means.gradients.divide(weight)
        if clip_norm is not None:
            self._means.gradients.clip(clip_norm)
        optimizer.step()
        return loss / weight

    def check_applied(self) -> None:
        """Refuse a step that ended without an update.

        Raises:
            TilenetError: It did.
        """
        if not self._applied:
            raise TilenetError(
                f"each step is applied once (step {self.number + 1} was not); call step.apply "
                "behind the loop over its tiles"
            )

    def _check_done(self) -> None:
        if self._applied:
            raise TilenetError(
                f"each step is applied once (step {self.number + 1}: applied twice); call "
                "step.apply once"
            )
        if not self._over and not self._waits:
            raise TilenetError(
                f"all tiles of a step are added before it is applied (step {self.number + 1}: some "
                "are left); iterate to the end"
            )
        self._check_added()

    def _check_added(self) -> None:
        if self._waits:
            raise TilenetError(
                f"a tile that is handed out is added (step {self.number + 1}: one was not); call "
                "step.add, with weight 0 where it does not count"
            )


def _wide(labels: Tensor) -> Tensor:
    """Labels as torch's losses take them."""
    return labels if labels.is_floating_point() else labels.long()


def _checked(weight: Tensor | float | None) -> float:
    """A weight by which a step divides.

    Raises:
        TilenetError: It is missing, or no weight.
    """
    if weight is None:
        raise TilenetError(
            "a loss that is a sum has a weight, by which the step divides (weight: None); give "
            "the number of labelled pixels, or the sum of their weights"
        )
    value = float(weight)
    if not (np.isfinite(value) and value >= 0):
        raise TilenetError(
            f"a weight is a finite number from 0 on (weight: {value}); give the number of "
            "labelled pixels"
        )
    return value
