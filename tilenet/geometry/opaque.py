"""A module that stays as it is: what it looks at is unknown, so it runs on windows of one size.

Windows of a map overlap by half. So the windows that touch what a tile owns begin half a window
before it, and each pixel away from the image's edges lies in four of them.
"""

from dataclasses import dataclass
from typing import ClassVar

from tilenet.errors import TilenetError
from tilenet.geometry.layers import Layer

__all__ = ["Opaque", "no_code", "opaque_of"]

MOST_UNIT_PX = 32  # of the grid on which crops begin


@dataclass(frozen=True)
class Opaque(Layer):
    """The whole network as one layer, which is no list of layers.

    Attributes:
        window_px: Height and width of the windows that it runs on, an even number.
        code: What makes it, as in `package:function`; for people, since a file names no code to
            run.
    """

    window_px: int
    code: str

    kind: ClassVar[str] = "opaque"

    @property
    def note(self) -> str:
        """What is said of a run and of a map, and stands in the map's metadata."""
        return (
            f"approximate: it sees windows of {self.window_px} × {self.window_px} px and nothing "
            "around them; maps are blended of windows that overlap by half"
        )

    @property
    def step_px(self) -> int:
        """From one window of a map to the next."""
        return self.window_px // 2

    @property
    def unit_px(self) -> int:
        """Crops begin on multiples of this: the largest power of two, up to 32, of the window."""
        return min(self.window_px & -self.window_px, MOST_UNIT_PX)


def opaque_of(layers: tuple[Layer, ...]) -> Opaque | None:
    """The network's only layer, where it is a module as it is; None: it is a list of layers."""
    return layers[0] if layers and isinstance(layers[0], Opaque) else None


def no_code(layer: Opaque, where: str) -> TilenetError:
    """What is said where the module is needed and nobody named it."""
    return TilenetError(
        f"a checkpoint of windows holds weights, not the module's code ({where}: {layer.code}); "
        f"map with --network {layer.code} and its --options, in Python with module="
    )
