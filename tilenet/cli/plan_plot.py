"""The chart of a plan that `tilenet plan --plot` draws."""

from pathlib import Path

from tilenet.errors import TilenetError
from tilenet.planning.estimate import Estimator
from tilenet.planning.explain import in_px
from tilenet.planning.memory.paper import level_bytes
from tilenet.planning.plan import OwnNetwork, Plan
from tilenet.planning.time.roofline import ITEM_BYTES
from tilenet.report.plan_charts import plot_level_bytes, plot_timeline


def plot_plan(plan: Plan, path: Path) -> None:
    """Draw the levels' bytes if the file's name holds `memory`, else the timeline.

    Raises:
        TilenetError: The plan has no such chart, or it cannot be drawn.
    """
    if "memory" in path.name:
        if isinstance(plan.question.options, OwnNetwork):
            raise TilenetError(
                f"the bytes of levels are those of a U-Net (network: {plan.question.options.name}, "
                f"plot: {path}); leave memory out of the name, and the timeline is drawn"
            )
        item_bytes = ITEM_BYTES[plan.question.precision]
        levels = level_bytes(plan.question.options, max(plan.tile_read_px), item_bytes)
        title = f"Feature maps of a {in_px(plan.tile_read_px)} tile"
        plot_level_bytes(levels.encoder, levels.decoder, path, title)
        return
    layout = plan.layout
    if layout.strip_rows is not None:
        raise TilenetError(
            f"a timeline is of micro-batches, which a sweep does not have (plot: {path}, "
            "halo_mode: sweep); leave --plot out, or take --halo-mode overlap or exchange"
        )
    estimator, number = Estimator(plan.question), layout.micro_batches
    if layout.flows:  # enough to see it fill, flow and drain
        of_step = estimator.micro_batches(layout.grid, layout.partitions)
        number = min(of_step, 3 * layout.partitions)
    timeline = estimator.timeline(layout, plan.balance, number)
    plot_timeline(timeline, path, f"{number} micro-batches: {layout}")
