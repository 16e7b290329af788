"""Announce a map before it is made: its method, and everything that makes it approximate."""

from tilenet.data.rasters.onto_grid import resampling_notes
from tilenet.data.rasters.raster import Raster
from tilenet.geometry.layers import Norm
from tilenet.geometry.windows import Window, overlap
from tilenet.mapping.map_source import MapSource
from tilenet.parallel.health.progress import say
from tilenet.planning.maps.question import MapPlan


def _announce_part(plan: MapPlan, window: Window, image: Raster) -> None:
    if window == image.whole:
        return
    touched = sum(overlap(tile.own, window) is not None for tile in plan.tiling.tiles)
    say(
        f"rows {window.row} to {window.row + window.height - 1}, columns {window.col} to "
        f"{window.col + window.width - 1} of the image: {touched} of its tiles"
    )


def announce_map(plan: MapPlan, source: MapSource, turns: int) -> None:
    """Say how the map is made, and everything that makes it approximate.

    Args:
        turns: Turned images over which scores are a mean; 0: the image alone.
    """
    record, image, tiling = source.record, source.image, plan.tiling
    rows, cols = tiling.grid
    rule = tiling.rule
    own = "own at most {} × {} px".format(*tiling.largest_own)
    if plan.method == "exchange":
        say(
            f"statistics over the whole image: one pass, since {rows} × {cols} ranks hold it, "
            f"{own}; halos travel between them"
        )
    else:
        kind = "strips" if plan.method == "sweep" else "tiles"
        halo = "halos travel" if rule.exchanged else f"halo {rule.halo_px} px"
        say(f"{rows} × {cols} {kind}, {own}, {halo}, work ratio {plan.work_ratio:.2f}")
        if plan.passes:
            say(
                f"statistics over the whole image: {len(plan.passes) + 1} passes over {rows} × "
                f"{cols} {kind}, {plan.work:.1f} times the work of one pass, since {plan.why}"
            )
    if turns:
        say(f"the mean over {turns} turned images: {turns} times this work")
    layer = record.opaque
    if layer is not None:
        say(f"{source.folder}: {layer.note}")
    elif not rule.exact:
        say(
            f"approximate: the halo ({rule.halo_px} px) is not the exact one "
            f"({record.context().halo_px} px), so the map depends on the tiles"
        )
    norms = {norm.norm for norm in record.layers if isinstance(norm, Norm) and norm.scope == "tile"}
    if norms - {"batch"}:
        say(
            f"approximate: {', '.join(sorted(norms))} norm uses the statistics of each tile, so "
            "the map depends on the tiles"
        )
    for note in resampling_notes(image.stack.resampled):
        say(note)
    _announce_part(plan, source.window, image)
    if missing := image.georeferencing.missing:
        say(f"the image has {missing}, and so has the map: {image.georeferencing.remedy}")
