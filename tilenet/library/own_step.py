"""One step of a user-written loop: tiles to compute, sums, one division, one update."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilenet.errors import AgreedError, TilenetError
from tilenet.geometry.tiles import own_index
from tilenet.geometry.windows import Window
from tilenet.library.local_network import LocalNetwork
from tilenet.library.own_data import OwnData
from tilenet.model.origin import Origin
from tilenet.model.summed import check_summed
from tilenet.model.upload import upload
from tilenet.mpi import Intracomm
from tilenet.parallel.health.watchdog import SLOW
from tilenet.parallel.ranks.meeting import Meeting
from tilenet.parallel.ranks.tf32 import tf32_if_asked
from tilenet.parallel.sums.gradients import GradientSum
from tilenet.parallel.sums.running_statistics import RunningStatistics
from tilenet.training.images.tile_task import ReadTile
from tilenet.training.tile_sums import tile_sums

# From logits (1, classes, h, w) and labels (1, h, w) to Σ w·ℓ and Σ w over them.
Sums = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | float]]


@dataclass(frozen=True)
class OwnTile:
    """A tile of a step.

    Attributes:
        image: Standardised pixels of the window that the tile reads, (1, bands, H, W).
        labels: Labels of the pixels that the tile owns, (1, h, w), int64; `ignore_index` (255) does
            not count.
        own: Index of these pixels in the network's output: `local(tile.image)[tile.own]`.
    """

    image: Tensor
    labels: Tensor
    own: tuple[Any, slice, slice]

    @classmethod
    def of(cls, part: ReadTile, offset_px: int, device: torch.device) -> "OwnTile":
        """Make it from a tile that was read."""
        labels = _wide(upload(part.labels, device))
        return cls(upload(part.image, device), labels, own_index(part.work.tile, offset_px))


@dataclass(frozen=True)
class StepMeans:
    """Objects that all steps of a loop share.

    Attributes:
        own: Data of the loop; its watchdog rests when a step is applied.
        gradients: The sum of the network's gradients over all ranks.
        running: The network's running statistics.
        meeting: Checks that all ranks are at the same call.
        count: Called with the number of steps made, when one is applied.
    """

    local: LocalNetwork
    own: OwnData
    gradients: GradientSum
    running: RunningStatistics
    comm: Intracomm
    meeting: Meeting
    count: Callable[[int], None]

    def begin(self, number: int, *, slow: bool) -> None:
        """Prepare a step; `slow`: the watchdog waits longer."""
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
        number: Number of the step, from 0.
        tiles: Micro-batches of this rank; one without a labelled pixel is empty.
        count: Number of them in this step.
        means: Objects that all steps share.
    """

    def __init__(
        self, number: int, tiles: Iterator[list[ReadTile]], count: int, means: StepMeans
    ) -> None:
        self.number, self._tiles, self._count, self._means = number, tiles, count, means
        self._sums = np.zeros(2)  # loss, weight
        self._begun = self._unadded = self._last = self._over = self._applied = False

    def __iter__(self) -> Iterator[OwnTile]:
        """This rank's tiles; those without a label are left out unless other tiles need them.

        Raises:
            TilenetError: Tiles cannot be handed out one by one, or were handed out before.
        """
        own = self._means.own
        if own.at_once:
            raise TilenetError(
                "tiles that the network takes together, or strip by strip, are measured where they "
                f"are computed ({own.at_once}); call step.measure in place of a loop over them"
            )
        offset_px, device = own.plan.rule.offset_px, own.network.pipe.devices[-1]
        for (part,) in self._places():
            work, self._unadded = part.work, True
            self._means.local.set_tile(Origin((work.sample.number,), work.tiling, (work.number,)))
            yield OwnTile.of(part, offset_px, device)
            self._check_added()
        self._means.local.set_tile(None)

    def _places(self) -> Iterator[list[ReadTile]]:
        """The micro-batches of the step that are not empty."""
        if self._begun:
            raise TilenetError(
                f"the tiles of a step are computed once (step {self.number + 1}: iterated again); "
                "keep what you need of them"
            )
        self._begun = True
        if self._means.own.plan.halo_mode != "overlap":  # ranks wait for each other's halos
            self._means.meeting.at(f"the tiles of step {self.number + 1}")
        for place in range(self._count):
            parts = next(self._tiles)
            self._last = place + 1 == self._count
            if parts:
                yield parts
        self._over = True

    def measure(self, sums: Sums) -> None:
        """Compute and add all tiles of this rank: forward, `sums`, backward. Collective.

            step.measure(lambda y, t: (cross_entropy(y, t, reduction="sum"), t.numel()))

        Args:
            sums: Function of logits (1, classes, h, w) of pixels that a tile owns, and their labels
                (1, h, w), that returns Σ w·ℓ and Σ w over them, as `add` takes them. It is called
                for each tile; with `halo_mode="sweep"` for each strip, and once more in backward,
                where only the network's weights get gradients.

        Raises:
            TilenetError: See `add`; or tiles were handed out before.
        """
        means, own = self._means, self._means.own
        pipe, offset_px = own.network.pipe, own.plan.rule.offset_px

        def of_window(part: ReadTile, logits: Tensor, window: Window) -> Tensor:
            result = sums(logits, _wide(part.labels_of(window)))
            loss, weight = result if isinstance(result, tuple) else (result, None)
            if torch.is_grad_enabled():  # a sweep measures without, and once more with gradients
                check_summed(loss)
            value = loss.new_tensor(_checked(weight), dtype=torch.float64)
            return torch.stack([loss.double().sum(), value])

        for parts in self._places():
            device = pipe.devices[-1]
            uploaded = [replace(part, labels=upload(part.labels, device)) for part in parts]
            self._check_gradients()
            means.gradients.keep()
            if self._last:
                means.gradients.arm()
            with tf32_if_asked(means.local.adopted.precision):
                tiles = [sums_ for _, sums_ in tile_sums(pipe, [uploaded], offset_px, of_window)]
                total = torch.stack(tiles).sum(0)
                total[0].backward()  # type: ignore[no-untyped-call]
            means.gradients.mark()
            self._sums += total.tolist()

    def add(self, loss_sum: Tensor, weight: Tensor | float | None = None) -> None:
        """Add the current tile: backward of its loss. Collective where tiles exchange halos.

        Args:
            loss_sum: Σ w·ℓ over the labelled pixels that the tile owns, a scalar with a graph;
                float64 keeps digits that float32 loses over 10⁸ pixels.
            weight: Σ w; the step divides by the sum over all tiles and ranks.

        Raises:
            TilenetError: The loss is a mean, the weight is missing, the tile was added before, or
                gradients were changed since the tile before.
        """
        if not self._unadded:
            raise TilenetError(
                f"each tile of a step counts once (step {self.number + 1}: added twice, or before "
                "the first); call step.add once for each tile"
            )
        value = _checked(weight)
        check_summed(loss_sum)
        self._check_gradients()
        self._unadded = False
        self._means.gradients.keep()
        if self._last:
            self._means.gradients.arm()
        with tf32_if_asked(self._means.local.adopted.precision):
            loss_sum.reshape(()).backward()  # type: ignore[no-untyped-call]
        self._means.gradients.mark()
        self._sums += float(loss_sum.detach()), value

    def apply(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        clip_norm: float | None = None,
    ) -> float:
        """Sum gradients over all ranks, divide once, update. Collective.

        Args:
            optimizer: An optimizer of `local.parameters()`.
            clip_norm: Largest norm of the gradient; a longer one is scaled down to it.

        Returns:
            The mean loss Σ w·ℓ / Σ w over all ranks; 0, without an update, if no pixel counts.

        Raises:
            AgreedError: On all ranks: a rank has not added all of its tiles, or is at another step,
                takes another optimizer, learning rate or `clip_norm`, or the loss or a gradient is
                not finite.
            TilenetError: The optimizer holds other weights than those that the loop began with,
                gradients were changed after the last tile, or `clip_norm` is no length.
        """
        self._check_done()
        self._check_gradients()
        self._check_optimizer(optimizer)
        if clip_norm is not None and not 0 < clip_norm < np.inf:
            raise TilenetError(f"clip_norm is a length above 0 (clip_norm: {clip_norm})")
        update = self._describe_update(optimizer, clip_norm)
        self._means.meeting.at(f"step {self.number + 1}", update)
        self._applied = True
        self._means.gradients.finish()
        self._means.running.finish()
        sums = np.empty(2)
        self._means.comm.Allreduce(self._sums, sums)
        self._means.own.watchdog.rest()  # user code between steps may take any time
        loss, weight = map(float, sums)
        if not weight > 0:
            self._means.count(self.number + 1)
            return 0.0
        if not np.isfinite(loss):
            raise AgreedError(
                f"the loss must stay finite (step {self.number + 1}: {loss}); lower the learning "
                "rate, or look for extreme pixel values"
            )
        self._means.gradients.divide(weight)
        if not self._means.gradients.finite:
            raise AgreedError(
                f"gradients must stay finite, as the loss is (step {self.number + 1}); look for "
                "divisions by 0 and logarithms of 0 in the network, also around tiles, where "
                "halo_mode exchange computes nothing, or lower the learning rate"
            )
        self._means.gradients.keep()
        if clip_norm is not None:
            self._means.gradients.clip(clip_norm)
        optimizer.step()
        self._means.count(self.number + 1)
        return loss / weight

    def _check_gradients(self) -> None:
        if self._means.gradients.changed:
            raise TilenetError(
                "gradients of a step are sums over its tiles until it is applied (step "
                f"{self.number + 1}: they were changed, as by zero_grad or clip_grad_norm_); set "
                "them to zero before the first tile, and give step.apply clip_norm"
            )

    def _describe_update(self, optimizer: torch.optim.Optimizer, clip_norm: float | None) -> str:
        """Say what must be the same on all ranks: an update of the same weights with same options.

        Options that are other objects are left out, since they are written with their address.
        """
        network, kinds = self._means.local.network, Tensor | int | float | str | tuple
        trained = [name for name, weight in network.named_parameters() if weight.requires_grad]
        sizes = [[weight.numel() for weight in group["params"]] for group in optimizer.param_groups]
        options = [
            {
                key: float(value) if isinstance(value, Tensor) else value
                for key, value in group.items()
                if isinstance(value, kinds)
            }
            for group in optimizer.param_groups
        ]
        text = repr((trained, sizes, options))
        digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
        return (
            f"an update of {len(trained)} weights, {type(optimizer).__name__}, lr "
            f"{', '.join(str(group.get('lr')) for group in options)}, clip_norm {clip_norm}, all "
            f"options {digest}"
        )

    def _check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(
            optimizer, torch.optim.LBFGS
        ):
            raise TilenetError(
                "step.apply takes an optimizer whose step() needs no closure "
                f"({type(optimizer).__name__} is none); call a scheduler's step after it"
            )
        own = [weight for group in optimizer.param_groups for weight in group["params"]]
        if self._means.gradients.lacks([*own, *self._means.local.network.trained]):
            raise TilenetError(
                "a loop trains the weights of local.parameters() that required a gradient at its "
                f"first step (step {self.number + 1}: the optimizer or the network holds others); "
                "thaw weights before the first step, or begin with another Job"
            )

    def check_applied(self) -> None:
        """Refuse a step that ended without an update.

        Raises:
            TilenetError: `apply` was not called.
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
        if not self._over and not self._unadded:
            raise TilenetError(
                f"all tiles of a step are added before it is applied (step {self.number + 1}: some "
                "are left); iterate to the end"
            )
        self._check_added()

    def _check_added(self) -> None:
        if self._unadded:
            raise TilenetError(
                f"a tile that is handed out is added (step {self.number + 1}: one was not); call "
                "step.add, with weight 0 where it does not count"
            )


def _wide(labels: Tensor) -> Tensor:
    """Labels in a dtype that torch's losses take."""
    return labels if labels.is_floating_point() else labels.long()


def _checked(weight: Tensor | float | None) -> float:
    """The weight as a number.

    Raises:
        TilenetError: It is missing, negative or not finite.
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
