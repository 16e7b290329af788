"""What the tiles of a run read: own pixels and a halo, or own pixels where ranks exchange it."""

from tilenet.errors import TilenetError
from tilenet.geometry.halo_rule import HaloRule, halo_rule
from tilenet.planning.compatibility import whole_image
from tilenet.planning.mesh import MeshShape
from tilenet.storage.network_json import NetworkRecord
from tilenet.training.config.run_file import RunFile
from tilenet.training.config.sweep import check_sweep

__all__ = ["tile_rule"]


def tile_rule(run: RunFile, record: NetworkRecord, mesh: MeshShape) -> HaloRule:
    """How tiles read: what they own and the halo, or what they own where ranks exchange halos.

    Raises:
        TilenetError: The halo that was asked for cannot be had, or the network cannot be swept.
    """
    context, halo = record.context(), run.halo
    if run.halo_mode == "windows":
        # A crop at an image's edge is reflected up to the size of a window.
        return HaloRule(0, run.window_px or 0, exact=False)
    if run.halo_mode == "sweep":
        check_sweep(run, record, mesh)
        if mesh.rows == 1 and mesh.columns > 1 and run.tiles.cut is None:
            return halo_rule(halo, record.layers, exchanged=True)
    if run.halo_mode == "exchange":
        if halo != "exact":
            raise TilenetError(
                f"with halo_mode: exchange each layer takes just what it needs (halo: {halo}); "
                "leave halo out, or use halo_mode: overlap"
            )
        return halo_rule(halo, record.layers, exchanged=True)
    rule = halo_rule(halo, record.layers, record.epsilon_px)
    if rule.alignment_px != context.alignment_px and whole_image(record.layers):
        raise TilenetError(
            f"tiles must lie on the network's grid for statistics over whole images (halo: "
            f"{halo}, network.norm_scope: image); use halo: exact, or network.norm_scope: tile"
        )
    return rule
