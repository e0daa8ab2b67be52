"""The doors: the cost of one strategy, a search for the best one, and how far one thing goes.

Importing them loads the documents that go in and come out. What answers is loaded by a door's
first question: an estimate needs no search, and a plan none of the inverse questions.
"""

from planner.specs.estimate import Estimate, EstimateRequest
from planner.specs.inverse import InverseAnswer, InverseRequest
from planner.specs.plan import PlanAnswer, PlanRequest


def estimate(request: EstimateRequest) -> Estimate:
    """Return what the request's strategy costs, with every term of the explanation.

    Raises:
        PlannerError: a name is unknown, a config is incomplete, or the strategy is impossible.
    """
    from planner.workload.estimator import estimate_request

    return estimate_request(request)


def plan(request: PlanRequest) -> PlanAnswer:
    """Return the ranked strategies, the frontier, what was rejected and what would help.

    Raises:
        PlannerError: a name is unknown, a config is incomplete, or a pin is impossible.
    """
    from planner.search.engine import search

    return search(request)


def inverse(request: InverseRequest) -> InverseAnswer:
    """Return how far one thing goes: context, batch, users, model, devices, price.

    Raises:
        PlannerError: a name is unknown, or the question does not suit the workload.
    """
    from planner.search.inverse import answer_inverse

    return answer_inverse(request)
