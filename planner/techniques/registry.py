"""All techniques by key. A key stands once; an unknown one is refused with its neighbours."""

from planner.catalog.nearest import nearest_names
from planner.errors import UnknownTechniqueError
from planner.specs.strategy import Strategy
from planner.techniques import parallelism, quantization, serving, training
from planner.techniques.technique import Case, Technique

_ALL = (
    *quantization.TECHNIQUES,
    *parallelism.TECHNIQUES,
    *training.TECHNIQUES,
    *serving.TECHNIQUES,
)
TECHNIQUES: dict[str, Technique] = {technique.key: technique for technique in _ALL}


def get(key: str) -> Technique:
    """Return the technique of a key.

    Raises:
        UnknownTechniqueError: there is no such key; the message gives the nearest ones.
    """
    if key not in TECHNIQUES:
        nearest = nearest_names(key, TECHNIQUES)
        raise UnknownTechniqueError(
            f"no technique {key!r}; nearest: {', '.join(nearest) or 'none'}",
            "technique",
            nearest=nearest,
        )
    return TECHNIQUES[key]


def used_by(strategy: Strategy, case: Case) -> tuple[str, ...]:
    """Return the keys of the techniques that a strategy uses."""
    return tuple(
        technique.key
        for technique in TECHNIQUES.values()
        if not technique.reason_against(case) and technique.is_used(strategy, case)
    )


def inapplicable(case: Case) -> dict[str, str]:
    """Return why each technique of the case's own phase does not apply, by key."""
    return {
        technique.key: reason
        for technique in TECHNIQUES.values()
        if case.phase in technique.phases and (reason := technique.reason_against(case))
    }
