"""An opaque module: its receptive field is unknown, so it runs on windows of one size.

Windows of a map overlap by half. So the windows that touch a tile's own pixels begin half a window
before them, and each pixel away from the image's edges lies in four windows.
"""

from dataclasses import dataclass
from typing import ClassVar

from tilenet.errors import TilenetError
from tilenet.geometry.layers import Layer

MOST_UNIT_PX = 32  # largest spacing of the grid that crops begin on


@dataclass(frozen=True)
class Opaque(Layer):
    """A whole network as one layer.

    Attributes:
        window_px: Height and width of the windows that it runs on, an even number.
        code: Name of the function that builds the module, `package:function`; only for messages.
        digest: Digest of the module's parts and their options; "": not known.
    """

    window_px: int
    code: str
    digest: str = ""

    kind: ClassVar[str] = "opaque"

    @property
    def note(self) -> str:
        """Note that a run prints, and that is kept in a map's metadata."""
        return (
            f"approximate: it sees windows of {self.window_px} × {self.window_px} px and nothing "
            "around them; maps are blended from windows that overlap by half"
        )

    @property
    def step_px(self) -> int:
        """Pixels from one window of a map to the next."""
        return self.window_px // 2

    @property
    def unit_px(self) -> int:
        """Spacing of the crops: the largest power of two, up to 32, that divides `window_px`."""
        return min(self.window_px & -self.window_px, MOST_UNIT_PX)


def opaque_of(layers: tuple[Layer, ...]) -> Opaque | None:
    """The only layer of an opaque module; None: the network is a list of layers."""
    return layers[0] if layers and isinstance(layers[0], Opaque) else None


def no_code(layer: Opaque, where: str) -> TilenetError:
    """The error of a command that needs the opaque module and does not name it."""
    return TilenetError(
        f"a checkpoint of windows holds weights, not the module's code ({where}: {layer.code}); "
        f"map with --network {layer.code} and its --options, in Python with module="
    )
