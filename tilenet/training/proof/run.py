"""A run's proof: a small image over its own ranks, next to the user's module on the whole image.

Tiles, exchanges, partitions, checkpointing and devices are the run's own; nothing is dropped.
"""

from contextlib import suppress
from dataclasses import replace
from math import inf, prod

import torch
from torch import nn

from tilenet.errors import TilenetError
from tilenet.model.network import Network
from tilenet.mpi import Intracomm
from tilenet.parallel.proof import (
    Difference,
    largest,
    no_trace,
    proof_precision,
    say_or_refuse,
    say_why_not,
    scale_of,
)
from tilenet.parallel.ranks.layout import RunDevices
from tilenet.parallel.ranks.share import share_tensors
from tilenet.parallel.ranks.together import RankControl, together
from tilenet.planning.compatibility import whole_image
from tilenet.planning.mesh import most_tiles
from tilenet.planning.small_image import (
    ImageQuestion,
    choose_number_too,
    proof_grid,
    untested_halo,
)
from tilenet.training.config.run_file import RunFile
from tilenet.training.images.run_data import RunData
from tilenet.training.network import RunNetwork
from tilenet.training.proof.reference import (
    Answer,
    Problem,
    answer_of_module,
    own_rounding,
    random_problem,
    rounding_of,
)
from tilenet.training.proof.tiles import run_tiles
from tilenet.training.setup.run_plan import RunPlan
from tilenet.training.setup.swap import SwapRequest
from tilenet.training.states import sharers_of


def proved_network(
    run: RunFile,
    plan: RunPlan,
    module: nn.Module | None,
    data: RunData,
    devices: RunDevices,
    control: RankControl,
    filled: Network | None = None,
) -> RunNetwork:
    """Build the network of a run, after comparing its ranks with the module. Collective.

    Args:
        module: On rank 0 the user's module, which this changes; None: ranks are compared with its
            list of layers. None on other ranks, except with `halo_mode: windows`, where nothing is
            compared.
        data: Data of the run.
        filled: See `RunNetwork`.

    Raises:
        AgreedError: The ranks do not give the module's numbers, or see `RunNetwork`.
        StopAgreed: A rank was asked to stop.
    """
    sizes = [sample.size for sample in data.schedule.samples(0)]
    pixels = data.last * sum(map(prod, sizes)) / control.comm.size
    reason = ""
    if plan.halo_mode == "windows":
        assert module is not None  # on all ranks
        assert plan.adopted is not None
        filled, module = plan.adopted.around(module, run.seed, plan.record.precision), None
    elif run.prove and plan.adopted is not None:
        try:  # all ranks decide the same
            problem = _problem(plan, sizes[0], pixels)
        except TilenetError as error:
            reason = str(error)
        else:
            with no_trace(devices.partitions):
                reason = _prove(run, plan, problem, module, devices, control)
    say_why_not(reason, control.comm)
    if module is not None:
        with suppress(Exception):  # a user's module may refuse to move
            module.to("meta")  # frees its memory
    loads = data.work.loads()
    ranks = sharers_of(run.optimizer, plan.record, control.comm.size, filled)
    request = SwapRequest(run.swap, run.swapping, run.optimizer.kind, loads, ranks)
    return RunNetwork(plan, devices, request, run.seed, run.exchange_from, control, filled)


def _problem(plan: RunPlan, size: tuple[int, int], run_pixels: float) -> Problem:
    """Choose a small problem that tests the plan.

    Raises:
        TilenetError: None is small enough, or the halo is not exact.
    """
    mesh, layers, rule = plan.mesh, plan.record.layers, plan.rule
    if not rule.exact:
        raise TilenetError(f"the halo that was asked for ({rule.halo_px} px) is not the exact one")
    like = plan.tiling(*size)
    grid = like.grid if rule.exchanged else proof_grid(like.grid, (mesh.rows, mesh.columns))
    together = whole_image(layers) == "batch norm"
    question = ImageQuestion(
        layers,
        rule,
        grid,
        like,
        most_tiles(mesh, grid),
        replicas=mesh.replicas if together else 1,
        backward=True,
        run_pixels=run_pixels,
    )
    question, tiling = choose_number_too(question)
    return random_problem(tiling, layers, question.images, question.replicas)


def _prove(
    run: RunFile,
    plan: RunPlan,
    problem: Problem,
    module: nn.Module | None,
    devices: RunDevices,
    control: RankControl,
) -> str:
    """Compare, and print or refuse the differences; return why that is not possible, if so."""
    norms, halos_from = run.network.batch_norm, run.exchange_from
    differences, reason = compare(plan, problem, module, norms, devices, halos_from, control)
    if differences:
        note = untested_halo(problem.tiling)
        say_or_refuse(differences, _how(plan), note, "prove: false", control.comm)
    return reason


def compare(
    plan: RunPlan,
    problem: Problem,
    module: nn.Module | None,
    batch_norm: str | None,
    devices: RunDevices,
    halos_from: str,
    control: RankControl,
) -> tuple[list[Difference], str]:
    """Compare the ranks with the module on the whole image. Collective.

    Args:
        module: See `proved_network`.
        batch_norm: Mode of batch norm that the module was adopted with.
        halos_from: See `RunNetwork`.

    Returns:
        The differences, or the reason why there are none.

    Raises:
        StopAgreed: A rank was asked to stop.
    """
    comm = control.comm
    precision = proof_precision(devices.partitions, comm)
    # The lowest strips there are, for a small image would be one strip or two.
    record, strip_rows = replace(plan.record, precision=precision), plan.rule.alignment_px
    own = replace(plan, record=record, strip_rows=strip_rows)
    answer, rounding = None, (inf, inf)
    reason: str = ""
    with together(comm, control.stop):  # ranks that wait leave the cores to rank 0
        if comm.rank == 0 and plan.adopted is not None:
            answer, reason = answer_of_module(module, plan.adopted, batch_norm, problem)
            if answer is not None:
                problem = replace(problem, zeros=answer.zeros)
                if precision == "float32":
                    rounding = rounding_of(plan.adopted, problem, answer, devices.partitions[0])
    reason, rounding, zeros = comm.bcast((reason, rounding, problem.zeros))
    if reason:
        return [], reason
    problem = replace(problem, zeros=zeros)
    logits = share_tensors({} if answer is None else {"logits": answer.logits}, comm)["logits"]
    # It swaps nothing, and its weights are the module's.
    network = RunNetwork(own, devices, SwapRequest(), 0, halos_from, control)
    of_device = rounding if precision == "float32" else (None, None)
    with torch.set_grad_enabled(problem.chosen is None):
        apart = run_tiles(own, problem, network, logits, comm)
    differences = [Difference("logits", apart, of_device[0])]
    if problem.chosen is None:
        sums = _gradients(own, problem, network, answer, comm)
        differences.append(Difference("gradients", sums[0], of_device[1], sums[1]))
    network.close()
    if precision == "float64" and any(d.apart > d.limit for d in differences):
        differences = _with_own_rounding(differences, plan, problem, answer, control)
    return differences, ""


def _with_own_rounding(
    differences: list[Difference],
    plan: RunPlan,
    problem: Problem,
    answer: Answer | None,
    control: RankControl,
) -> list[Difference]:
    """The differences with the network's own, where the image differs by rounding. Collective."""
    noise = (0.0, 0.0)
    with together(control.comm, control.stop):
        if answer is not None and plan.adopted is not None:
            noise = own_rounding(plan.adopted, problem, answer)
    noise = control.comm.bcast(noise)
    pairs = zip(differences, noise, strict=False)
    return [replace(difference, own=rounding) for difference, rounding in pairs]


def _how(plan: RunPlan) -> str:
    """Ranks, halo mode and pipeline in words."""
    mesh, parts = plan.mesh, len(plan.balance)
    replicas = f"{mesh.replicas} × " * (mesh.replicas > 1)
    return (
        f"{replicas}{mesh.rows} × {mesh.columns} ranks, {plan.halo_mode}"
        + f", {parts} partitions" * (parts > 1)
        + f", checkpointing {plan.checkpointing}" * (plan.checkpointing != "never")
    )


def _gradients(
    plan: RunPlan,
    problem: Problem,
    network: RunNetwork,
    answer: Answer | None,
    comm: Intracomm,
) -> tuple[float, str]:
    """The largest difference of the summed gradients, and its weight. Collective."""
    from mpi4py import MPI

    assert plan.adopted is not None
    times = plan.mesh.replicas / problem.replicas  # replicas of the same image
    worst, where = 0.0, ""
    scale = 1.0 if answer is None else scale_of(answer.gradients.values())
    for name, parameter in network.network.named_parameters():
        if not parameter.requires_grad:
            continue
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        total = gradient.double().cpu().contiguous()
        comm.Allreduce(MPI.IN_PLACE, total.numpy())
        parameter.grad = None
        if answer is not None:
            own_name = plan.adopted.names[name]
            expected = answer.gradients.get(own_name, torch.zeros(()).expand(total.shape))
            apart = largest(total / times, expected.reshape(total.shape)) / scale
            if apart > worst:
                worst, where = apart, f" ({own_name})"
    difference: tuple[float, str] = comm.bcast((worst, where))
    return difference
