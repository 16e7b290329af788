"""Overlap, exchange or sweep: the fastest plan of each, and which of them to take."""

from collections.abc import Iterable
from dataclasses import replace

from tilenet.errors import TilenetError
from tilenet.planning.advise import ALL_OPEN, why_nothing_fits
from tilenet.planning.compatibility import obstacle
from tilenet.planning.fitting import find_first, find_fitting
from tilenet.planning.plan import MODES, Plan, Question

# Seconds are predicted, so tiles that overlap are left only for a plan that is a tenth faster.
FASTER = 0.9


def plan_modes(question: Question, *, alone: bool = False) -> list[Plan]:
    """The plan to take, its rivals with the same halo mode, and the fastest with each other mode.

    Args:
        alone: Whether to look for the plan to take alone.

    Raises:
        TilenetError: No layout answers the question, or nothing fits; it names changes that would.
    """
    by_mode: dict[str, list[Plan]] = {}
    refusals = []
    tried: list[Question] = []
    modes = MODES if question.halo_mode == "auto" else (question.halo_mode,)
    for mode in modes:
        of_mode = replace(question, halo_mode=mode)
        try:
            plans = find_fitting(of_mode, alone=alone)
        except TilenetError as error:
            refusals.append(error)
            continue
        tried.append(of_mode)
        if plans:
            by_mode[mode] = plans
            if not _has_halos(plans[0]):
                break
    if not by_mode:
        raise TilenetError(why_nothing_fits(tried[0])) if tried else refusals[0]
    chosen = _choose(plans[0] for plans in by_mode.values())
    if alone:
        return [chosen]
    plans = by_mode[chosen.halo_mode]
    for mode in MODES if _has_halos(chosen) else ():
        if mode == chosen.halo_mode:
            continue
        left_open = replace(question, halo_mode=mode, **ALL_OPEN)
        plan = by_mode[mode][0] if mode in by_mode else None
        if plan is None and left_open not in tried:
            plan = find_first(left_open)
        if plan is not None and _is_trained(plan):
            plans.append(plan)
    return plans


def _has_halos(plan: Plan) -> bool:
    """Whether tiles are computed with context that another halo mode can give them."""
    if plan.halo_mode != "overlap":
        return True
    return plan.question.halo == "exact" and plan.layout.grid != (1, 1)


def _is_trained(plan: Plan) -> bool:
    """Whether `train` takes the plan."""
    return obstacle(plan.question.layers, plan.layout.grid, plan.mesh, plan.halo_mode) is None


def _choose(plans: Iterable[Plan]) -> Plan:
    """The plan to take, of the fastest with each mode."""
    plans = list(plans)
    plans = list(filter(_is_trained, plans)) or plans
    fastest = min(plans, key=lambda plan: plan.step_s)
    overlap = next((plan for plan in plans if plan.halo_mode == "overlap"), fastest)
    return fastest if fastest.step_s < FASTER * overlap.step_s else overlap
