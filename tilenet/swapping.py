"""Train modules whose saved activations do not fit: they wait in host memory or in a file.

    with swapping(model, limit_bytes=8 << 30) as statistics:
        for images, labels in batches:
            loss = criterion(model(images), labels)
            loss.backward()
            ...
    print(statistics)

Nothing is lost: gradients are the same bits. What a module computes outside of its `forward`, and
what the caller computes with its output, is not swapped.
"""

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from tilenet.errors import TilenetError
from tilenet.parallel.cell_actions import Action, acting
from tilenet.parallel.slabs import FileSlabs, PinnedSlabs, Slabs
from tilenet.parallel.swap import Swapper
from tilenet.parallel.swap_statistics import SwapStatistics

__all__ = ["swapping"]


@contextmanager
def swapping(
    model: nn.Module | Iterable[nn.Module],
    *,
    limit_bytes: int | None = 0,
    min_bytes: int = 1 << 20,
    lookahead: int = 2,
    swap_dir: str | None = None,
    host_limit_bytes: int | None = None,
    actions: Mapping[nn.Module, Action] | None = None,
) -> Iterator[SwapStatistics]:
    """Swap what the modules' operations save for backward.

    Backward may run inside of the context or behind it.

    Args:
        model: A module, or several: of a `Pipe` its `partitions`.
        limit_bytes: Of saved storages on their devices, together; beyond it they go out, those
            first that backward needs last. 0: all; None: none.
        min_bytes: Smaller storages stay, and do not count.
        lookahead: The next so many storages are fetched ahead in backward, as far as the limit
            allows.
        swap_dir: Folder of the file that they go to. None: pinned host memory where torch sees a
            GPU, else the folder for temporary files.
        host_limit_bytes: Of that memory or file; None: none.
        actions: What to do about each of some modules of the model, see
            `tilenet.parallel.cell_actions`; nothing is done about the others. None: the modules
            given are swapped.

    Yields:
        What happened so far.

    Raises:
        TilenetError: The folder is not writable, or an action is for no module of the model; in
            forward: there is no room, or a module that is computed again writes over its input.
    """
    models = [model] if isinstance(model, nn.Module) else list(model)
    if actions is None:
        actions = dict.fromkeys(models, "swap")
    parts = {part for one in models for part in one.modules()}
    strange = [part for part in actions if part not in parts]
    if strange:
        raise TilenetError(
            f"actions are for modules of the model (found: {len(strange)} of another, the first a "
            f"{type(strange[0]).__name__}); take them from model.modules()"
        )
    slabs: Slabs
    if swap_dir is None and torch.cuda.is_available():
        slabs = PinnedSlabs(host_limit_bytes)
    else:
        slabs = FileSlabs(swap_dir or tempfile.gettempdir(), host_limit_bytes)
    swapper = Swapper(limit_bytes, min_bytes, lookahead, slabs)
    with ExitStack() as stack:
        stack.callback(swapper.close)
        stack.enter_context(acting(list(actions), list(actions.values()), swapper))
        yield swapper.statistics
