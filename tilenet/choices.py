"""Ways to compute a network: the choices that run files, plans and pipelines share."""

from typing import Literal

READ_AHEAD = 2  # micro-batches that are read before they are needed, unless the run file says more
VALUE_LOSSES = "l1", "l2", "huber"  # of a regression; the others are of classes

HaloMode = Literal["overlap", "exchange", "sweep", "windows"]
"""Source of the tiles' context: they read it, or layers exchange halos; swept tiles read it, and go
over it strip by strip; windows have none, and are blended."""

Checkpointing = Literal["always", "except_last", "never"]
"""The micro-batches that keep their input only and are computed again in backward."""

Device = Literal["auto", "cpu", "cuda", "xpu"]
"""What computes: the CPU, GPUs of NVIDIA or AMD (`cuda`) or of Intel (`xpu`), or whichever GPUs
torch sees."""

Pipelining = Literal["gpipe", "1f1b"]
"""Order of micro-batches in partitions: a mini-batch forward and then back, or each back as soon as
its loss is known, while others still go forward."""

Precision = Literal["float32", "tf32", "float64", "bfloat16", "float16"]
"""The last two run under autocast, with parameters in float32; `tf32` rounds factors alone."""
