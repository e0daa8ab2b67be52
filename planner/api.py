"""The doors: the cost of one strategy, a search for the best one, and how far one thing goes."""

from planner.search.engine import search
from planner.search.inverse import answer_inverse
from planner.specs.estimate import Estimate, EstimateRequest
from planner.specs.inverse import InverseAnswer, InverseRequest
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


def inverse(request: InverseRequest) -> InverseAnswer:
    """Return how far one thing goes: context, batch, users, model, devices, price.

    Raises:
        PlannerError: a name is unknown, or the question does not suit the workload.
    """
    return answer_inverse(request)
