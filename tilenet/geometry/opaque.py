"""A module that stays as it is: its receptive field is unknown, so it runs on windows of one size.

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
        code: Name of the function that makes it, as in `package:function`; for people only.
    """

    window_px: int
    code: str

    kind: ClassVar[str] = "opaque"

    @property
    def note(self) -> str:
        """The note about a run and a map, which is in the map's metadata too."""
        return (
            f"approximate: it sees windows of {self.window_px} × {self.window_px} px and nothing "
            "around them; maps are blended of windows that overlap by half"
        )

    @property
    def step_px(self) -> int:
        """Pixels from one window of a map to the next."""
        return self.window_px // 2

    @property
    def unit_px(self) -> int:
        """Crops begin on multiples of this: the largest power of two, up to 32, of the window."""
        return min(self.window_px & -self.window_px, MOST_UNIT_PX)


def opaque_of(layers: tuple[Layer, ...]) -> Opaque | None:
    """The only layer of a module as it is; None: the network is a list of layers."""
    return layers[0] if layers and isinstance(layers[0], Opaque) else None


def no_code(layer: Opaque, where: str) -> TilenetError:
    """The error where the module is needed and not named."""
    return TilenetError(
        f"a checkpoint of windows holds weights, not the module's code ({where}: {layer.code}); "
        f"map with --network {layer.code} and its --options, in Python with module="
    )
