"""Tiles in, weights out: train a network on images of any size over any number of ranks.

What a run leaves for people: what was asked, where the time went, and a report.
"""

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tilenet.data.labels.open import resampling_note
from tilenet.data.labels.source import ValidationImage
from tilenet.data.read_ahead import ReadAhead
from tilenet.data.same_files import check_same_files
from tilenet.data.schedule import Sample, balanced_weights
from tilenet.data.survey import share_collars
from tilenet.data.survey_record import Survey
from tilenet.errors import AgreedError, TilenetError
from tilenet.model.choices import parameter_dtype
from tilenet.model.loss import LossScale
from tilenet.model.network import Network, build_network
from tilenet.parallel.exchange.network import SpatialNetwork, spatial_network
from tilenet.parallel.health.progress import RankTimes, keep_times, progress_bar, say
from tilenet.parallel.health.signals import StopAgreed, StopRequests
from tilenet.parallel.health.trace import TraceRecorder
from tilenet.parallel.health.watchdog import SLOW, Watchdog
from tilenet.parallel.pipeline.pipe import Pipe
from tilenet.parallel.ranks.comm import agreed, wait_quietly, world
from tilenet.parallel.ranks.devices import choose_devices, node_place, say_layout
from tilenet.parallel.ranks.start import kept_on_ctrl_c
from tilenet.parallel.ranks.together import end_if_asked, together
from tilenet.parallel.sums.transport_choice import exchange_from
from tilenet.parallel.swap.statistics import SwapCounts
from tilenet.planning.compatibility import needs_all_tiles
from tilenet.report.page import try_report
from tilenet.storage.checkpoints import kept_checkpoint, last_step
from tilenet.training.config import RunFile
from tilenet.training.folder import RunFolder
from tilenet.training.images import RunImages, held_out_note, hold_out, open_images, staged_on_node
from tilenet.training.reader import Part, TileReader, Work
from tilenet.training.record import RunLog, keep_run
from tilenet.training.scoring import Validation
from tilenet.training.setup import RunPlan, announce, cell_note, plan_run
from tilenet.training.statistics import run_survey
from tilenet.training.step import Step, StepResult
from tilenet.training.swap import RunSwaps, decide_swaps, say_swaps
from tilenet.training.validation import RunValidation
from tilenet.training.workload import Cells, RankWork, schedule_of

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["RunAccount", "train"]


class RunAccount:
    """Keeps account of a run on one rank.

    Args:
        folder: Of the run.
        run: As it was asked for: with class weights that are to follow from the labels.
        validation: What the network is scored on.
        layout: What ranks there are, in lines.
        comm: All ranks.
    """

    def __init__(
        self,
        folder: Path,
        run: RunFile,
        validation: Sequence[ValidationImage],
        layout: Sequence[str],
        comm: "MPI.Intracomm",
    ) -> None:
        self._folder, self._run, self._layout, self._comm = folder, run, layout, comm
        self._validation = validation
        self._times, self._made = RankTimes(), 0

    @property
    def seconds(self) -> float:
        """Of the steps so far."""
        return self._times.seconds

    def begin(self, plan: RunPlan, pipe: Pipe, sample: Sample) -> None:
        """Have rank 0 keep the run file, and what became of it.

        Raises:
            TilenetError: They cannot be written.
        """
        if self._comm.rank == 0:
            keep_run(self._folder, self._run, plan, pipe, sample, self._validation, self._layout)

    def add(self, done: StepResult) -> None:
        """Count a step."""
        self._made += 1
        self._times += RankTimes(
            done.seconds,
            done.read_seconds,
            done.exchange_seconds,
            done.reduce_seconds,
            done.swaps.wait_seconds,
            done.peak_bytes,
        )

    def end(self, first: int, *, finished: bool) -> None:
        """Write `timings.json` and the report. Collective.

        Args:
            first: Steps that were made before this job.
            finished: Whether nothing of the run is left to do.
        """
        keep_times(self._comm, self._folder, self._times, first + 1, first + self._made)
        if self._comm.rank == 0:
            # A job that was told to end has no time for maps.
            try_report(self._folder, maps=finished)
        # What a run leaves is there when any rank returns; until then rank 0 has the cores.
        wait_quietly(self._comm)


STOPPED = 75  # exit code: a checkpoint is written, run again with --resume to go on


def train(
    run: RunFile,
    *,
    resume: bool = False,
    overwrite: bool = False,
    accept_gaps: bool = False,
    comm: "MPI.Intracomm | None" = None,
) -> int:
    """Train as the run file says. Collective: all ranks of `comm`, None: of the job, call it.

    Args:
        resume: Go on from the folder's checkpoint, where it has one.
        overwrite: Begin where the folder holds a run.
        accept_gaps: Resume although rows of the history are missing.

    Returns:
        The exit code: 0 done, 75 stopped on a signal: with a checkpoint, or before the first step.

    Raises:
        AgreedError: On all ranks, for what any rank found wrong before the first step.
        TilenetError: On one rank, for a file that breaks later.
    """
    comm = world() if comm is None else comm
    try:
        with kept_on_ctrl_c(lambda: _how_to_go_on(Path(run.output))):
            return _train(run, comm, resume=resume, overwrite=overwrite, accept_gaps=accept_gaps)
    except StopAgreed:
        if comm.rank == 0:
            say("tilenet: stopped before the first step: run again as before, nothing was changed")
        return STOPPED


def _train(
    run: RunFile, comm: "MPI.Intracomm", *, resume: bool, overwrite: bool, accept_gaps: bool
) -> int:
    """As `train`.

    Raises:
        StopAgreed: On all ranks, as one was asked to stop before the first step.
    """
    with ExitStack() as stack:
        with agreed(comm):
            who = f"rank {comm.rank} of {comm.size}"
            watchdog = stack.enter_context(Watchdog(run.hang_seconds, who))
            # From here on: MPICH catches SIGUSR1 itself, and forgets it.
            stop = stack.enter_context(StopRequests())
        with together(comm, stop) as turns:
            opened = open_images(run, stack, watchdog, turns.part_done)
            shapes = tuple((image.bands, image.size) for image in opened.images)
            plan = plan_run(run, shapes, comm.size)
        terms = run.terms | {"files": check_same_files(opened.files, comm)}
        share_collars(opened.all_images, comm, watchdog, stop)
        # One rank compares checkpoints with their checksums, and the others wait.
        watchdog.arm("the look into the run's folder", SLOW)
        with agreed(comm):
            keep = run.checkpoints.keep
            folder = RunFolder(Path(run.output), write=comm.rank == 0, terms=terms, keep=keep)
            stack.enter_context(folder)
            found = folder.prepare(resume=resume, overwrite=overwrite, say=say)
        for warning in folder.go_on_from(comm.bcast(found)):
            say(warning)
        if run.cache_dir is not None:
            files = opened.all_images, opened.all_labels
            stack.enter_context(staged_on_node(run.cache_dir, *files, comm))
        if comm.rank == 0 and (note := resampling_note(opened.all_labels)):
            say(note)
        context_px = plan.record.context().context_any_pixel_px
        opened = hold_out(run, opened, context_px, comm, watchdog, stop)
        if comm.rank == 0 and opened.held_out is not None:
            say(held_out_note(opened.held_out, context_px, plan.record.layers))
        if comm.rank == 0 and (note := cell_note(run, plan)):
            say(note)
        job = _Job(run, plan, opened, folder, watchdog, stop, comm)
        code = job.train(accept_gaps=accept_gaps)
        watchdog.arm("the end of the run", SLOW)
    return code


def _how_to_go_on(folder: Path) -> str:
    kept = last_step(folder)
    if kept is None:
        return "there was no checkpoint yet: the same command starts from the beginning"
    return f"the checkpoint of step {kept} is kept: go on with --resume"


class _Job:
    """A run under way on one rank."""

    def __init__(
        self,
        run: RunFile,
        plan: RunPlan,
        opened: RunImages,
        folder: RunFolder,
        watchdog: Watchdog,
        stop: StopRequests,
        comm: "MPI.Intracomm",
    ) -> None:
        self.run, self.plan, self.comm, self.folder = run, plan, comm, folder
        self.watchdog, self.stop = watchdog, stop
        watchdog.arm("the start of the run", SLOW)
        self.images, self.labels = opened.images, opened.labels
        self.dtype = parameter_dtype(run.precision)
        place = node_place(comm, run.device)
        with agreed(comm):
            devices = choose_devices(run.device, place, run.num_partitions)
        layout = say_layout(comm, place, devices)
        self.account = RunAccount(folder.path, run, opened.validation, layout, comm)
        context = plan.record.context()
        files = self.images, self.labels
        keys, held_out = (run, *files, context, plan.cell_px), opened.held_out
        found = run_survey(*keys, held_out, folder.path, comm, watchdog, stop)
        watchdog.arm("the plan of the run", SLOW)
        self.run = run = _weighted(run, found, comm)
        with agreed(comm):
            self.record = folder.record(plan.record, found.mean, found.std)
        with together(comm, stop) as turns:
            layers, done = self.record.layers, turns.part_done
            self.network: Network = build_network(layers, run.seed, self.dtype, layer_done=done)
        # Ranks of the same image, row by row of the grid.
        self.image_comm = comm.Create_group(comm.group.Incl(plan.mesh.same_image(comm.rank)))
        if needs_all_tiles(self.record.layers, run.halo_mode):
            self.network = spatial_network(
                self.network,
                self.record.layers,
                plan.balance,
                run.halo_mode,
                self.image_comm,
                comm,
                device_mpi=exchange_from(run.exchange_from, devices, comm) == "device",
            )
        self.scale = LossScale.of(run.precision)
        with agreed(comm):
            sizes = tuple(image.size for image in self.images)
            self.schedule = schedule_of(run, sizes, found, plan.cell_px)
        cells = Cells(found.classes_in_cells, plan.cell_px)
        self.work = RankWork(run, plan, self.schedule, sizes, cells, comm.rank)
        loads = self.work.loads()
        swaps = decide_swaps(run, self.record.layers, plan.balance, loads, devices, place, comm)
        with agreed(comm):
            self.swaps = None if swaps is None else RunSwaps(run, swaps, devices)
        self.pipe = Pipe(
            self.network,
            plan.balance,
            devices,
            run.checkpointing,
            run.precision,
            inline=len(devices) == 1,
            stores=None if self.swaps is None else self.swaps.stores,
            cells=None if self.swaps is None else self.swaps.cells,
        )
        self.trace = TraceRecorder(
            folder.path, run.profile.numbers, self.pipe.devices, write=comm.rank == 0
        )
        self.swapped = SwapCounts()
        self.validation: Validation | None = None
        if opened.validation:
            self.validation = Validation(
                run, self.record, opened.validation, plan.balance, devices, watchdog, comm, stop
            )
        end_if_asked(comm, stop)

    def train(self, *, accept_gaps: bool) -> int:
        """Run all steps."""
        run, comm = self.run, self.comm
        self.watchdog.arm("the first weights", SLOW)
        optimizer = _optimizer(run, self.network)
        with agreed(comm):
            first = self.folder.load(self.network, optimizer, self.scale, run.init)
        with agreed(comm):  # and not before: others may still read what begin deletes
            self.folder.begin()
            sample = self.schedule.samples(0)[0]
            self.account.begin(self.plan, self.pipe, sample)
            log = None
            if comm.rank == 0:
                log = RunLog(self.folder.path, run, first, accept_gaps=accept_gaps)
        if run.steps is None:
            last = (run.epochs or 0) * self.schedule.steps_per_epoch
        else:
            last = run.steps
        offset_px = self.plan.rule.offset_px
        take = Step(
            run,
            self.record,
            self.pipe,
            offset_px,
            optimizer,
            run.schedule.rates(run.optimizer.lr, last),
            self.scale,
            comm,
            self.image_comm,
            None if self.swaps is None else self.swaps.statistics,
        )
        if comm.rank == 0:
            left = max(last - first, 0)
            transport = take.gradients.transport
            announce(self.plan, self.pipe, sample, left, transport, comm.size)
        try:
            with nullcontext() if self.swaps is None else self.swaps.acting(self.pipe):
                try:
                    finished = self._steps(take, first, last, optimizer, log)
                finally:
                    self.folder.close()
            say_swaps(comm, self.swapped, self.account.seconds)
        except AgreedError:
            self._close(take)  # is collective, and all ranks are here
            raise
        finally:
            if log:
                log.close()
        self._close(take)
        self.watchdog.arm("the report", SLOW)
        self.account.end(first, finished=finished)
        return 0 if finished else STOPPED

    def _close(self, take: Step) -> None:
        take.close()
        if self.swaps is not None:
            self.swaps.close()
        if isinstance(self.network, SpatialNetwork):
            self.network.close()
        self.image_comm.Free()

    def _steps(
        self,
        take: Step,
        first: int,
        last: int,
        optimizer: torch.optim.Optimizer,
        log: RunLog | None,
    ) -> bool:
        """Make the steps from `first` to `last`; return whether nothing is left to do."""
        run, comm, stop, validation = self.run, self.comm, self.stop, None
        if self.validation is not None:
            every = run.validation.every or self.schedule.steps_per_epoch
            validation = RunValidation(
                self.validation, self.network, every, last, self.folder, log, comm
            )
        whole_images = run.crop_px is None and run.batch_size == 1
        saved = first if self.folder.has_checkpoint else -1
        step = first
        stop.agreed = bool(comm.allreduce(int(stop.requested)))
        unit = "image" if whole_images else "step"
        bar = progress_bar(comm, last, unit, first)
        with self.trace, self._reads(first, last) as reads, bar as progress:
            scored = not stop.agreed
            if validation is not None and scored:
                validation.resume(first, stop)
            while step < last and not stop.agreed:
                slow = step == first or self.trace.slows(step + 1)
                self.watchdog.arm(f"step {step + 1}", SLOW if slow else 1.0)
                images = [one.number for one in self.work.samples(step)]
                num_reads = len(self.work.micro_batches(step))
                with self.trace.step(step + 1):
                    done = take.take(step, reads, num_reads, images, self._ends)
                    self.trace.add(done.seconds, done.read_seconds, done.reduce_seconds, done.swaps)
                stop.agreed = done.stop
                self.swapped += done.swaps
                self.account.add(done)
                if log:
                    log.step(step + 1, done, take.rates.at(step))
                    pixels = sum(prod(one.size) for one in self.schedule.samples(step))
                    speed = f"{pixels / done.seconds / 1e6:.3g}"
                    progress.set_postfix(
                        {"loss": f"{done.loss:.4f}", "Mpx/s": speed}, refresh=False
                    )
                progress.update()
                step += 1
                best = False
                if validation is not None and validation.due(step):
                    # Who is asked to stop has little time: that is made up for when it goes on.
                    scored = not stop.agreed
                    best = scored and validation.make(step, stop)
                if best or step % run.checkpoint_every == 0:
                    self._save(step, optimizer, log, best=best)
                    saved = step
            if saved != step:
                self._save(step, optimizer, log)
            self.watchdog.arm("the last checkpoint", SLOW)
            with agreed(self.comm):
                self.folder.wait()
        return step == last and scored

    def _reads(self, first: int, last: int) -> ReadAhead[tuple[int, list[Work]], list[Part]]:
        """This rank's micro-batches of the steps from `first` to `last`, one after another."""
        reader = TileReader(self.run, self.record, (self.images, self.labels), self.dtype)
        steps = range(first, last)
        ahead = ((step, one) for step in steps for one in self.work.micro_batches(step))
        return ReadAhead(reader.read, ahead, self.run.read_ahead)

    def _ends(self) -> bool:
        """Whether this rank asks to stop: on a signal, or as it could not write a checkpoint."""
        return self.stop.requested or self.folder.failed

    def _save(
        self,
        step: int,
        optimizer: torch.optim.Optimizer,
        log: RunLog | None,
        *,
        best: bool = False,
    ) -> None:
        self.watchdog.arm(f"the checkpoint of step {step}", SLOW)
        with agreed(self.comm):
            wrong = [n for n, p in self.network.named_parameters() if not p.isfinite().all()]
            if wrong:
                raise TilenetError(
                    f"weights must stay finite (step {step}: {wrong[0]} and {len(wrong) - 1} more "
                    f"are not); lower optimizer.lr: {kept_checkpoint(self.folder.path)}"
                )
            if log:
                log.sync()
            self.folder.save(step, self.network, self.record, optimizer, self.scale, best=best)


def _weighted(run: RunFile, found: Survey, comm: "MPI.Intracomm") -> RunFile:
    """The run with the class weights that its labels ask for; pixels per class are said."""
    if run.class_weights != "auto":
        if comm.rank == 0:
            all_pixels = max(sum(found.class_pixels), 1)
            counts = zip(run.class_names, found.class_pixels, strict=True)
            shown = (f"{name} {pixels:,} ({pixels / all_pixels:.2%})" for name, pixels in counts)
            say(f"labelled pixels of each class: {', '.join(shown)}")
        return run
    weights = balanced_weights(found.class_pixels)
    if comm.rank == 0:
        named = zip(run.class_names, weights, found.class_pixels, strict=True)
        each = (f"{name} {weight:.17g} ({pixels:,} px)" for name, weight, pixels in named)
        say(f"class_weights: auto: {', '.join(each)}")
    return replace(run, class_weights=list(weights))


def _optimizer(run: RunFile, network: Network) -> torch.optim.Optimizer:
    keys, parameters = run.optimizer, network.parameters()
    # Not foreach: it makes temporary tensors as large as all parameters together.
    if keys.name == "sgd":
        return torch.optim.SGD(
            parameters,
            keys.lr,
            momentum=keys.momentum,
            weight_decay=keys.weight_decay,
            nesterov=keys.nesterov,
            foreach=False,
        )
    return torch.optim.AdamW(parameters, keys.lr, weight_decay=keys.weight_decay, foreach=False)
