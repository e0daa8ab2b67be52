"""The planner: what a strategy costs, which strategies fit, and why.

Pure: standard library, pydantic and numpy only, no I/O but its own catalog.

- ``specs``       what goes in and what comes out, one typed document each
- ``api``         the two doors: ``estimate`` one strategy, ``plan`` a search over them
- ``catalog``     facts with unit, source and date: models, devices, engines
- ``cost``        formulas, one resource per file
- ``workload``    composes the costs into a prefill, a decode step, a train step, a compression
- ``techniques``  every technique with its applicability, effect and source
- ``search``      enumerate, prune with reasons, rank
- ``calibration`` measured against predicted, fed back as factors
- ``exports``     a plan as the arguments of another tool
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planner.api import estimate as estimate
    from planner.api import plan as plan

__all__ = ["estimate", "plan"]


def __getattr__(name: str) -> object:
    """Load the doors on first use, so that ``import planner`` stays cheap."""
    if name in __all__:
        from planner import api

        return getattr(api, name)
    raise AttributeError(f"module 'planner' has no attribute {name!r}")
