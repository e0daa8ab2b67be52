"""Factors of operators and arrivals from published serving sweeps for a model, chip and layout.

The most specific measured key applies: layout of a model and chip pair, the pair, the chip family
or all. Factors of the requested engine release, if measured, precede those over all releases.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from planner.catalog.engines import Engine
from planner.cost.columns import Flag, any_of, both, where
from planner.cost.queueing import ArrivalHabits
from planner.workload.ranks import Layout

ANYWHERE = "any"
RELEASE = "@"
# Parts without fitted factors use the factor of the most similar part.
SHOWN_BY = {"experts": "linear", "further": "issue"}


def release_key(place: str, release: str) -> str:
    """Return the key of factors measured with one engine release.

    >>> release_key("32x4096x0/hopper", "1.0.0rc3")
    '32x4096x0/hopper@1.0.0rc3'
    """
    return f"{place}{RELEASE}{release}"


@dataclass(frozen=True)
class Swept:
    """The sweep factors of one engine; ``chip`` is a key of pair, device and weight format.

    If the layout has columns, each row gets the factors of its own layout.
    """

    engine: Engine
    pair: str
    chip: str
    layout: Layout
    release: str = ""

    @property
    def layout_name(self) -> str:
        """Return the key of the pair's factors for this layout."""
        ranks = (self.layout.tensor, self.layout.expert, self.layout.attention_data)
        return f"{self.chip}/{'-'.join(str(int(count)) for count in ranks)}"

    def factor(self, part: str) -> float:
        """Return the factor for a part of a pass; 1 if no sweep measured it or a similar part."""
        phase, _, operator = part.partition("_")
        similar = f"{phase}_{SHOWN_BY.get(operator, operator)}"

        def factor_in(place: Mapping[str, float]) -> float:
            return place.get(part, place.get(similar, 1.0))

        factor = factor_in(self._place)
        for name, is_here in self._layouts:
            factor = where(is_here, factor_in(self.engine.serving_factors[name]), factor)
        return factor

    @cached_property
    def _place(self) -> Mapping[str, float]:
        """Return the most specific factors, except those of single layouts."""
        places = self.engine.serving_factors
        names = (self._release_key, self.pair, self.pair.rpartition("/")[2], ANYWHERE)
        return next((places[name] for name in names if name in places), {})

    @cached_property
    def habits(self) -> ArrivalHabits:
        """Return the arrival parameters for this pair, or those over all pairs."""
        places = self.engine.arrival_factors
        names = (self._release_key, self.pair, ANYWHERE)
        values = dict(next((places[name] for name in names if name in places), {}))
        for name, is_here in self._layouts:
            for habit, default in values.items():
                values[habit] = where(is_here, places[name].get(habit, default), default)
        return ArrivalHabits(**values)

    @cached_property
    def _layouts(self) -> tuple[tuple[str, Flag], ...]:
        """Return the measured layouts of the pair, each with whether this layout matches."""
        prefix = f"{self.chip}/"
        names = (name for name in self.engine.serving_factors if name.startswith(prefix))
        split = ((name, *name.removeprefix(prefix).partition(RELEASE)[::2]) for name in names)
        # The factors of a release come after, and override, those over all releases.
        ordered = sorted(one for one in split if one[2] in {"", self.release})
        matches = ((name, self._is_here(ranks)) for name, ranks, _ in ordered)
        return tuple((name, is_here) for name, is_here in matches if any_of(is_here))

    @property
    def _release_key(self) -> str:
        """Return the key of the pair's factors for this engine release."""
        return release_key(self.pair, self.release)

    def _is_here(self, ranks: str) -> Flag:
        """Return whether the layout has exactly these ranks and no other parallelism."""
        tensor, expert, attention = (int(count) for count in ranks.split("-"))
        own = self.layout
        split = both(own.tensor == tensor, own.expert == expert)
        whole = both(own.attention_data == attention, own.pipeline * own.context == 1)
        return both(split, whole)
