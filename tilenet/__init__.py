"""Train segmentation networks on images far too large for one GPU, exactly."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilenet.adoption.adopt import adopt as adopt

__all__ = ["__version__", "adopt"]

__version__: str


def __getattr__(name: str) -> Any:
    # The halo calculator answers without torch.
    if name == "adopt":
        from tilenet.adoption.adopt import adopt

        return adopt
    if name == "__version__":
        from importlib.metadata import version

        return version("tilenet")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
