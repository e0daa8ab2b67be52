"""Public API: estimate one strategy, search for the best one, and solve inverse questions.

Importing this module loads the request and response models only. Each function imports its
implementation on the first call: an estimate does not load the search, and a search does not load
the inverse questions.
"""

from planner.specs.estimate import (
    Estimate,
    EstimateRequest,
    InverseAnswer,
    InverseRequest,
    PlanAnswer,
    PlanRequest,
)


def estimate(request: EstimateRequest) -> Estimate:
    """Return the estimate of the request's strategy, with every term of the explanation.

    Raises:
        PlannerError: a name is unknown, a config is incomplete, or the strategy is impossible.
    """
    from planner.workload.under_load import estimate_request

    return estimate_request(request)


def plan(request: PlanRequest) -> PlanAnswer:
    """Return the ranked strategies, the frontier, the rejections and the suggestions.

    Raises:
        PlannerError: a name is unknown, a config is incomplete, or a pin is impossible.
    """
    from planner.search.engine import search

    return search(request)


def best_plan(request: PlanRequest) -> PlanAnswer:
    """Return the best plan only, without frontier, runners-up and suggestions.

    If no plan meets the targets, the answer holds the best plan that fits, and its ``request`` has
    no targets. If nothing fits, it holds the rejections.

    Raises:
        PlannerError: a name is unknown, a config is incomplete, or a pin is impossible.
    """
    from planner.search.engine import search_best

    return search_best(request)


def inverse(request: InverseRequest) -> InverseAnswer:
    """Return the limit of one quantity: context, batch, users, model, devices or price.

    Raises:
        PlannerError: a name is unknown, or the question does not suit the workload.
    """
    from planner.search.inverse import answer_inverse

    return answer_inverse(request)
