"""`tilenet.Job`: user-written loops over tiles and ranks, with the whole image's numbers."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from tilenet.adoption.adopt import Adopted, BatchNormMode, adopt
from tilenet.errors import TilenetError
from tilenet.library import own_checkpoint
from tilenet.library.local_network import LocalNetwork, OwnHaloMode
from tilenet.library.network import first_bands
from tilenet.library.own_data import OwnData, open_data
from tilenet.library.own_step import OwnStep, StepMeans
from tilenet.library.predict import predict_given
from tilenet.mapping.prediction import UnsavedNetwork
from tilenet.parallel.health.progress import say
from tilenet.parallel.pipeline.pipe import Pipe
from tilenet.parallel.ranks.comm import agreed, check_torchrun, world
from tilenet.parallel.ranks.meeting import Meeting
from tilenet.parallel.ranks.together import together
from tilenet.parallel.sums.running_statistics import RunningStatistics
from tilenet.storage.network_json import NetworkRecord
from tilenet.training.setup.share import share_adopted

NO_NETWORK = "a job has a network first (called: {} before split); call job.split(net)"


class Job:
    """A user-written loop over the ranks of the job: one, or those of mpiexec, srun or jsrun.

        job = tilenet.Job()
        local = job.split(net)
        optimizer = torch.optim.AdamW(local.parameters())
        for step in job.steps(images="scene.tif", labels="roads.gpkg", crop_px=512, batch_size=8):
            for tile in step:
                logits = local(tile.image)[tile.own]
                loss = F.cross_entropy(logits, tile.labels, ignore_index=255, reduction="sum")
                step.add(loss, (tile.labels != 255).sum())
            print(step.apply(optimizer))
        job.predict("scene.tif", "map.tif")
        job.save("run", optimizer)

    The loss, its gradient and the map are those of the whole image on one rank. All methods are
    collective: all ranks call them in the same order with the same arguments.

    Attributes:
        rank: This rank's number, from 0.
        size: Number of ranks.
        step: Steps made so far; `load` sets it.
    """

    def __init__(self) -> None:
        self.comm = world()
        check_torchrun(self.comm)
        self.rank, self.size, self.step = self.comm.rank, self.comm.size, 0
        self._local: LocalNetwork | None = None
        self._record: NetworkRecord | None = None
        self._looping = False
        self._meeting = Meeting(self.comm)

    def split(
        self,
        net: nn.Module | Adopted,
        *,
        halo_mode: OwnHaloMode = "overlap",
        bands: int | None = None,
        batch_norm: BatchNormMode = "frozen",
    ) -> LocalNetwork:
        """Build a network over the windows of this rank from rank 0's `net`, which is not changed.

        Args:
            net: Module that maps images (B, bands, H, W) to maps (B, classes, H, W).
            halo_mode: `overlap`: tiles read more than they own; `exchange`: layers take halos from
                the neighbouring ranks; `auto`: whichever computes less of the images; rank 0 prints
                the choice; `sweep`: strip by strip, for `step.measure`.
            bands: Number of bands of the images; None: as many as the first convolution takes.
            batch_norm: See `tilenet.adopt`.

        Raises:
            AgreedError: The network cannot be cut exactly; the error names the submodule.
        """
        if halo_mode not in get_args(OwnHaloMode):
            raise TilenetError(
                f"a loop of one's own takes tiles that overlap, exchanges halos, or sweeps "
                f"(halo_mode: {halo_mode}); use overlap, exchange, sweep or auto, or tilenet.train"
            )
        self._meeting.at("split")
        adopted: Adopted | None = None
        with together(self.comm):  # ranks that wait leave the cores to rank 0
            if self.rank == 0:
                if isinstance(net, Adopted):
                    adopted = net
                else:
                    adopted = adopt(net, bands or first_bands(net), batch_norm)
        self._record, self.step = None, 0
        self._local = LocalNetwork(share_adopted(adopted, self.comm), halo_mode)
        return self._local

    def steps(self, images: Any, labels: Any = None, **keys: Any) -> Iterator[OwnStep]:
        """Yield the remaining steps of a run, one after another.

        Before the first step the ranks compare a small image with the whole network, as in a run,
        unless `prove=False`.

        Args:
            images: Images as in the run file: a raster, a list, a pattern, a CSV.
            labels: Rasters or polygons.
            keys: More keys of the run file: `crop_px`, `batch_size`, `steps` or `epochs` (one
                epoch), `classes`, `augment`, `seed`, `bands`, `vectors`, `tiles`, `mesh` and others
                on data and tiles. With `output`, a folder, the survey of all pixels is kept.

        Yields:
            Steps; each must be applied.

        Raises:
            AgreedError: On all ranks, if any rank refuses an argument or a file, or if the ranks do
                not compute the network's numbers; at the end, if their weights went apart.
        """
        local = self._network_for("steps")
        self._meeting.at("steps")
        if self._looping:
            raise TilenetError(
                "a job has one loop at a time (steps: called while another loop is open); end that "
                "loop, or use a Job for each"
            )
        keys |= {"images": images, "labels": labels}
        keys = {name: value for name, value in keys.items() if value is not None}
        with ExitStack() as stack:
            record = self._record  # loaded weights keep the statistics that they were trained with
            statistics = None if record is None else (record.mean, record.std)
            own = open_data(local, keys, statistics, stack, self.comm)
            self._record = own.plan.record
            if own.choice is not None and self.rank == 0:
                say(str(own.choice))
            pipe = own.network.pipe
            local.use_pipe(pipe if isinstance(pipe, Pipe) else None)
            self._looping = True
            try:
                yield from self._steps(local, own, stack)
            finally:
                self._looping = False
                local.use_pipe(None)
            own.network.close()

    def _steps(self, local: LocalNetwork, own: OwnData, stack: ExitStack) -> Iterator[OwnStep]:
        data, network = own.data, own.network.pipe.network
        gradients, running = local.gradients(self.comm), RunningStatistics(network, self.comm)
        means = StepMeans(local, own, gradients, running, self.comm, self._meeting, self._count)
        first, ahead = self.step, own.run.read_ahead
        reads = stack.enter_context(data.work.reads(data.reader, first, data.last, ahead))
        for number in range(first, data.last):
            means.begin(number, slow=number == first)
            network.train(local.training)
            network.mask_key.step = number
            step = OwnStep(number, reads, len(data.work.micro_batches(number)), means)
            yield step
            step.check_applied()
        self._meeting.at("the end of the loop")
        local.check_values(self.comm)

    def _count(self, steps: int) -> None:
        self.step = steps

    def predict(self, image: Any, out: str | os.PathLike[str] | None = None, **options: Any) -> Any:
        """Map an image with the current weights; arguments and result are those of
        `tilenet.predict`.

        Raises:
            AgreedError: On all ranks; also before the first step, since pixels are standardised by
                the statistics of the images that `steps` surveyed.
        """
        local, record = self._network_for("predict"), self._record_for("predict")
        self._meeting.at("predict")
        network = UnsavedNetwork("the job's network", record, local.copy_for_maps())
        return predict_given(network, image, out, options)

    def save(
        self, folder: str | os.PathLike[str], optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        """Write a checkpoint, which becomes the folder's `last`; `tilenet predict` can map with it.

        Args:
            optimizer: Its states are written too, for `load`.

        Raises:
            AgreedError: The folder cannot be written, or the ranks' weights went apart.
        """
        local, record = self._network_for("save"), self._record_for("save")
        self._meeting.at("save")
        local.check_values(self.comm)
        with agreed(self.comm):
            if self.rank == 0:
                own_checkpoint.save(Path(folder), self.step, local, record, optimizer)

    def load(
        self, folder: str | os.PathLike[str], optimizer: torch.optim.Optimizer | None = None
    ) -> int:
        """Continue from a checkpoint of `save`; `steps` then begins after the steps made.

        Returns:
            Number of steps made.

        Raises:
            AgreedError: There is no such checkpoint, or it belongs to another network.
        """
        local = self._network_for("load")
        self._meeting.at("load")
        with agreed(self.comm):
            self.step, self._record = own_checkpoint.load(
                Path(folder), local, optimizer, check=self.rank == 0
            )
        return self.step

    def _network_for(self, name: str) -> LocalNetwork:
        if self._local is None:
            raise TilenetError(NO_NETWORK.format(name))
        return self._local

    def _record_for(self, name: str) -> NetworkRecord:
        if self._record is None:
            raise TilenetError(
                f"a network's pixels are standardised as its images say (called: {name} before "
                "steps); begin with job.steps, or job.load a checkpoint"
            )
        return self._record
