"""Run a user module so that its result depends on the definitions of its operators alone.

Some of torch's results depend on more than their arguments: on random masks, the memory format, the
default type, or a wrong gradient. The proof compares layers with the module without these.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

TRAINING = 5  # place of batch norm's argument `training`


class AsDefined(TorchFunctionMode):
    """Context manager that changes three of torch's results:

    - instance norm has its right gradient. torch 2.13 computes a wrong one on CPUs for one image
      with channels last in its incoming gradient;
    - nearest enlargement of float64 takes the cells that it takes of float32. Where two are equally
      near, torch's choice depends on the memory format and the size;
    - numbers that are created in float32 or without a type, and results of whole numbers, are
      float64, as the module is.

    Args:
        drops: Whether dropout drops.
        frozen: Whether batch norm takes its running statistics, whatever its arguments.
    """

    def __init__(self, *, drops: bool = True, frozen: bool = False) -> None:
        super().__init__()
        self.drops, self.frozen = drops, frozen
        self.hooked = False  # whether a function that may change gradients was hooked to a map

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), dict(kwargs or {})
        self.hooked |= name == "register_hook"
        if not self.drops and name.rstrip("_123d").endswith("dropout"):
            return args[0] if args else kwargs["input"]
        if name == "float" and not args[0].is_floating_point():
            return args[0].double()
        # Place of the running statistics; torch.batch_norm, which F.batch_norm calls, has another.
        place = 1 if func is F.batch_norm else 3
        running = args[place] if len(args) > place else kwargs.get("running_mean")
        if self.frozen and name == "batch_norm" and running is not None:
            if len(args) > TRAINING:
                args = (*args[:TRAINING], False, *args[TRAINING + 1 :])
            else:
                kwargs["training"] = False
        if name == "interpolate" and (enlarged := _nearest(*args, **kwargs)) is not None:
            return enlarged
        if not any(isinstance(x, Tensor) and x.is_floating_point() for x in args):
            args = tuple(torch.float64 if x is torch.float32 else x for x in args)
            kwargs = {n: torch.float64 if x is torch.float32 else x for n, x in kwargs.items()}
        out = func(*args, **kwargs)
        if kwargs.get("dtype") is None and _is_default(name, args, out):
            with wide_numbers():
                return func(*args, **kwargs)
        if name == "instance_norm" and out.requires_grad:
            out.register_hook(Tensor.contiguous)
        return out


def _is_default(name: str, args: tuple[Any, ...], out: Any) -> bool:
    """Whether a result is float32 by default only: computed from whole numbers, or steps."""
    tensors = [x for x in args if isinstance(x, Tensor)]
    whole = not any(x.is_floating_point() for x in tensors)
    narrow = isinstance(out, Tensor) and out.dtype == torch.float32
    return narrow and whole and (bool(tensors) or name in ("arange", "linspace"))


@contextmanager
def wide_numbers() -> Iterator[None]:
    """Create numbers in float64 inside the context where no type is given."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _nearest(x: Tensor, *, size: Any, mode: str, **_: Any) -> Tensor | None:
    """Enlarge a map to a size by the cells that float32 takes; None: for other interpolations.

    Takes the arguments of `interpolate`, which passes them on by name.
    """
    if mode != "nearest" or x.dim() != 4 or size is None:
        return None
    sizes = [int(n) for n in size] if isinstance(size, list | tuple) else [int(size)] * 2
    for dim, cells in ((2, sizes[0]), (3, sizes[1])):
        numbers = torch.arange(x.shape[dim], dtype=torch.float32)[None, None]
        sources = F.interpolate(numbers, cells, mode="nearest")[0, 0].long()
        x = x.index_select(dim, sources.to(x.device))
    return x
