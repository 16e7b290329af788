"""The plans with a question's halo mode: those that fit, and the one that needs least memory."""

from tilenet.errors import TilenetError
from tilenet.planning.plan import Plan, Question
from tilenet.planning.search import Search
from tilenet.planning.swept_plan import fitting_sweeps, swept_plans


def find_fitting(question: Question, *, alone: bool = False) -> list[Plan]:
    """The fastest plan that fits, and its rivals; empty: nothing fits.

    Args:
        alone: Whether to look for no rivals.

    Raises:
        TilenetError: No layout answers the question.
    """
    if question.halo_mode == "sweep":
        return fitting_sweeps(question)[: 1 if alone else None]
    search = Search(question)
    return search.best(1) if alone else search.answer()


def find_first(question: Question) -> Plan | None:
    """The fastest plan that fits; None: nothing fits, or no layout answers the question."""
    try:
        return next(iter(find_fitting(question, alone=True)), None)
    except TilenetError:  # a machine without that precision, a network that is not swept
        return None


def find_leanest(question: Question) -> Plan | None:
    """The plan that needs least memory; None: kernels cannot index its maps.

    Raises:
        TilenetError: No layout answers the question.
    """
    if question.halo_mode != "sweep":
        return Search(question).leanest()
    return min(swept_plans(question), key=lambda plan: plan.device_bytes, default=None)
