"""Which pipeline stage sets the pace: the one with the most layers, or the one with the head."""

from dataclasses import dataclass

from planner.cost.weights import stage_layers


@dataclass(frozen=True)
class Pace:
    """The work of the stage that all others wait for.

    ``layers`` and ``heads`` are what it computes; ``even_stages`` is how many stages as busy as
    this one the whole model would make: fewer than there are, unless all are alike.
    """

    layers: float
    heads: float
    even_stages: float


def pace_of(num_layers: int, stages: int, layer_parameters: float, head_parameters: float) -> Pace:
    """Return the busiest of the stages, by the parameters that each token passes through.

    >>> pace_of(8, 4, 1.0, 2.0)
    Pace(layers=2, heads=1, even_stages=2.5)
    """
    shares = stage_layers(num_layers, stages)
    most, last = max(shares), shares[-1]
    middle = most * layer_parameters if stages > 1 else 0.0
    end = last * layer_parameters + head_parameters
    whole = num_layers * layer_parameters + head_parameters
    if middle > end:
        return Pace(most, 0, whole / middle)
    return Pace(last, 1, whole / end)
