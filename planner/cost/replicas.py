"""Replicas of different speed behind one endpoint: request shares and combined performance."""

from planner.cost.equation import equation
from planner.cost.quantity import Quantity


@equation(
    "w = n · X_1 / X",
    unit="",
    symbols={"replicas": "n", "own_rate": "X_1", "total_rate": "X"},
    source="each replica gets requests in proportion to the most that it serves",
)
def request_share(*, replicas: Quantity, own_rate: Quantity, total_rate: Quantity) -> Quantity:
    """Return the request share of the replicas of one kind; rates are per second."""
    return replicas * own_rate / total_rate


@equation(
    "T = w · T_1 + (1 - w) · T_2",
    unit="s",
    symbols={"first_s": "T_1", "second_s": "T_2", "first_ratio": "w"},
    source="the mean over all requests, of which a share w is served by the first",
)
def mean_over_requests(
    *, first_s: Quantity, second_s: Quantity, first_ratio: Quantity
) -> Quantity:
    """Return the mean of a time over the requests of two kinds of replica."""
    return first_ratio * first_s + (1 - first_ratio) * second_s


@equation(
    "X = X_1 + X_2",
    unit="requests/s",
    symbols={"first_rate": "X_1", "second_rate": "X_2"},
    source="replicas do not wait for each other",
)
def rate_of_both(*, first_rate: Quantity, second_rate: Quantity) -> Quantity:
    """Return the requests per second of two kinds of replica."""
    return first_rate + second_rate
