"""Taken networks over two ranks: are tiles, exchange and sweep those of the module on all of it?

Each network that `taken` has as taken (or every nth of them) is adopted with frozen batch norm, and
a small random image goes through two ranks in five ways, forward and backward in float64: four
tiles that overlap, two shares that exchange halos, two columns that are swept; and over three
partitions of each rank, tiles as micro-batches of a pipeline that are computed again in backward,
and columns that are swept. It is what each run does with a brought network before its first step,
against the module on the whole image. Where a halo is wide, tiles of an image so small read nearly
all of it: `taken` and `tilenet check` prove halos apart. What takes more than 8 s is left out, with
its number; so is what training refuses: a sweep of norms and maxima over the image, over partitions
of averages too. A network that makes rounding large by itself, as one with random weights under
frozen batch norm may, has a column of its own: its differences are said next to those of the same
network for an image that differs by 1e-15. Quick: three networks.
"""

import json
import os
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bench.exactness.libraries import SIZE_PX
from bench.exactness.taken import table
from bench.report import ROOT, Claim, Found, at_least, at_most, on_ranks

if TYPE_CHECKING:
    from mpi4py import MPI

    from tilenet.adoption.adopt import Adopted
    from tilenet.training.setup.run_plan import RunPlan

WAYS = "overlap", "exchange", "sweep", "pipeline", "swept partitions"
PARTITIONS = 3
PARTS = "logits", "gradients"
LOGITS, GRADIENTS = 1e-12, 1e-10
QUICK = "written/ERFNet", "written/CBAM U-Net", "written/GCN"


def taken_networks() -> list[str]:
    """Names of those that the bench `taken` found so."""
    found = json.loads((ROOT / "bench/results/taken.json").read_text())["figures"]["networks"]
    return [f"{one['library']}/{one['name']}" for one in found if one["outcome"] == "taken"]


def compare_each(names: list[str], seconds: float) -> list[dict[str, Any]]:
    """How far two ranks are from the module, by network and way. Collective."""
    from tilenet.adoption.adopt import Adopted, adopt
    from tilenet.errors import TilenetError
    from tilenet.parallel.ranks.comm import world
    from tilenet.parallel.ranks.together import together
    from tilenet.training.setup.share import share_adopted

    warnings.simplefilter("ignore")
    comm, rows = world(), list[dict[str, Any]]()
    for name in names:
        module, adopted = None, None
        try:
            with together(comm):
                if comm.rank == 0:
                    module = table()[name].choice.module().train()
                    adopted = adopt(module, table()[name].choice.bands)
        except TilenetError as error:  # a package that is missing here, for one
            rows.append({"network": name, "way": "overlap", "left_out": str(error)})
            continue
        shared: Adopted = share_adopted(adopted, comm)
        for way, plan in _plans(shared):
            row: dict[str, Any] = {"network": name, "way": way}
            try:
                row |= _compared(shared, plan, module, seconds, comm)
            except TilenetError as error:
                row["left_out"] = str(error)
            rows.append(row)
            if comm.rank == 0:
                print(row, flush=True)
    return rows


def _plans(adopted: "Adopted") -> Iterator[tuple[str, "RunPlan"]]:
    """What two ranks do in each way."""
    from tilenet.geometry.halo_rule import HaloRule, halo_rule
    from tilenet.geometry.tiles import Cut
    from tilenet.planning.balance import likely_balance, most_partitions
    from tilenet.planning.compatibility import whole_image
    from tilenet.planning.mesh import MeshShape
    from tilenet.training.proof.alone import plan_of

    layers, context, together = adopted.layers, adopted.context, adopted.together
    exchanged = HaloRule(0, context.alignment_px, exchanged=True)
    plan = replace(plan_of(adopted, exchanged, (1, 2)), mesh=MeshShape(1, 1, 2))
    exact = halo_rule("exact", layers)
    overlap = replace(plan, rule=exact, requested=Cut((2, 2)))
    yield "overlap", overlap
    yield "exchange", plan
    whole, partitions = whole_image(layers), min(PARTITIONS, most_partitions(len(layers), together))
    if whole in (None, "global average"):
        yield "sweep", replace(plan, swept=True)
    balance = likely_balance(layers, SIZE_PX, partitions, together)
    piped = replace(overlap, balance=balance, micro_batches=2, checkpointing="always")
    yield "pipeline", piped
    if whole is None:
        yield "swept partitions", replace(plan, swept=True, balance=balance)


def _compared(
    adopted: "Adopted", plan: "RunPlan", module: Any, seconds: float, comm: "MPI.Intracomm"
) -> dict[str, Any]:
    """Differences of logits and gradients."""
    import copy

    import torch

    from tilenet.geometry.tiles import cut
    from tilenet.parallel.ranks.devices import NodePlace
    from tilenet.parallel.ranks.layout import RunDevices
    from tilenet.parallel.ranks.together import RankControl
    from tilenet.planning.small_image import ImageQuestion, choose_small_image, untested_halo
    from tilenet.training.proof.reference import random_problem
    from tilenet.training.proof.run import compare

    grid, unit = plan.requested.grid or (1, 2), adopted.context.alignment_px
    like = cut(unit * (2 * grid[0] + 1), unit * (2 * grid[1] + 1), plan.requested, plan.rule)
    question = ImageQuestion(
        adopted.layers, plan.rule, grid, like, 2, backward=True, patience_s=seconds
    )
    problem = random_problem(choose_small_image(question), adopted.layers, 1)
    cpus = (torch.device("cpu"),) * len(plan.balance)
    devices = RunDevices(cpus, NodePlace(comm.rank, comm.size, 1), [])
    mine = copy.deepcopy(module)
    found, reason = compare(plan, problem, mine, "frozen", devices, "host", RankControl(comm))
    if reason:
        return {"left_out": reason}
    note = untested_halo(problem.tiling)
    own = {f"own {one.what}": one.own for one in found if one.own}
    return {one.what: one.apart for one in found} | own | ({"note": note} if note else {})


def bench(
    quick: bool, every: int = 1, networks: tuple[str, ...] = (), seconds: float = 8.0
) -> Found:
    """Compare each network on two ranks."""
    known = taken_networks()
    some = QUICK if quick else [n for n in known if any(part in n for part in networks or ("",))]
    names = list(some)[::every]
    os.environ.setdefault("TQDM_DISABLE", "1")
    rows: list[dict[str, Any]] = on_ranks(2, compare_each, names, seconds, hours=4)
    heads = "way", "networks", "left out", "logits, most", "gradients, most", "in network"
    table_of, claims = [[*heads, "round by themselves"]], list[Claim]()
    for way in WAYS:
        of_way = [row for row in rows if row["way"] == way]
        compared = [row for row in of_way if "left_out" not in row]
        unstable = [row for row in compared if "own logits" in row]
        done = [row for row in compared if row not in unstable]
        worst = max(done, key=lambda row: row["gradients"], default={"network": "none"})
        logits, gradients = (max((row[what] for row in done), default=0.0) for what in PARTS)
        numbers = str(len(done)), str(len(of_way) - len(compared))
        figures = f"{logits:.1e}", f"{gradients:.1e}", worst["network"], str(len(unstable))
        table_of.append([way, *numbers, *figures])
        claims.append(at_most(f"{way}: logits off the module's, {len(done)}", logits, LOGITS))
        claims.append(at_most(f"{way}: gradients, {len(done)} networks", gradients, GRADIENTS))
        over = [row[what] / row[f"own {what}"] for row in unstable for what in PARTS]
        if over:
            words = f"{way}: over the module's own rounding, {len(unstable)} networks"
            claims.append(at_most(words, max(over), 50))
    proved = {row["network"] for row in rows if "left_out" not in row}
    claims.append(at_least(f"of {len(names)} networks, compared", len(proved), len(names)))
    return {"rows": rows, "of": len(known), "tables": {"Two ranks": table_of}}, claims
