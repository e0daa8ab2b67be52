"""What published serving sweeps say of one place: factors of parts, habits of callers.

The nearest place that was measured counts: the layout of the pair of model and chip, the pair, the
family of chips, or all of them. Releases of an engine differ: where the asked one was measured
beside others, its own factors of the layout or of the pair come first.
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
# Parts that no sweep shows take the factor of the part that is most like them.
SHOWN_BY = {"experts": "linear", "further": "issue"}


def told(place: str, release: str) -> str:
    """Return what a place is filed under that was measured with a release of its engine.

    >>> told("32x4096x0/hopper", "1.0.0rc3")
    '32x4096x0/hopper@1.0.0rc3'
    """
    return f"{place}{RELEASE}{release}"


@dataclass(frozen=True)
class Swept:
    """One engine at one place: ``chip`` names the pair, the device and the format of weights.

    The layout may be columns: each row then takes the factors of its own layout.
    """

    engine: Engine
    pair: str
    chip: str
    layout: Layout
    release: str = ""

    @property
    def layout_name(self) -> str:
        """Return what a layout of the pair is told apart by."""
        ranks = (self.layout.tensor, self.layout.expert, self.layout.attention_data)
        return f"{self.chip}/{'-'.join(str(int(count)) for count in ranks)}"

    def factor(self, part: str) -> float:
        """Return what sweeps multiply a part of a pass with; 1 where they show nothing like it."""
        phase, _, own = part.partition("_")
        alike = f"{phase}_{SHOWN_BY.get(own, own)}"

        def shown(place: Mapping[str, float]) -> float:
            return place.get(part, place.get(alike, 1.0))

        found = shown(self._place)
        for name, is_here in self._layouts:
            found = where(is_here, shown(self.engine.serving_factors[name]), found)
        return found

    @cached_property
    def _place(self) -> Mapping[str, float]:
        """Return the factors of the nearest place, but for those of single layouts."""
        places = self.engine.serving_factors
        names = (self._told, self.pair, self.pair.rpartition("/")[2], ANYWHERE)
        return next((places[name] for name in names if name in places), {})

    @cached_property
    def habits(self) -> ArrivalHabits:
        """Return how callers fall together, as sweeps of the place show it, or as they all do."""
        places = self.engine.arrival_factors
        names = (self._told, self.pair, ANYWHERE)
        found = dict(next((places[name] for name in names if name in places), {}))
        for name, is_here in self._layouts:
            for habit, usual in found.items():
                found[habit] = where(is_here, places[name].get(habit, usual), usual)
        return ArrivalHabits(**found)

    @cached_property
    def _layouts(self) -> tuple[tuple[str, Flag], ...]:
        """Return the measured layouts of the place, and whether this is each of them."""
        start = f"{self.chip}/"
        names = (name for name in self.engine.serving_factors if name.startswith(start))
        split = ((name, *name.removeprefix(start).partition(RELEASE)[::2]) for name in names)
        # Of one layout its release comes after what all its releases have in common.
        near = sorted(one for one in split if one[2] in {"", self.release})
        found = ((name, self._is_here(ranks)) for name, ranks, _ in near)
        return tuple((name, is_here) for name, is_here in found if any_of(is_here))

    @property
    def _told(self) -> str:
        """Return what the pair is filed under where its engine's release was measured too."""
        return told(self.pair, self.release)

    def _is_here(self, ranks: str) -> Flag:
        """Return whether a layout is the one of these ranks, with no other kind of ranks."""
        tensor, expert, attention = (int(count) for count in ranks.split("-"))
        own = self.layout
        split = both(own.tensor == tensor, own.expert == expert)
        whole = both(own.attention_data == attention, own.pipeline * own.context == 1)
        return both(split, whole)
