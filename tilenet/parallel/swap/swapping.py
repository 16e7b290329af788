"""Train modules whose saved activations do not fit: they wait in host memory or in a file."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from tilenet.errors import TilenetError
from tilenet.parallel.swap.host_pool import open_slabs
from tilenet.parallel.swap.statistics import SwapStatistics
from tilenet.parallel.swap.swap_in_forward import SwapInForward
from tilenet.parallel.swap.swapper import Swapper


@contextmanager
def swapping(
    model: nn.Module | Iterable[nn.Module],
    *,
    limit_bytes: int | None = 0,
    min_bytes: int = 1 << 20,
    lookahead: int = 2,
    swap_dir: str | None = None,
    host_limit_bytes: int | None = None,
) -> Iterator[SwapStatistics]:
    """Swap what the modules' operations save for backward.

        with tilenet.swapping(model, limit_bytes=8 << 30) as statistics:
            for images, labels in batches:
                loss = criterion(model(images), labels)
                loss.backward()
                ...
        print(statistics)

    Nothing is lost: gradients are the same bits. What a module computes outside of its `forward`,
    and what the caller computes with its output, is not swapped. Backward may run inside of the
    context or behind it.

    Args:
        model: A module, or several: of a `Pipe` its `partitions`.
        limit_bytes: Of saved storages on their devices, together; beyond it they go out, those
            first that backward needs last. 0: all; None: none.
        min_bytes: Smaller storages stay, and do not count.
        lookahead: Storages that are fetched ahead in backward, as far as the limit allows.
        swap_dir: Folder of the file that they go to. None: pinned host memory where torch sees a
            GPU, else the folder for temporary files.
        host_limit_bytes: Bytes of that memory or file; None: none.

    Yields:
        What happened so far.

    Raises:
        TilenetError: The folder is not writable, or a module has no forward; in forward: there is
            no room.
    """
    models = [model] if isinstance(model, nn.Module) else list(model)
    bare = [m for m in models if type(m).forward is nn.Module.forward and "forward" not in vars(m)]
    if bare:
        raise TilenetError(
            f"what modules save in forward is swapped ({type(bare[0]).__name__} has no forward); "
            "give the module that is called"
        )
    slabs = open_slabs(swap_dir, host_limit_bytes, pinned=torch.accelerator.is_available())
    swapper = Swapper(limit_bytes, min_bytes, lookahead, slabs)
    try:
        with SwapInForward(swapper).around(models):
            yield swapper.statistics
    finally:
        swapper.close()
