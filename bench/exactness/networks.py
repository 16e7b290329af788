"""Anybody's networks over ranks: the numbers of their module on the whole image?

    pip install -c constraints.txt '.[bench]'
    python -m bench.exactness.networks [--quick] [--only NAME …] [--every]

Each network of segmentation_models_pytorch and torchvision is adopted, in seconds, with its
computed context next to the one that a gradient shows (where group norm takes statistics of the
image, as in FPN, that reaches all of it). Then its layers run over 1, 2, 3, 4 and 6 ranks on random
pixels in float64, forward and backward, in both halo modes, with frozen batch norm and with that of
a step, in 1 to 3 partitions, and are held against the module itself on the whole image: largest
differences of logits, relative to the largest logit, and of gradients, relative to the largest of
their tensor (or 1e-6 of the largest of all: biases in front of batch norm, whose gradient is 0 but
for rounding, are far off by this measure). Ranks, modes and partitions take turns so that each
network meets all of them, for networks of which a step takes seconds; --every runs all networks and
combinations. Operations of a training step are counted on the middle one of 3 × 3 tiles of 1250 and
5000 px, over a ninth of the image's.
"""

import argparse
import json
import sys
import time
import warnings
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any

from bench.report import ROOT, Claim, at_most, mpiexec, report

if TYPE_CHECKING:
    from torch import Tensor, nn

    from tilenet.adoption.adopt import Adopted

sys.path.insert(0, str(ROOT / "tests" / "exactness"))

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
# Those of which a step takes seconds on two cores; --every compares all.
COMPARED = (
    "Unet/resnet18", "Unet/efficientnet-b0", "Unet/mobilenet_v2", "Unet/tu-regnety_002",
    "Linknet/resnet34", "FPN/resnet34", "PSPNet/resnet34", "lraspp_mobilenet_v3_large",
)  # fmt: skip
RANKS = (1, 2, 3, 4, 6)
LEAST_PX = 317, 451
TILES_PX = 1250, 5000


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

        from tilenet.adoption.source import made

        if not hasattr(torch.ops.torchvision, "nms"):
            # The wheel for a torch without CUDA lacks its operators, which are only declared here.
            for name in ("nms", "qnms"):
                torch.library.define(
                    f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou) -> Tensor"
                )
        module = made(self.maker, self.options)
        generator = torch.Generator().manual_seed(2)
        for part in module.modules():
            if isinstance(part, torch.nn.BatchNorm2d) and part.running_var is not None:
                part.running_mean.normal_(0, 0.1, generator=generator)  # type: ignore[union-attr]
                part.running_var.uniform_(0.5, 1.5, generator=generator)
        return module


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

    found: dict[str, dict[str, Any]] = {}
    for name in names:
        one = choices()[name]
        module = one.module()
        began = time.perf_counter()
        try:
            adopted = adopt(module, one.bands)
        except TilenetError as error:
            found[name] = {"refused": str(error), "seconds": time.perf_counter() - began}
            continue
        seconds = time.perf_counter() - began
        context = adopted.context
        row = {"seconds": seconds, "layers": len(adopted.layers), **asdict(context)}
        row["probed_px"] = probed_px(adopted)
        row["work"] = {str(px): asdict(work_of(adopted.layers, 3 * px, (3, 3))) for px in TILES_PX}
        found[name] = row
    return found


def probed_px(adopted: "Adopted") -> int:
    """Pixels that an aligned tile's output looks at on one side, as a gradient shows them.

    On a strip of the image, along which it reaches; averages of the whole image pass none on.
    """
    import torch

    network = adopted.network().eval()
    for layer, module in zip(adopted.layers, network, strict=True):
        if layer.kind == "global_pool":
            module.register_forward_hook(lambda *seen: seen[2].detach())
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

    mode: str
    batch_norm: str
    partitions: int


def ways(turn: int, *, every: bool) -> list[Way]:
    """All, or those that a network takes on its turn."""
    all_ways = [
        Way(*one) for one in product(("overlap", "exchange"), ("frozen", "step"), (1, 2, 3))
    ]
    if every:
        return all_ways
    pairs = [(m, b) for m in ("overlap", "exchange") for b in ("frozen", "step")]
    return [Way(*pairs[turn % 4], 1 + turn % 3)]


def compare(names: list[str], *, every: bool) -> None:
    """On this job's ranks, and on the first few of them: rank 0 prints a JSON line of all cases."""
    from mpi4py import MPI

    from tilenet.adoption.adopt import adopt
    from tilenet.parallel.ranks.comm import wait_quietly

    comm, rows = MPI.COMM_WORLD, []
    for (number, name), batch_norm in product(enumerate(names), ("frozen", "step")):
        adopted, one = None, choices()[name]
        if comm.rank == 0:
            adopted = adopt(one.module(), one.bands, batch_norm)  # type: ignore[arg-type]
        wait_quietly(comm)
        adopted = comm.bcast(adopted)
        for turn, ranks in enumerate(one for one in RANKS if one <= comm.size):
            some = comm.Split(int(comm.rank >= ranks), comm.rank)
            for way in ways(number + turn, every=every) if comm.rank < ranks else []:
                if way.batch_norm == batch_norm:
                    began = time.perf_counter()
                    row = {"network": name, "ranks": ranks, **asdict(way)}
                    row |= differences(name, adopted, way, some)
                    row["seconds"] = time.perf_counter() - began
                    rows.append(row)
            some.Free()
            wait_quietly(comm)
    if comm.rank == 0:
        print(json.dumps(rows))


def differences(name: str, adopted: "Adopted", way: Way, comm: Any) -> dict[str, Any]:
    """Largest ones of logits and gradients from the module on the whole image. Collective."""
    from shared_out import Case, grids, shared_out

    from tilenet.errors import TilenetError
    from tilenet.geometry.ownership import check_shares

    @dataclass(frozen=True)
    class Trained(Case):
        adopted: Any = field(default=None)

        def network(self) -> Any:
            import torch

            network = self.adopted.network(torch.float64).train()
            network.mask_key.step = 3
            for module in network:
                if hasattr(module, "probability"):
                    module.probability = 0.0  # the module's masks are others
            return network

    context = adopted.context
    unit, choice = context.alignment_px, grids(comm.size)
    grid = choice[len(choice) // 2]
    units = [max(-(-px // unit), 2 * n) for px, n in zip(LEAST_PX, grid, strict=True)]
    images = 2 if way.batch_norm == "step" else 1
    halo = context.halo_px if way.mode == "overlap" else 0
    while True:
        size = units[0] * unit, units[1] * unit
        case: Any = Trained(
            adopted.layers, size, grid, unit, halo, way.mode, images, way.partitions,  # type: ignore[arg-type]
            threads=way.partitions > 1, adopted=adopted,
        )  # fmt: skip
        try:
            if way.mode == "exchange":
                for spans, axis in ((case.tiling.rows, "rows"), (case.tiling.cols, "columns")):
                    check_shares(adopted.layers, spans, axis)
            break
        except TilenetError:
            units = [one + n for one, n in zip(units, grid, strict=True)]
    found = shared_out(case, comm, stacked=way.batch_norm == "step")
    if comm.rank:
        return {}
    logits, gradients = whole(choices()[name].module(), case, way.batch_norm)
    ours = {adopted.names[own]: value for own, value in found.parameters.items()}
    ours |= {f"image {number}": value for number, value in enumerate(found.images)}
    floor = 1e-6 * max(float(one.abs().max()) for one in gradients.values())
    wanted = {name: gradients[name] for name in ours}
    return {
        "size": size,
        "grid": grid,
        "logits": max(map(apart, found.outputs, logits)),
        "gradients": max(apart(ours[one], wanted[one], floor) for one in ours),
    }


def apart(found: "Tensor", wanted: "Tensor", floor: float = 0.0) -> float:
    """Largest difference over the largest value, or over `floor` if that is less."""
    most = max(float(wanted.abs().max()), floor)
    return float((found.view_as(wanted) - wanted).abs().max()) / most


def whole(
    module: "nn.Module", case: Any, batch_norm: str
) -> tuple[list["Tensor"], dict[str, "Tensor"]]:
    """Logits and gradients of the module itself."""
    import torch
    from shared_out import gradient, weights_like

    module = module.double().eval()
    if batch_norm == "step":
        for part in module.modules():
            part.train(isinstance(part, torch.nn.BatchNorm2d))
    images = [image.requires_grad_() for image in case.inputs()]
    out = module(torch.cat(images))
    out = out["out"] if isinstance(out, dict) else out
    logits = torch.split(out, 1)
    sum((weights_like(one) * one.square()).sum() for one in logits).backward()  # type: ignore[union-attr]
    found = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    found |= {f"image {number}": gradient(image) for number, image in enumerate(images)}
    return [one.detach() for one in logits], found


def claims(networks: dict[str, dict[str, Any]], rows: list[dict[str, Any]]) -> list[Claim]:
    """What must hold of all networks."""
    taken = {name: one for name, one in networks.items() if "refused" not in one}
    num_compared = len({row["network"] for row in rows})
    made = [
        at_most(
            f"{what} off the module's, {len(rows)} cases of {num_compared} networks",
            max(row[what] for row in rows),
            goal,
        )
        for what, goal in (("logits", 1e-12), ("gradients", 1e-10))
    ]
    over = max(one["probed_px"] - one["context_aligned_px"] for one in taken.values())
    made.append(at_most("context that a gradient shows beyond the computed one, pixels", over, 0))
    slowest = max(taken, key=lambda name: taken[name]["seconds"])
    seconds = taken[slowest]["seconds"]
    made.append(at_most(f"seconds to adopt a network ({slowest})", seconds, 5))
    for px in TILES_PX:
        work = max(one["work"][str(px)]["exchange"] for one in taken.values())
        made.append(at_most(f"operations with exchange at {px} px, over the image's", work, 1.04))
    wrong = [
        name for name, one in networks.items()
        if ("refused" in one) != (name.split("/")[0] in REFUSED)
    ]  # fmt: skip
    made.append(at_most(f"networks refused or taken wrongly ({', '.join(wrong)})", len(wrong), 0))
    return made


def main() -> None:
    """Run all and print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--every", action="store_true")
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--adopt", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--compare", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    this = "-m", "bench.exactness.networks"
    if given.adopt:
        print(json.dumps(adopt_all(given.adopt)))
        return
    if given.compare:
        compare(given.compare, every=given.every)
        return
    names = given.only or (list(QUICK) if given.quick else list(choices()))
    networks = json.loads(mpiexec(1, *this, "--adopt", *names).splitlines()[-1])
    taken = [name for name in names if "refused" not in networks[name]]
    compared = taken if given.every or given.only else [one for one in taken if one in COMPARED]
    more = ["--every"] if given.every else []
    printed = mpiexec(
        2 if given.quick else max(RANKS), *this, *more, "--compare", *compared, timeout=12 * 3600
    )
    rows = json.loads(printed.splitlines()[-1])
    report("networks", {"networks": networks, "cases": rows}, claims(networks, rows))


if __name__ == "__main__":
    main()
