"""The two doors: the cost of one strategy, and a search for the best one."""

from planner.search.engine import search
from planner.specs.estimate import Estimate, EstimateRequest
from planner.specs.plan import PlanAnswer, PlanRequest
from planner.workload.estimator import estimate_request


def estimate(request: EstimateRequest) -> Estimate:
    """Return what the request's strategy costs, with every term of the explanation.

    Raises:
        PlannerError: a name is unknown, a config is incomplete, or the strategy is impossible.
    """
    return estimate_request(request)


def plan(request: PlanRequest) -> PlanAnswer:
    """Return the ranked strategies, the frontier, what was rejected and what would help.

    Raises:
        PlannerError: a name is unknown, a config is incomplete, or a pin is impossible.
    """
    return search(request)
