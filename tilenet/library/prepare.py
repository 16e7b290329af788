"""Prepare the loop of a run from opened images and a plan: survey, stacking, proof, validation."""

from contextlib import ExitStack
from dataclasses import replace

from torch import nn

from tilenet.model.loss import Loss
from tilenet.parallel.health.watchdog import SLOW
from tilenet.parallel.ranks.comm import agreed
from tilenet.parallel.ranks.layout import RunDevices
from tilenet.parallel.ranks.together import RankControl, end_if_asked
from tilenet.training.config.run_file import RunFile
from tilenet.training.folder.run_folder import RunFolder
from tilenet.training.images.open import RunImages
from tilenet.training.images.run_data import RunData
from tilenet.training.images.survey import class_weights, run_survey
from tilenet.training.loop import Loop
from tilenet.training.proof.run import proved_network
from tilenet.training.setup.run_plan import RunPlan
from tilenet.training.setup.stacking import stack_crops
from tilenet.training.validation import RunValidation


def prepare_loop(
    run: RunFile,
    plan: RunPlan,
    module: nn.Module | None,
    opened: RunImages,
    folder: RunFolder,
    control: RankControl,
    stack: ExitStack,
) -> Loop:
    """Survey the images, build and prove the network, and return the loop. Collective.

    Args:
        module: The user module, on the rank that made it; its proof uses it up.
    """
    comm, watchdog, stop = control.comm, control.watchdog, control.stop
    watchdog.arm("the start of the run", SLOW)
    devices = RunDevices.choose(run.device, run.num_partitions, comm)
    devices.compute_in(run.precision, stack, comm)
    survey = run_survey(opened, plan, run.reading, folder.path, control)
    watchdog.arm("the plan and the proof of the run", SLOW)
    weights = class_weights(run.class_weights, run.class_names, survey.class_pixels, comm)
    with agreed(comm):
        statistics = run.network.statistics or (survey.mean, survey.std)
        first = opened.images[0]
        record = replace(plan.record, scaling=first.scaling, image_bands=first.descriptions)
        plan = replace(plan, record=folder.record(record, *statistics))
    if run.swap in ("off", False):
        sizes = [image.size for image in opened.images]
        plan = stack_crops(plan, run.batch_size, sizes, run.optimizer, devices.partitions, comm)
    with agreed(comm):
        data = RunData.of(run, plan, opened, survey.classes_in_cells, comm.rank)
    network = proved_network(run, plan, module, data, devices, control)
    loss = Loss(
        run.loss_terms,
        len(run.class_names),
        run.ignore_index,
        run.focal_gamma,
        weights,
        run.huber_delta,
    )
    validation = RunValidation.of(run, network, loss, data, folder, control)
    end_if_asked(comm, stop)
    return Loop(run, network, data, loss, validation, folder, control)
