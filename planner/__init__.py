"""The planner: the cost of a strategy, the strategies that fit, and the reasons.

It uses only the standard library, pydantic, numpy and PyYAML, and does no I/O except reading its
own catalog.

- ``specs``       request and response models
- ``api``         the public functions: ``estimate`` one strategy, ``plan`` a search
- ``catalog``     facts with unit, source and date: models, devices, engines
- ``cost``        formulas, one resource per file
- ``workload``    combines the costs into a prefill, a decode step, a train step, a compression
- ``techniques``  every technique with its applicability, effect and source
- ``search``      enumerate, prune with reasons, rank
- ``calibration`` factors from measured and predicted figures
- ``exports``     a plan as the arguments of another tool
- ``imports``     another tool's arguments or files as a draft of a request
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planner.api import estimate as estimate
    from planner.api import plan as plan

__all__ = ["estimate", "plan"]


def __getattr__(name: str) -> object:
    """Load the API on first use, so that ``import planner`` stays cheap."""
    if name in __all__:
        from planner import api

        return getattr(api, name)
    raise AttributeError(f"module 'planner' has no attribute {name!r}")
