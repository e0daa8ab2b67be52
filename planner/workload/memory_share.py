"""The share of memory that a serving engine is started with."""

from planner.catalog.engines import Engine
from planner.errors import NotCoveredError
from planner.specs.strategy import Strategy


def refuse_memory_share(strategy: Strategy, engine: Engine) -> None:
    """Reject a share of memory for an engine that takes what it needs.

    Raises:
        NotCoveredError: the engine has no such option.
    """
    share = strategy.gpu_memory_utilization
    if share is not None and engine.memory_utilisation >= 1:
        raise NotCoveredError(
            f"gpu_memory_utilization is {share:g}: {engine.title} has no such option, it "
            "allocates what it needs; leave it out",
            "strategy.gpu_memory_utilization",
        )
