"""TF32 where `precision: tf32` asks for it, and nowhere else.

Unless told otherwise torch lets convolutions on GPUs of compute capability 8 and later round the
factors of float32 to 10 bits of mantissa. Its flags are the process's: workers of pipelines and
autograd's threads obey them too.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tilenet.mpi import Comm
from tilenet.parallel.health.progress import say


@contextmanager
def tf32_if_asked(precision: str) -> Generator[None, None, None]:
    """Compute float32 with TF32 where `precision` is `tf32`, else without; afterwards as before."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    flags: list[tuple[Any, str]] = [(cudnn, "allow_tf32"), (matmul, "allow_tf32")]
    value: bool | str = precision == "tf32"
    try:
        before = [getattr(*flag) for flag in flags]
    except RuntimeError:  # the flags that replace these are set, and they do not mix
        owners: tuple[Any, ...] = (cudnn.conv, cudnn.rnn, matmul)  # type: ignore[attr-defined]
        flags = [(owner, "fp32_precision") for owner in owners]
        value = "tf32" if value else "ieee"
        before = [getattr(*flag) for flag in flags]
    try:
        for flag in flags:
            setattr(*flag, value)
        yield
    finally:
        for flag, old in zip(flags, before, strict=True):
            setattr(*flag, old)


def has_tf32(device: torch.device) -> bool:
    """Whether a device computes with TF32."""
    if device.type != "cuda" or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def say_where_no_tf32(precision: str, devices: Sequence[torch.device], comm: Comm) -> None:
    """Have rank 0 say that `tf32` is float32, where a rank has a device without it. Collective."""
    if precision == "tf32":
        lacking = [str(device) for device in devices if not has_tf32(device)]
        of_ranks = [(rank, names[0]) for rank, names in enumerate(comm.allgather(lacking)) if names]
        if comm.rank == 0 and of_ranks:
            rank, device = of_ranks[0]
            say(f"precision: tf32 is float32 on devices without TF32 (rank {rank}: {device})")
