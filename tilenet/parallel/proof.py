"""Compare ranks and tiles with the network on the whole image: rank 0 reports, or all refuse.

In float64 nothing but the order of sums differs. Elsewhere the same network on the whole image on
one device differs from float64 by its own rounding, which says how far ranks may be.
"""

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from tilenet.errors import AgreedError
from tilenet.mpi import Comm
from tilenet.parallel.health.exchange_clock import EXCHANGING
from tilenet.parallel.health.progress import say
from tilenet.parallel.ranks.tf32 import tf32_if_asked

# Relative to the largest value. Some hundred layers leave 1e-15 to 1e-13; norms of few cells blow
# that up by 1/√ε, 300 times, and gradients pass them twice. A halo that is short by a pixel, or a
# sum that a rank lacks, is off by 1e-6 and more.
LIMITS = {"logits": 1e-9, "gradients": 1e-8}
LEAST_LIMIT, TIMES_ROUNDING = 1e-4, 50.0  # in float32: its kernels depend on the tile's size


@dataclass(frozen=True)
class Difference:
    """The difference of logits or gradients from those of the whole image.

    Attributes:
        what: The compared tensors: `logits` or `gradients`.
        apart: Largest difference, relative to the largest value.
        rounding: The same difference for one device in the same precision; None in float64.
        own: The same difference of the network itself, for an image that differs by rounding; 0
            if it was not measured.
        where: Place of the largest difference, for people.
    """

    what: str
    apart: float
    rounding: float | None = None
    where: str = ""
    own: float = 0.0

    @property
    def limit(self) -> float:
        """The largest difference that rounding explains."""
        if self.rounding is None:
            return LIMITS[self.what]
        return max(LEAST_LIMIT, TIMES_ROUNDING * self.rounding)


def largest(values: Tensor, expected: Tensor) -> float:
    """The largest difference; infinite if any value is NaN."""
    if not expected.numel():
        return 0.0
    apart = (values.detach().double().cpu() - expected.double().cpu()).abs().max()
    return float(apart.nan_to_num(nan=torch.inf))


def with_zeros(images: Tensor) -> Tensor:
    """Copies of random images (N, C, H, W) with a block of zeros, as nodata and water are.

    Cells in it are equal, and ratios and logarithms are not finite. It meets borders of tiles, but
    not all along.
    """
    rows, cols = images.shape[2:]
    images = images.clone()
    images[..., rows // 4 : 5 * rows // 8, cols // 4 : 5 * cols // 8] = 0.0
    return images


def scale_of(tensors: Iterable[Tensor]) -> float:
    """The largest of all values, to divide differences by; never 0."""
    return max(max((float(tensor.abs().max()) for tensor in tensors), default=0.0), 1e-30)


def proof_precision(devices: Sequence[torch.device], comm: Comm) -> str:
    """float64 on CPUs, float32 where a rank has another device. Collective."""
    others = any(device.type != "cpu" for device in devices)
    return "float32" if any(comm.allgather(others)) else "float64"


@contextmanager
def no_trace(devices: Sequence[torch.device]) -> Generator[None, None, None]:
    """Leave random states, clocks and the memory of devices as they were."""
    kind = devices[0].type  # of all of them
    numbers = sorted({device.index or 0 for device in devices if kind != "cpu"})
    # TF32's rounding is larger than the effect of many mistakes.
    with torch.random.fork_rng(numbers, device_type=kind), tf32_if_asked("float32"):
        yield
    EXCHANGING.take()
    if numbers:
        torch.get_device_module(kind).empty_cache()


def check_rounding(differences: Sequence[Difference], how: str, off: str) -> None:
    """Refuse differences that are more than rounding; all ranks give the same.

    Args:
        how: Ranks, mode and partitions, for people.
        off: Way to turn the proof off, in words.

    Raises:
        AgreedError: A difference is more than rounding.
    """
    for difference in differences:
        what, apart, limit = difference.what, difference.apart, difference.limit
        if limit < apart <= TIMES_ROUNDING * difference.own:
            raise AgreedError(
                f"a network must not make rounding large (float64, {how}: {what} of a small random "
                f"image differ by {apart:.1e} of the largest, and by {difference.own:.1e} on "
                "one rank where pixels differ by 1e-15: random weights under frozen batch norm do "
                f"so); load weights, use batch_norm: step, or {off} for a result that depends on "
                "ranks and tiles"
            )
        if not apart <= limit:
            raise AgreedError(
                f"ranks and tiles give the numbers of the network on the whole image ({how}: "
                f"{what} of a small random image{difference.where} differ by {apart:.1e} of the "
                f"largest, rounding is at most {limit:.0e}); report it, please, and until then "
                f"use one rank and one tile, or {off} for a result that depends on them"
            )


def say_or_refuse(
    differences: Sequence[Difference], how: str, note: str, off: str, comm: Comm
) -> None:
    """Check the differences as `check_rounding`, and have rank 0 print them. Collective.

    Args:
        note: Text after the differences.

    Raises:
        AgreedError: A difference is more than rounding.
    """
    check_rounding(differences, how, off)
    if comm.rank == 0:
        measured = ", ".join(f"{d.what} {d.apart:.0e}" for d in differences)
        rounding = ", ".join(f"{d.rounding:.0e}" for d in differences if d.rounding is not None)
        rounding = f" (float32, one device: {rounding})" * bool(rounding)
        say(f"proved on {how}: {measured}{rounding}{note}")


def say_why_not(reason: str, comm: Comm) -> None:
    """Have rank 0 say why nothing was proved, where there is a reason."""
    if reason and comm.rank == 0:
        say(f"not proved: {reason}")
