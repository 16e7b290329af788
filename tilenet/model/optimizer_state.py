"""What an optimizer keeps of a parameter, looked at before it goes on with it."""

import torch
from torch import Tensor

from tilenet.errors import TilenetError

__all__ = ["check_state"]

ADAMW = frozenset({"step", "exp_avg", "exp_avg_sq"})
SGD = frozenset({"momentum_buffer"})


def check_state(
    name: str,
    parameter: Tensor,
    kept: dict[str, Tensor],
    optimizer: torch.optim.Optimizer,
    source: str,
) -> None:
    """Refuse tensors that the optimizer does not keep, or that do not fit the parameter.

    Raises:
        TilenetError: With the first of them.
    """
    wanted = ADAMW if isinstance(optimizer, torch.optim.AdamW) else SGD
    wrong = sorted(wanted ^ set(kept)) or [
        key
        for key, value in sorted(kept.items())
        if not value.is_floating_point()
        or (value.numel() != 1 if key == "step" else value.shape != parameter.shape)
        or not value.double().isfinite().all()
    ]
    if wrong:
        raise TilenetError(
            f"an optimizer goes on with what it kept of each parameter, in finite numbers "
            f"({source}: {wrong[0]} of {name} is missing, unknown or of another shape); use "
            "another checkpoint"
        )
