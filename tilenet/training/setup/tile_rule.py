"""Choose the halo rule of a run's tiles from its run file."""

from tilenet.errors import TilenetError
from tilenet.geometry.halo_rule import HaloRule, halo_rule
from tilenet.planning.compatibility import off_grid
from tilenet.planning.mesh import MeshShape
from tilenet.storage.network_json import NetworkRecord
from tilenet.training.config.run_file import RunFile
from tilenet.training.config.sweep import check_sweep


def tile_rule(run: RunFile, record: NetworkRecord, mesh: MeshShape) -> HaloRule:
    """The halo rule of a run: own pixels and a halo, or own pixels alone if ranks exchange halos.

    Raises:
        TilenetError: The network does not allow the run's `halo` or `halo_mode`.
    """
    halo = run.halo
    if run.halo_mode == "windows":
        # No halo: crops are windows, and are padded by reflection at an image's edges.
        return HaloRule(0, run.window_px or 0, exact=False)
    if run.halo_mode == "sweep":
        check_sweep(run, record, mesh)
        if mesh.rows == 1 and mesh.columns > 1 and run.tiles.cut is None:
            return halo_rule(halo, record.layers, exchanged=True)
    if run.halo_mode == "exchange":
        if halo != "exact":
            raise TilenetError(
                f"halo_mode: exchange needs no halo, since each layer exchanges its own (halo: "
                f"{halo}); leave halo out, or use halo_mode: overlap"
            )
        return halo_rule(halo, record.layers, exchanged=True)
    rule = halo_rule(halo, record.layers, record.epsilon_px)
    if why := off_grid(record.layers, halo, rule.alignment_px):
        raise TilenetError(why)
    return rule
