"""Score a network while it trains: the map that `tilenet predict` would make, against labels.

It is that very map, made by the same ranks in the same way, but its pixels are counted instead of
written; so `tilenet evaluate` of the map finds the same scores. The network in training lends its
tensors and nothing else: no module of it is switched over, and no random number is drawn.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import fsum, nan
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilenet.data.labels.source import ValidationImage
from tilenet.data.survey import survey
from tilenet.errors import AgreedError
from tilenet.geometry.halo_rule import halo_rule
from tilenet.mapping.choose import decide_map
from tilenet.mapping.job import MapJob, Placement
from tilenet.mapping.mapper import Mapper
from tilenet.mapping.scoring_sinks import CountingSink, NumbersSink, ScoringSink
from tilenet.model.dtypes import parameter_dtype
from tilenet.model.loss import Loss
from tilenet.model.network import Network, network_to_score
from tilenet.parallel.health.watchdog import SLOW
from tilenet.parallel.ranks.comm import agreed
from tilenet.parallel.ranks.together import RankControl
from tilenet.planning.maps.question import MapPlan, MapQuestion
from tilenet.scores import number_scores, scores
from tilenet.training.network import RunNetwork


@dataclass(frozen=True)
class Validated:
    """Scores of a validation; the same on all ranks, but for `seconds`.

    Attributes:
        loss: Cross-entropy Σ w·ℓ / Σ w over the pixels that count, w the class weights of training;
            of a regression the run's loss.
        scores: The scores of `tilenet evaluate`, by name.
        seconds: Duration on this rank.
    """

    loss: float
    scores: dict[str, Any]
    seconds: float

    def score(self, name: str) -> float:
        """The score with that name, or the loss; NaN: it is not defined."""
        value = self.loss if name == "loss" else self.scores[name]
        return nan if value is None else float(value)


class Validation:
    """Validations of a run. Collective to make and to run.

    Args:
        network: The network in training; its layers stay on their devices, so no parameter moves.
            Memory that training will still need on its first device is left free.
        images: Held-out images and blocks.
        loss: The loss of training.
        batch_size: Number of tiles that are computed at once.
        control: Ranks of the run. The watchdog is armed for each surveyed block and each round of
            tiles; requests to stop are checked during the survey.

    Raises:
        AgreedError: An image cannot be mapped, or labels do not fit the classes.
        StopAgreed: A rank was asked to stop.
    """

    def __init__(
        self,
        network: RunNetwork,
        images: Sequence[ValidationImage],
        loss: Loss,
        batch_size: int,
        control: RankControl,
    ) -> None:
        self.record, self.images = network.plan.record, images
        self.loss, self.batch_size = loss, batch_size
        self.balance, self.devices = network.plan.balance, network.devices.partitions
        self.watchdog, self.comm = control.watchdog, control.comm
        record, devices, comm = self.record, self.devices, self.comm
        self.dtype = parameter_dtype(record.precision)
        if whole := [part for part in images if part.windows is None]:
            # Errors in them are found before the first step, not after an epoch.
            survey(
                images=[part.image for part in whole],
                labels=[part.labels for part in whole],
                num_classes=len(record.classes),
                cell_px=None,
                control=control,
            )
        rule = halo_rule("exact", record.layers, record.epsilon_px)
        self.plans = [
            decide_map(
                MapQuestion(
                    record.layers,
                    part.image.size,
                    rule,
                    item_bytes=self.dtype.itemsize,
                    at_once=batch_size,
                ),
                record.opaque,
                devices[0],
                comm,
                # Of blocks that are held out, tiles compute no more than is scored.
                sweeps=len(devices) == 1 and part.windows is None,
                later_bytes=network.later_bytes,
            )
            for part in images
        ]

    def score(self, network: Network) -> Validated:
        """Score a network of the run's layers, whether or not they exchange halos.

        Raises:
            AgreedError: A file cannot be read any more, or no pixel counts.
        """
        self.watchdog.arm("the validation", SLOW)
        began = time.perf_counter()
        plain = network_to_score(self.record.layers, network)
        class_weights = self.loss.class_weights or (1.0,) * self.loss.num_classes
        weights = torch.tensor(class_weights, dtype=self.dtype, device=self.devices[-1])
        sinks: list[ScoringSink] = []
        for image, plan in zip(self.images, self.plans, strict=True):
            if plan.method in ("tiles", "windows"):
                continue
            job, sink = self._job(image, plan, plain, weights)
            fixed = job.fix_statistics(self.comm)
            with agreed(self.comm):  # ranks count by themselves, from the first piece on
                job.map(fixed, self.comm, sink)
                self._wait_for_others()
            sinks.append(sink)
        first_rank = 0
        with agreed(self.comm):  # nothing is sent, so that ranks share many small images too
            for image, plan in zip(self.images, self.plans, strict=True):
                if plan.method in ("tiles", "windows"):
                    job, sink = self._job(image, plan, plain, weights)
                    job.map((plain,), self.comm, sink, first_rank=first_rank)
                    sinks.append(sink)
                    first_rank = (
                        first_rank + len(job.list_tiles(self.comm, sink))
                    ) % self.comm.size
            self._wait_for_others()
        losses = list(
            chain(*self.comm.allgather([value for sink in sinks for value in sink.losses]))
        )
        # An exact sum does not depend on the order, and so not on the number of ranks.
        loss = fsum(losses) if np.isfinite(losses).all() else nan
        numbers = [sink for sink in sinks if isinstance(sink, NumbersSink)]
        counts = [sink.matrix for sink in sinks if isinstance(sink, CountingSink)]
        if self.record.task == "regression":
            pieces = chain(
                *self.comm.allgather([value for sink in numbers for value in sink.pieces])
            )
            unmapped: int = self.comm.allreduce(sum(sink.unmapped for sink in numbers))
            values = number_scores(list(pieces), unmapped)
            weight = values["num_pixels"]
            self._check_some(weight)
        else:
            count = self.loss.num_classes
            matrix = sum(counts, np.zeros((count, count + 1), np.int64))
            self.comm.Allreduce(np.copy(matrix), matrix)
            labelled = matrix[:, :count].sum(axis=1)
            self._check_some(labelled.sum())
            weight = fsum((labelled * weights.double().cpu().numpy()).tolist())
            values = scores(matrix)
        seconds = time.perf_counter() - began
        return Validated(loss / weight if weight else nan, values, seconds)

    def _check_some(self, labelled: int) -> None:
        if not labelled:
            raise AgreedError(
                "at least one pixel with data must be labelled in what validation holds out "
                f"({self.images[0].image.path} and so on: none is); hold out other images, or more"
            )

    def _job(
        self, image: ValidationImage, plan: MapPlan, network: Network, weights: Tensor
    ) -> tuple[MapJob, ScoringSink]:
        """The map of an image, and the sink that scores its pixels."""
        numbers = self.record.task == "regression"
        mapper = Mapper(
            "values" if numbers else "classes", self.record, image.image, plan.tiling, self.dtype
        )
        placement = Placement(self.balance, self.devices, self.record.precision)
        job = MapJob(plan, mapper, network, placement, self.watchdog, self.batch_size)
        if numbers:
            return job, NumbersSink(image, self.loss, self.comm.rank)
        return job, CountingSink(mapper, image, weights, self.comm.rank)

    def _wait_for_others(self) -> None:
        """Arm the watchdog for a rank that is ahead of the slowest by all of its tiles."""
        tiles = sum(len(plan.tiling.tiles) for plan in self.plans)
        self.watchdog.arm("the sum of a validation", SLOW + tiles / self.comm.size)
