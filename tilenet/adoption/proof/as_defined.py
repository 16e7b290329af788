"""Run a user module so that its result is what its operators define, and nothing else.

Some of torch's results depend on more than arguments: on random masks, on the memory format, on a
wrong gradient. Layers are compared with the module without these.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["AsDefined"]

TRAINING = 5  # place of batch norm's argument


class AsDefined(TorchFunctionMode):
    """While it is entered:

    - instance norm has its right gradient. torch 2.13 takes a wrong one on CPUs for one image whose
      incoming gradient has channels last;
    - nearest enlargement of float64 takes the cells that it takes of float32. Where two are equally
      near, torch takes either, as the memory format and the size have it.

    Args:
        drops: Whether dropout drops.
        frozen: Whether batch norm takes its running statistics, whatever it is told.
    """

    def __init__(self, *, drops: bool = True, frozen: bool = False) -> None:
        super().__init__()
        self.drops, self.frozen = drops, frozen

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), dict(kwargs or {})
        if not self.drops and name.rstrip("_123d").endswith("dropout"):
            return args[0] if args else kwargs["input"]
        place = 1 if func is F.batch_norm else 3  # of running statistics; torch's own is called too
        running = args[place] if len(args) > place else kwargs.get("running_mean")
        if self.frozen and name == "batch_norm" and running is not None:
            if len(args) > TRAINING:
                args = (*args[:TRAINING], False, *args[TRAINING + 1 :])
            else:
                kwargs["training"] = False
        if name == "interpolate" and (enlarged := _nearest(*args, **kwargs)) is not None:
            return enlarged
        out = func(*args, **kwargs)
        if name == "instance_norm" and out.requires_grad:
            out.register_hook(Tensor.contiguous)
        return out


def _nearest(x: Tensor, *, size: Any, mode: str, **_: Any) -> Tensor | None:
    """A map enlarged to a size by cells of float32; None: it is not enlarged so.

    Arguments are those of `interpolate`, as it hands them on by their names.
    """
    if mode != "nearest" or x.dim() != 4 or size is None:
        return None
    sizes = [int(one) for one in size] if isinstance(size, list | tuple) else [int(size)] * 2
    for dim, cells in ((2, sizes[0]), (3, sizes[1])):
        numbers = torch.arange(x.shape[dim], dtype=torch.float32)[None, None]
        taken = F.interpolate(numbers, cells, mode="nearest")[0, 0].long()
        x = x.index_select(dim, taken.to(x.device))
    return x
