"""A chart with its figure, for any page that shows one."""

from dataclasses import dataclass
from typing import Any

from webapp.charts.catalog import ChartSpec
from webapp.charts.figures import Figure
from webapp.charts.svg import drawing


@dataclass(frozen=True, kw_only=True)
class Plotted:
    """One chart with its figure and element id; it also works without JavaScript."""

    chart: ChartSpec
    figure: Figure

    @property
    def element_id(self) -> str:
        """Return the id of the JSON element with the figure."""
        return f"figure-{self.chart.key}"

    @property
    def picture(self) -> dict[str, Any]:
        """Return the parts of the inline SVG."""
        return drawing(self.figure)
