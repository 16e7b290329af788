"""Anybody's networks over ranks: the numbers of their module on the whole image?

    pip install -c constraints.txt '.[bench]'

Each network of segmentation_models_pytorch and torchvision is adopted with frozen batch norm, in
CPU seconds of one thread, with its computed context next to the one that a gradient shows.
Statistics of group norm, as in FPN, which reach all of the image, pass none on in that.

Then its layers run over ranks on random pixels in float64, forward and backward, and are held
against the module itself, in plain torch on the whole image: largest differences of logits,
relative to the largest logit, and of gradients, relative to the largest of their tensor, of weights
at least to 1e-3 of the largest of all, of a bias at least to that of its kernel. (The gradient of a
bias in front of batch norm is 0; what sums leave of it is rounding, which is off by any part of
itself.) Next to them stands what the same
module differs by from itself on one device in another order of sums: the step's images in reverse
order, with their channels last in memory. Batch norm over a step divides by deviations that are
small in some channels, which enlarges any rounding; there tilenet's logits may be off by four times
what another order makes of them, or by 1e-12.

By turns networks meet 1 to 4 ranks, both halo modes, 1 to 3 partitions and, eight of them, batch
norm of a step. Operations of a training step are
counted on the middle one of 3 × 3 tiles of 1250 and 5000 px, over a ninth of the image's. At 1250
px strides of 32 make own areas differ by 3 %. And a convolution of own cells runs, with zeros in
place of neighbours' cells, while these are under way; what they add comes after it. Where taps lie
36 cells apart on a tile of 157, as in DeepLabV3, that is 31 % more for this convolution, and 7 %
for the network: 1.04 was asked of every network at 1250 px, and holds for the median of them.
"""

import time
import warnings
from dataclasses import asdict, dataclass, replace
from itertools import product
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.report import Claim, Found, at_most, on_ranks

if TYPE_CHECKING:
    from torch import nn

    from tilenet.adoption.adopt import Adopted

SMP = "segmentation_models_pytorch"
ENCODERS = (
    "resnet18", "resnet34", "resnet101", "efficientnet-b0", "mobilenet_v2", "densenet121",
    "se_resnet50", "tu-regnety_002", "tu-convnext_tiny", "xception",
)  # fmt: skip
DECODERS = (
    "UnetPlusPlus", "Linknet", "FPN", "PSPNet", "PAN", "DeepLabV3", "DeepLabV3Plus", "UPerNet",
)  # fmt: skip
REFUSED = ("MAnet", "Segformer", "DPT")
TORCHVISION = ("deeplabv3_resnet50", "fcn_resnet50", "lraspp_mobilenet_v3_large")
QUICK = ("Unet/resnet18", "PSPNet/resnet34")
# Those compared with batch norm of a step too, of which one takes seconds on two cores.
STEPPED = (
    "Unet/resnet18", "Unet/efficientnet-b0", "Unet/mobilenet_v2", "Unet/tu-regnety_002",
    "Linknet/resnet34", "FPN/resnet34", "PSPNet/resnet34", "lraspp_mobilenet_v3_large",
)  # fmt: skip
MODES = "overlap", "exchange"
MOST_RANKS = 4
LEAST_PX = 190, 270
TILES_PX = {1250: 1.08, 5000: 1.04}  # most operations of a network
MEDIAN = 1.04  # of all networks
LOGITS, GRADIENTS = 1e-12, 1e-10
# How many times the difference by another order of sums is still rounding.
ORDERS = 4


@dataclass(frozen=True)
class Choice:
    """A network that anybody can have.

    Attributes:
        maker: Function or class of a package.
        options: What it is called with.
        bands: Of its image.
    """

    maker: str
    options: dict[str, Any]
    bands: int

    def module(self) -> "nn.Module":
        """With statistics of batch norm as a trained network has them."""
        import torch

        from tilenet.adoption.source import build_module

        declare_operators()
        module = build_module(self.maker, self.options)
        generator = torch.Generator().manual_seed(2)
        for part in module.modules():
            if isinstance(part, torch.nn.BatchNorm2d) and part.running_var is not None:
                part.running_mean.normal_(0, 0.1, generator=generator)  # type: ignore[union-attr]
                part.running_var.uniform_(0.5, 1.5, generator=generator)
        return module


def declare_operators() -> None:
    """Declare what torchvision's wheel for a torch without CUDA lacks, before it is imported."""
    import torch

    for name in () if hasattr(torch.ops.torchvision, "nms") else ("nms", "qnms"):
        schema = f"torchvision::{name}"
        torch.library.define(schema, "(Tensor dets, Tensor scores, float iou) -> Tensor")


def choices() -> dict[str, Choice]:
    """All networks by name."""
    given = {"encoder_weights": None, "in_channels": 4, "classes": 5}
    found = {
        f"Unet/{encoder}": Choice(f"{SMP}:Unet", {"encoder_name": encoder, **given}, 4)
        for encoder in ENCODERS
    }
    for decoder in (*DECODERS, "MAnet"):
        options = {"encoder_name": "resnet34", **given}
        found[f"{decoder}/resnet34"] = Choice(f"{SMP}:{decoder}", options, 4)
    found["Segformer/mit_b0"] = Choice(f"{SMP}:Segformer", {"encoder_name": "mit_b0", **given}, 4)
    vit = {"encoder_name": "tu-vit_tiny_patch16_224", "dynamic_img_size": True, **given}
    found["DPT/vit_tiny"] = Choice(f"{SMP}:DPT", vit, 4)
    plain = {"weights": None, "weights_backbone": None, "num_classes": 5}
    for name in TORCHVISION:
        found[name] = Choice(f"torchvision.models.segmentation:{name}", plain, 3)
    return found


def adopt_all(names: list[str]) -> dict[str, dict[str, Any]]:
    """Of each network what adopting it says, or why it is refused."""
    from bench.speed.exchange_work import work_of
    from tilenet.adoption.adopt import adopt
    from tilenet.errors import TilenetError

    warnings.simplefilter("ignore")

    found: dict[str, dict[str, Any]] = {}
    for name in names:
        one = choices()[name]
        module = one.module()
        began = time.process_time()
        try:
            adopted = adopt(module, one.bands)
        except TilenetError as error:
            found[name] = {"refused": str(error), "seconds": time.process_time() - began}
            continue
        seconds = time.process_time() - began
        context = adopted.context
        row = {"seconds": seconds, "layers": len(adopted.layers), **asdict(context)}
        row["probed_px"] = probed_px(adopted)
        row["work"] = {str(px): asdict(work_of(adopted.layers, 3 * px, (3, 3))) for px in TILES_PX}
        found[name] = row
    return found


def probed_px(adopted: "Adopted") -> int:
    """Pixels that an aligned tile's output looks at on one side, as a gradient shows them.

    On a strip of the image, along which it reaches; averages and statistics of the whole image pass
    none on.
    """
    import torch

    from tilenet.geometry.layers import Norm

    network = adopted.network().eval()
    for layer, module in zip(adopted.layers, network, strict=True):
        if layer.kind == "global_pool":
            module.register_forward_hook(lambda *seen: seen[2].detach())
        elif isinstance(layer, Norm) and layer.scope == "image":
            module.register_forward_hook(lambda _, x, y: y.detach() + x[0] - x[0].detach())
    context = adopted.context
    unit = context.alignment_px
    before = context.halo_px + unit
    image = torch.randn(1, adopted.bands, 2 * before + unit, 2 * unit, requires_grad=True)
    output = network(image)
    output[:, :, before : before + unit].abs().sum().backward()
    assert image.grad is not None
    rows = image.grad.abs().amax((0, 1, 3)).nonzero().flatten()
    return int(max(before - rows[0], rows[-1] - (before + unit - 1)))


@dataclass(frozen=True)
class Way:
    """How a network is computed over the ranks of a job."""

    ranks: int
    mode: Any
    batch_norm: Any
    partitions: int


def ways(name: str) -> list[Way]:
    """Those that a network takes on its turn."""
    turn = list(choices()).index(name)
    taken = [Way(2 + turn % 3, MODES[turn % 2], "frozen", 1 + turn // 2 % 3)]
    if name in STEPPED:
        turn = STEPPED.index(name)
        taken.append(Way(1 + turn % 4, MODES[(turn + turn // 4) % 2], "step", 1 + turn % 3))
    return taken


def compare(names: list[str]) -> list[dict[str, Any]]:
    """All cases, on this job's ranks, and on the first few of them."""
    from mpi4py import MPI

    from tilenet.adoption.adopt import adopt
    from tilenet.parallel.ranks.comm import wait_quietly

    warnings.simplefilter("ignore")

    comm, rows = MPI.COMM_WORLD, []
    for name, batch_norm in product(names, ("frozen", "step")):
        some = [way for way in ways(name) if way.batch_norm == batch_norm]
        adopted, one = None, choices()[name]
        if comm.rank == 0 and some:
            adopted = adopt(one.module(), one.bands, batch_norm)  # type: ignore[arg-type]
        wait_quietly(comm)
        adopted = comm.bcast(adopted)
        for way in some:
            ranks = min(way.ranks, comm.size)
            few = comm.Split(int(comm.rank >= ranks), comm.rank)
            if comm.rank < ranks:
                began = time.perf_counter()
                row = {"network": name, **asdict(way), "ranks": ranks}
                row |= differences(name, adopted, way, few)
                rows.append(row | {"seconds": time.perf_counter() - began})
            few.Free()
            wait_quietly(comm)
    return rows


def differences(name: str, adopted: "Adopted", way: Way, comm: Any) -> dict[str, Any]:
    """Largest ones of logits and gradients from the module on the whole image. Collective."""
    import torch
    from over_ranks import run_of
    from referee import apart, run_module
    from shared_out import shared_out

    case = case_of(adopted, way, comm.size)
    result = shared_out(case, comm, stacked=way.batch_norm == "step")
    if comm.rank:
        return {}
    module, images = choices()[name].module(), torch.cat(case.inputs())
    wanted = run_module(module, images, way.batch_norm)
    # Images in reverse order, channels last in memory
    last = torch.channels_last
    module = module.to(memory_format=last)  # type: ignore[call-overload]
    order = run_module(module, images.flip(0).contiguous(memory_format=last), way.batch_norm)
    order = replace(order, logits=order.logits.flip(0), image=order.image.flip(0))
    row: dict[str, Any] = {"size": case.size, "grid": case.grid}
    for suffix, found in (("", run_of(adopted, result)), ("_other_order", order)):
        off = {what: one for what, (one, _) in apart(found, wanted, buffers=False).items()}
        row[f"logits{suffix}"] = off.pop("logits")
        row[f"gradients{suffix}"] = max(off.values())
    return row


def case_of(adopted: "Adopted", way: Way, ranks: int) -> Any:
    """The smallest one whose ranks can share it out."""
    from over_ranks import AdoptedCase
    from shared_out import grids

    from tilenet.errors import TilenetError
    from tilenet.geometry.ownership import check_shares

    context = adopted.context
    unit, choice = context.alignment_px, grids(ranks)
    grid = choice[len(choice) // 2]
    units = [max(-(-px // unit), 2 * n) for px, n in zip(LEAST_PX, grid, strict=True)]
    halo = context.halo_px if way.mode == "overlap" else 0
    while True:
        case: Any = AdoptedCase(
            adopted.layers, (units[0] * unit, units[1] * unit), grid, unit, halo, way.mode,
            2 if way.batch_norm == "step" else 1, way.partitions, threads=way.partitions > 1,
            adopted=adopted,
        )  # fmt: skip
        if way.mode == "overlap":
            return case
        try:
            for spans, axis in ((case.tiling.rows, "rows"), (case.tiling.cols, "columns")):
                check_shares(adopted.layers, spans, axis)
            return case
        except TilenetError:
            units = [one + n for one, n in zip(units, grid, strict=True)]


def claims(networks: dict[str, dict[str, Any]], rows: list[dict[str, Any]]) -> list[Claim]:
    """What must hold of all networks."""
    taken = {name: one for name, one in networks.items() if "refused" not in one}
    made = claims_of_cases(rows)
    over = max(one["probed_px"] - one["context_aligned_px"] for one in taken.values())
    made.append(at_most("context that a gradient shows beyond the computed one, pixels", over, 0))
    seconds = {name: one["seconds"] for name, one in taken.items()}
    made.append(
        at_most(
            f"CPU seconds to adopt a network, median of {len(taken)}", median(seconds.values()), 3
        )
    )
    slowest = max(seconds, key=lambda name: seconds[name])
    made.append(at_most(f"CPU seconds to adopt the slowest ({slowest})", seconds[slowest], 15))
    for px, goal in TILES_PX.items():
        work = {name: one["work"][str(px)]["exchange"] for name, one in taken.items()}
        most = max(work, key=lambda name: work[name])
        what = f"operations with exchange at {px} px, over the image's ({most})"
        made.append(at_most(what, work[most], goal))
        what = f"operations with exchange at {px} px, over the image's, median of {len(taken)}"
        made.append(at_most(what, median(work.values()), MEDIAN))
    wrong = [
        name for name, one in networks.items()
        if ("refused" in one) != (name.split("/")[0] in REFUSED)
    ]  # fmt: skip
    named = f" ({', '.join(wrong)})" if wrong else ""
    made.append(at_most(f"networks refused or taken wrongly{named}", len(wrong), 0))
    return made


def claims_of_cases(rows: list[dict[str, Any]]) -> list[Claim]:
    """What must hold of differences from the module."""
    made = []
    for batch_norm in ("frozen", "step"):
        some = [row for row in rows if row["batch_norm"] == batch_norm]
        if not some:
            continue

        def bound(row: dict[str, Any]) -> float:
            rounding = row["batch_norm"] == "step" and row["logits"] > LOGITS
            return ORDERS * float(row["logits_other_order"]) if rounding else LOGITS

        cases = f"{len(some)} cases of {len({row['network'] for row in some})} networks"
        for what, goal in (("logits", bound), ("gradients", lambda row: GRADIENTS)):
            worst = max(some, key=lambda row: row[what] / goal(row))
            other = worst[f"{what}_other_order"]
            made.append(
                at_most(
                    f"{what} off the module's, batch norm {batch_norm}, {cases} "
                    f"({worst['network']}: torch in another order {other:.1e})",
                    worst[what],
                    goal(worst),
                )
            )
    return made


def bench(quick: bool, only: tuple[str, ...] = ()) -> Found:
    """Run all, or these."""
    names = only or (QUICK if quick else tuple(choices()))
    networks = on_ranks(1, adopt_all, names)
    taken = [name for name in names if "refused" not in networks[name]]
    rows = on_ranks(2 if quick else MOST_RANKS, compare, taken, hours=12)
    return {"networks": networks, "cases": rows}, claims(networks, rows)
