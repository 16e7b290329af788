"""Which networks of people are taken, and why are the others refused?

    pip install -c constraints.txt '.[bench]'; pip install --no-deps torchgeo

Each network of the table is adopted with frozen batch norm, which proves its list of layers against
the module. It is then `taken`; or `refused` for the reason in tilenet's sentence; or `failed`: it
cannot be made or run by itself, it ends in an error that is no sentence of tilenet's, or adopting
it takes more than 60 CPU seconds. The table holds networks of segmentation_models_pytorch,
torchvision, MONAI and torchgeo, backbones of timm under a small head, and networks written out as
people do (`written.py`). Weights and statistics are random.

Some have attention: pixels look at others by softmax, in windows or by Fourier transforms. No layer
with a known neighbourhood does that. Global sums, as of channels by channels in EdgeNeXt, do not
count as such. Packages that are not installed are named, with their networks left out.

`--networks` takes names, or parts of names, such as `timm/resnet18`: it prints what becomes of
these, and keeps nothing.
"""

import importlib.util
import re
import signal
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

from bench.exactness.libraries import BANDS, SIZE_PX, Listed, networks_of_libraries
from bench.exactness.networks import Choice
from bench.report import Claim, Found, alone, at_least, at_most

LIMIT_S = 60  # of the CPU, for each network
QUICK = (
    "segmentation_models_pytorch/Unet/resnet18",
    "segmentation_models_pytorch/MAnet/resnet34",
    "torchvision/lraspp_mobilenet_v3_large",
    "timm/resnet18",
    "timm/mobilenetv3_large_100",
    "timm/convnextv2_atto",
    "monai/BasicUNet",
    "monai/SegResNet",
    "written/U-Net, transposed",
    "written/ENet",
    "written/ERFNet",
    "written/CBAM U-Net",
)
# Networks written out: the file, the class, what it is called with.
WRITTEN: dict[str, tuple[str, str, dict[str, Any]]] = {
    "U-Net, transposed": ("written_unets", "UNet", {}),
    "U-Net, bilinear": ("written_unets", "UNet", {"bilinear": True}),
    "U-Net, log_softmax": ("written_unets", "UNetLogSoftmax", {}),
    "U-Net, clamped": ("written_unets", "UNetClamped", {}),
    "Attention U-Net": ("written_unets", "AttentionUNet", {}),
    "SE U-Net": ("written_unets", "GatedUNet", {"gate": "se"}),
    "ECA U-Net": ("written_unets", "GatedUNet", {"gate": "eca"}),
    "CBAM U-Net": ("written_unets", "GatedUNet", {"gate": "cbam"}),
    "U-Net, adaptive maximum": ("written_unets", "GatedUNet", {"gate": "max"}),
    "scSE U-Net": ("written_unets", "GatedUNet", {"gate": "scse"}),
    "Non-local U-Net": ("written_unets", "GatedUNet", {"gate": "non local"}),
    "ResUNet": ("written_unets", "ResUNet", {}),
    "R2U-Net": ("written_unets", "R2UNet", {}),
    "U2-Net": ("written_unets", "U2Net", {}),
    "UNet++": ("written_unets", "NestedUNet", {}),
    "UNet 3+": ("written_unets", "UNet3Plus", {}),
    "nnU-Net": ("written_unets", "NNUNet", {}),
    "Tiramisu": ("written_unets", "Tiramisu", {}),
    "SegNet": ("written", "SegNet", {}),
    "ENet": ("written", "ENet", {"unpool": True}),
    "ENet, interpolated": ("written", "ENet", {"unpool": False}),
    "ERFNet": ("written", "ERFNet", {}),
    "D-LinkNet": ("written", "LinkNet", {}),
    "BiSeNet": ("written", "BiSeNet", {}),
    "ICNet": ("written", "ICNet", {}),
    "Fast-SCNN": ("written", "FastSCNN", {}),
    "ESPNet": ("written", "ESPNet", {}),
    "ShuffleNet V2": ("written", "Blocks", {"block": "shuffle"}),
    "LEDNet": ("written", "Blocks", {"block": "split", "shuffled": True}),
    "ConvNeXt V2": ("written", "Blocks", {"block": "grn"}),
    "NAFNet": ("written", "Blocks", {"block": "naf", "shuffled": True}),
    "GLU": ("written", "Blocks", {"block": "glu"}),
    "Replicated edges": ("written", "Blocks", {"block": "replicate"}),
    "Fourier convolutions": ("written", "Blocks", {"block": "fourier"}),
    "Shared head of a pyramid": ("written_heads", "SharedHead", {}),
    "Attention to scale": ("written_heads", "SharedScales", {}),
    "CoordConv": ("written_heads", "CoordConvNet", {}),
    "HED": ("written_heads", "HED", {}),
    "DenseASPP": ("written_heads", "DenseASPP", {}),
    "PraNet": ("written_heads", "ReverseAttention", {}),
    "Gate and 1 - gate": ("written_heads", "GatedShape", {}),
    "CycleGAN generator": ("written_heads", "Generator", {}),
    "CycleGAN generator, replicated": ("written_heads", "Generator", {"pad": "replicate"}),
    "FCN-8s": ("written_heads", "FCN8s", {}),
    "GCN": ("written_heads", "LargeKernels", {}),
    "RefineNet": ("written_heads", "RefineNet", {}),
    "Focus": ("written_heads", "Focus", {}),
    "Wavelets": ("written_heads", "Focus", {"wavelet": True}),
    "Blurred pooling": ("written_heads", "BlurPooled", {}),
    "Same padding, bicubic": ("written_heads", "SamePadded", {}),
    "STDC": ("written_heads", "STDC", {}),
    "OCR": ("written_heads", "OCR", {}),
    "DANet": ("written_heads", "DANet", {}),
    "FC-Siam-diff": ("written_heads", "ChangePair", {}),
}
WRITTEN_ATTENTION = "Non-local U-Net", "DANet", "Fourier convolutions"
OUTCOMES = "taken", "refused", "failed"
LEAST_NETWORKS = 150
SHARE, SHARE_OF_ALL = 0.95, 0.90


class OutOfTimeError(BaseException):
    """The limit is over; no `except Exception` on the way takes it for its own."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """End what runs longer, in CPU seconds."""

    def stop(*_: object) -> None:
        raise OutOfTimeError

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def table() -> dict[str, Listed]:
    """All networks by library and name."""
    listed = networks_of_libraries()
    for name, (file, maker, options) in WRITTEN.items():
        choice = Choice(f"bench.exactness.{file}:{maker}", options, BANDS)
        listed.append(Listed("written", name, choice, name in WRITTEN_ATTENTION))
    return {f"{one.library}/{one.name}": one for one in listed}


def adopt_each(names: list[str]) -> list[dict[str, Any]]:
    """Of each network what becomes of it."""
    warnings.simplefilter("ignore")
    rows = []
    for name in names:
        began, listed = time.process_time(), table()[name]
        outcome, reason = "failed", f"adopting it takes more than {LIMIT_S} CPU seconds"
        try:
            with limited(LIMIT_S):
                outcome, reason = outcome_of(listed)
        except OutOfTimeError:
            pass
        rows.append(
            {
                "library": listed.library,
                "name": listed.name,
                "attention": listed.attention,
                "outcome": outcome,
                "reason": reason,
                "seconds": time.process_time() - began,
            }
        )
    return rows


def outcome_of(listed: Listed) -> tuple[str, str]:
    """What becomes of a network, and why."""
    import torch

    from tilenet.adoption.adopt import adopt
    from tilenet.errors import TilenetError

    try:
        module = listed.choice.module()
        with torch.no_grad():
            module.eval()(torch.randn(1, listed.choice.bands, *SIZE_PX))
        module.train()
    except Exception as error:  # whatever people's code may raise
        return "failed", f"it does not run: {' '.join(str(error).split())[:200]}"
    try:
        adopt(module, listed.choice.bands)
    except TilenetError as error:
        return "refused", short_reason(str(error))
    except Exception as error:  # which a user would see
        return "failed", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return "taken", ""


def short_reason(sentence: str) -> str:
    """A sentence without its general rule and its remedy.

    "each layer's neighbourhood must be known, and WHY (PLACE: OPERATOR VALUES, LINE); REMEDY"
    becomes "OPERATOR: WHY", the first of several.
    """
    own = re.fullmatch(
        r"each layer's neighbourhood must be known, and (.*?) \(([^:]*): ([^\s,;)]+).*",
        sentence,
        re.DOTALL,
    )
    if own:
        return f"{own[3]}: {own[1]}"
    return re.sub(r"\s+", " ", sentence.rpartition("; ")[0] or sentence)[:200]


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """What must hold of the table."""
    apart = [row for row in rows if not row["attention"]]
    failed = [f"{row['library']}/{row['name']}" for row in rows if row["outcome"] == "failed"]
    named = f" ({', '.join(failed)})" if failed else ""
    return [
        at_least("networks in the table", len(rows), LEAST_NETWORKS),
        at_least(f"share taken of {len(apart)} networks without attention", share(apart), SHARE),
        at_least(f"share taken of all {len(rows)} networks", share(rows), SHARE_OF_ALL),
        at_most(f"networks that failed{named}", len(failed), 0),
    ]


def share(rows: list[dict[str, Any]]) -> float:
    """Part of the rows that is taken."""
    return Counter(row["outcome"] for row in rows)["taken"] / max(len(rows), 1)


def tables(rows: list[dict[str, Any]]) -> dict[str, list[list[str]]]:
    """What the page shows: totals by library, and networks that are not taken by reason."""
    totals = [["library", "networks", *OUTCOMES, "without attention", "of these taken"]]
    for library in (*dict.fromkeys(row["library"] for row in rows), "all"):
        own = [row for row in rows if library in (row["library"], "all")]
        apart = [row for row in own if not row["attention"]]
        outcomes = Counter(row["outcome"] for row in own)
        counts = len(own), *(outcomes[one] for one in OUTCOMES), len(apart)
        totals.append([library, *map(str, counts), f"{share(apart):.0%}"])
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row["outcome"] != "taken":
            name = f"{row['library']}/{row['name']}{' (attention)' if row['attention'] else ''}"
            reasons.setdefault(f"{row['outcome']}: {row['reason']}", []).append(name)
    most = sorted(reasons.items(), key=lambda item: -len(item[1]))
    return {
        "Networks by library": totals,
        "Networks that are not taken, under the first reason": [
            ["reason", "number", "networks"],
            *([reason, str(len(names)), "; ".join(names)] for reason, names in most),
        ],
    }


def bench(quick: bool, networks: tuple[str, ...] = ()) -> Found:
    """Adopt all, or these."""
    names = QUICK if quick else tuple(table())
    if networks:
        names = tuple(name for name in table() if any(one in name for one in networks))
    absent = sorted({table()[name].library for name in names} - set(installed()))
    if absent:
        print(f"not installed, so left out: {', '.join(absent)}")
    rows: list[dict[str, Any]] = []
    for library in dict.fromkeys(table()[name].library for name in names):
        own = [name for name in names if table()[name].library == library]
        if library not in absent:
            rows += alone(adopt_each, own, limit_s=3 * LIMIT_S * len(own))
    for row in rows if networks else ():
        print(f"{row['outcome']}: {row['library']}/{row['name']} {row['reason']}")
    versions = {name: version(name) for name in sorted(installed()) if name != "written"}
    figures = {"networks": rows, "absent": absent, "of": versions, "tables": tables(rows)}
    return figures, [] if networks else claims(rows)


def installed() -> list[str]:
    """Libraries of the table that can be imported."""
    libraries = {one.library for one in table().values()}
    return [name for name in libraries if name == "written" or importlib.util.find_spec(name)]
