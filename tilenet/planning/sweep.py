"""What square grids of tiles cost: the paper's question of how finely to cut."""

from dataclasses import replace
from typing import Any

from tilenet.errors import TilenetError
from tilenet.planning.plan import Question
from tilenet.planning.search import Search

__all__ = ["sweep"]

COUNTS = range(4, 17)  # tiles along each side


def sweep(question: Question) -> list[dict[str, Any]]:
    """What square grids cost: exact and formula work ratios, bytes, and time where they fit.

    Raises:
        TilenetError: The question contradicts itself, or leaves no grid to choose.
    """
    if question.halo_mode == "exchange":
        raise TilenetError(
            "grids are compared for tiles that overlap (halo_mode: exchange, where each rank holds "
            "one tile); leave --sweep out, or set --halo-mode overlap"
        )
    rows: list[dict[str, Any]] = []
    for count in COUNTS:
        search = Search(replace(question, grid=(count, count), tile_px=None))
        try:
            tiling = search.estimator.tiling((count, count))
        except TilenetError:
            if rows:
                break  # finer grids are impossible too
            raise
        row: dict[str, Any] = {
            "grid": count,
            "tile_read_px": max(tiling.rows[0].read, tiling.cols[0].read),
            "work_ratio": tiling.work_ratio,
            "formula_ratio": 1 + 4 * count * question.epsilon_px / max(question.image),
        }
        rows.append(row | _cost(search))
    return rows


def _cost(search: Search) -> dict[str, Any]:
    """Of one grid."""
    try:
        best = search.best(1)
    except TilenetError as error:  # fewer tiles than the micro-batches that were asked for
        return {"fits": False, "reason": str(error)}
    if best:
        took = {"layout": str(best[0].layout), "step_s": best[0].step_s}
        return {"device_bytes": best[0].device_bytes, "fits": True} | took
    least = search.leanest()
    return {"fits": False} | ({"device_bytes": least.device_bytes} if least else {})
