"""Train segmentation networks on images far too large for one GPU, exactly."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilenet.adoption.adopt import adopt as adopt

__all__ = ["adopt"]


def __getattr__(name: str) -> Any:
    # The halo calculator answers without torch.
    if name == "adopt":
        from tilenet.adoption.adopt import adopt

        return adopt
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
