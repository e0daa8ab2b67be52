"""A chart with its figure: what every page that shows one needs."""

from dataclasses import dataclass
from typing import Any

from webapp.charts.catalog import ChartSpec
from webapp.charts.figures import Figure, Series
from webapp.charts.svg import drawing


@dataclass(frozen=True, kw_only=True)
class Plotted:
    """One chart: what it shows and its figure, under an id, also without JavaScript."""

    chart: ChartSpec
    figure: Figure

    @property
    def element_id(self) -> str:
        """Return the id of the JSON element that carries the figure."""
        return f"figure-{self.chart.key}"

    @property
    def picture(self) -> dict[str, Any]:
        """Return the parts of the inline SVG."""
        return drawing(self.figure)


def so_far(series: Series, *, is_peak: bool) -> float:
    """Return the one value that stands for a series: its peak, or its median."""
    values = sorted(series.known)
    return values[-1] if is_peak else values[len(values) // 2]
