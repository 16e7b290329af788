"""Score a network while it trains: the map that `tilenet predict` would make, against labels.

It is that very map, made by the same ranks in the same way, whose pixels are counted instead of
written; so `tilenet evaluate` of the map finds the same scores. The network in training lends its
tensors and nothing else: no module of it is switched over, and no random number is drawn.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import fsum, nan
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tilenet.data.labels.source import ValidationImage
from tilenet.data.survey import survey
from tilenet.errors import AgreedError
from tilenet.geometry.tiles import halo_rule
from tilenet.mapping.choose import decide_map
from tilenet.mapping.count import CountingSink
from tilenet.mapping.job import MapJob
from tilenet.mapping.mapper import Mapper
from tilenet.model.choices import parameter_dtype
from tilenet.model.network import Network, network_to_score
from tilenet.parallel.health.signals import StopRequests
from tilenet.parallel.health.watchdog import SLOW, Watchdog
from tilenet.parallel.ranks.comm import agreed
from tilenet.planning.maps import MapPlan
from tilenet.scores import scores
from tilenet.storage.network_json import NetworkRecord

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Validated", "Validation"]


@dataclass(frozen=True)
class Validated:
    """What a validation found; the same on all ranks.

    Attributes:
        loss: Cross-entropy Σ w·ℓ / Σ w over the pixels that count, w the class weights of training.
        matrix: Their number by label and class in the map, pixels without data in a last column.
        seconds: On this rank.
    """

    loss: float
    matrix: NDArray[np.int64]
    seconds: float

    @cached_property
    def scores(self) -> dict[str, Any]:
        """Those of `tilenet evaluate`."""
        return scores(self.matrix)

    def score(self, name: str) -> float:
        """The one that the run file names."""
        return self.loss if name == "loss" else float(self.scores[name])


class Validation:
    """Validations of a run. Collective to make and to run.

    Args:
        record: The network, with the statistics of the training images.
        images: What is held out.
        class_weights: Weights of the classes in training; None: 1 for all.
        batch_size: Tiles that are computed at once.
        balance: Layers per partition, as in training, so that no parameter moves.
        devices: One per partition.
        watchdog: Armed for each block of images that are looked at, and each round of tiles.
        requests: Requests to stop while images are looked at.

    Raises:
        AgreedError: An image cannot be mapped, or labels do not fit the classes.
        StopAgreed: A rank was asked to stop.
    """

    def __init__(
        self,
        record: NetworkRecord,
        images: Sequence[ValidationImage],
        class_weights: Sequence[float] | None,
        batch_size: int,
        balance: tuple[int, ...],
        devices: tuple[torch.device, ...],
        watchdog: Watchdog,
        comm: "MPI.Intracomm",
        requests: StopRequests | None = None,
    ) -> None:
        self.record, self.images = record, images
        self.class_weights, self.batch_size = class_weights, batch_size
        self.balance, self.devices = balance, devices
        self.watchdog, self.comm = watchdog, comm
        self.dtype = parameter_dtype(record.precision)
        context = record.context()
        if whole := [one for one in images if one.windows is None]:
            # What is wrong with them is found before the first step, not after an epoch.
            files = [one.image for one in whole], [one.labels for one in whole]
            number = len(record.classes)
            survey(*files, number, None, comm, watchdog=watchdog, requests=requests)
        rule = halo_rule("exact", context, record.layers, record.epsilon_px)
        self.plans = [
            decide_map(
                record,
                one.image.size,
                rule,
                devices[0],
                self.dtype,
                comm,
                at_once=batch_size,
                # Of blocks that are held out, tiles compute no more than is scored.
                sweeps=len(devices) == 1 and one.windows is None,
            )
            for one in images
        ]

    def score(self, network: Network) -> Validated:
        """Score a network of the run's layers, in whatever way they reach over ranks.

        Raises:
            AgreedError: A file cannot be read any more, or no pixel counts.
        """
        self.watchdog.arm("the validation", SLOW)
        began = time.perf_counter()
        layers, count = self.record.layers, len(self.record.classes)
        plain = network_to_score(layers, network)
        given = (1.0,) * count if self.class_weights is None else self.class_weights
        weights = torch.tensor(given, dtype=self.dtype, device=self.devices[-1])
        sinks = []
        for one, plan in zip(self.images, self.plans, strict=True):
            if plan.method == "tiles":
                continue
            job, sink = self._job(one, plan, plain, weights)
            fixed = job.fix_statistics(self.comm)
            with agreed(self.comm):  # ranks count by themselves, from the first piece on
                job.map(fixed, self.comm, sink)
                self._wait_for_others()
            sinks.append(sink)
        first_rank = 0
        with agreed(self.comm):  # nothing is sent, so that ranks share many small images too
            for one, plan in zip(self.images, self.plans, strict=True):
                if plan.method == "tiles":
                    job, sink = self._job(one, plan, plain, weights, first_rank)
                    job.map(plain, self.comm, sink)
                    sinks.append(sink)
                    first_rank = (first_rank + len(job.wanted(self.comm, sink))) % self.comm.size
            self._wait_for_others()
        matrix = sum((sink.matrix for sink in sinks), np.zeros((count, count + 1), np.int64))
        losses = [loss for sink in sinks for loss in sink.losses]
        self.comm.Allreduce(np.copy(matrix), matrix)
        # Exact, and so in any order: the ranks' number does not show.
        loss = fsum(chain(*self.comm.allgather(losses)))
        labelled = matrix[:, :count].sum(axis=1)
        if not labelled.any():
            raise AgreedError(
                "at least one pixel with data must be labelled in what validation holds out "
                f"({self.images[0].image.path} and so on: none is); hold out other images, or more"
            )
        weight = fsum((labelled * weights.double().cpu().numpy()).tolist())
        seconds = time.perf_counter() - began
        return Validated(loss / weight if weight else nan, matrix, seconds)

    def _job(
        self,
        one: ValidationImage,
        plan: MapPlan,
        network: Network,
        weights: Tensor,
        first_rank: int = 0,
    ) -> tuple[MapJob, CountingSink]:
        """The map of an image, and what counts its pixels."""
        mapper = Mapper("classes", self.record, one.image, plan.tiling, self.dtype)
        job = MapJob(
            plan,
            mapper,
            network,
            self.balance,
            self.devices,
            self.record.precision,
            self.watchdog,
            self.batch_size,
            first_rank,
            brief=True,
        )
        return job, CountingSink(mapper, one, weights, self.comm.rank)

    def _wait_for_others(self) -> None:
        """Have the watchdog know that a rank may be ahead of the slowest by all of its tiles."""
        tiles = sum(len(plan.tiling.tiles) for plan in self.plans)
        self.watchdog.arm("the sum of a validation", SLOW + tiles / self.comm.size)
