"""All techniques by key; an unknown key raises an error with the nearest keys."""

from collections.abc import Iterator, Mapping
from functools import cached_property

from planner.catalog.reading import data_toml, nearest_names
from planner.errors import UnknownTechniqueError
from planner.specs.strategy import Strategy
from planner.techniques.technique import Case, Technique

FILES = ("compression", "training", "parallel", "serving", "hardware")


class Registry(Mapping[str, Technique]):
    """The techniques by key, read on first use."""

    @cached_property
    def entries(self) -> dict[str, Technique]:
        """Return every entry of the data files, in file order."""
        return {
            key: Technique.model_validate({"key": key, **entry})
            for name in FILES
            for key, entry in data_toml(f"techniques/{name}.toml").items()
        }

    def __getitem__(self, key: str) -> Technique:
        return self.entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


TECHNIQUES: Mapping[str, Technique] = Registry()


def get(key: str) -> Technique:
    """Return the technique with a key.

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
        if technique.used
        and technique.is_used(strategy, case)
        and not technique.reason_against(case)
    )


def inapplicable(case: Case) -> dict[str, str]:
    """Return the reasons against each inapplicable technique of the case's phase, by key."""
    return {
        technique.key: reason
        for technique in TECHNIQUES.values()
        if case.phase in technique.phases and (reason := technique.why_not(case))
    }
