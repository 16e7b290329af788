"""The rule for reading tiles: the pixels around their own pixels, and the grid they start on."""

from dataclasses import dataclass

from tilenet.errors import TilenetError
from tilenet.geometry.halo import context_of
from tilenet.geometry.layers import Layer
from tilenet.geometry.opaque import opaque_of


@dataclass(frozen=True)
class HaloRule:
    """The rule that derives a tile's read window from its own window.

    Attributes:
        halo_px: Pixels that are read on each side of an own window.
        alignment_px: Own windows start at multiples of this number of pixels.
        offset_px: Pixel of the read window on which output cell 0 lies.
        valid_layers: The layers of an unpadded network: its read windows reach over the raster's
            edges and must have a legal size. Empty for *same* padding: its windows are shifted
            inside instead.
        exact: Whether tiles give the result of the whole raster.
        exchanged: Whether neighbours send halos layer by layer, so that a tile reads its own pixels
            alone.
    """

    halo_px: int
    alignment_px: int
    offset_px: int = 0
    valid_layers: tuple[Layer, ...] = ()
    exact: bool = True
    exchanged: bool = False


def halo_rule(
    halo: int | str, layers: tuple[Layer, ...], epsilon_px: int = 0, *, exchanged: bool = False
) -> HaloRule:
    """The halo rule for a run's key `halo`.

    Args:
        halo: `exact`; `epsilon`: the paper's tiling, without alignment; or a number of pixels.
        epsilon_px: The paper's halo for this network; 0: it has none.
        exchanged: Whether neighbours send halos layer by layer; `halo` is ignored then.

    Raises:
        TilenetError: The network does not allow this halo, or the pixels break the alignment.
    """
    context = context_of(layers)
    if exchanged:
        return HaloRule(0, context.alignment_px, exchanged=True)
    if (opaque := opaque_of(layers)) is not None:
        if halo != "exact":
            raise TilenetError(
                f"windows of any network overlap by half (halo: {halo}, window: "
                f"{opaque.window_px} px); use halo: exact"
            )
        return HaloRule(opaque.step_px, opaque.step_px, exact=False)
    unit = context.alignment_px
    if halo == "exact":
        valid_layers = layers if context.valid else ()
        return HaloRule(context.halo_px, unit, context.offset_px, valid_layers)
    if context.valid:
        raise TilenetError(
            f"an unpadded network's halo follows from its layers (halo: {halo}, padding: valid); "
            "use halo: exact"
        )
    if halo == "epsilon" and not epsilon_px:
        raise TilenetError(
            "the paper's halo is one of U-Nets (halo: epsilon, the network is a module); use halo: "
            "exact"
        )
    if halo == "epsilon":
        return HaloRule(epsilon_px, 1, exact=False)
    if not isinstance(halo, int):
        raise TilenetError(f"halo is exact, epsilon or a number of pixels (halo: {halo})")
    if halo < 0 or halo % unit:
        lower = max(0, halo // unit * unit)
        raise TilenetError(
            f"a halo must be a multiple of the network's total stride (halo: {halo} px, stride: "
            f"{unit} px); nearest: {lower} or {lower + unit}, or halo: epsilon for the paper's"
        )
    return HaloRule(halo, unit, exact=halo >= context.halo_px)
