"""What every chart of a page has in common."""

import pytest

from webapp.charts.figures import Series
from webapp.charts.plotted import so_far

LOSS = Series("loss", (0, 1, 2, 3), (4.0, None, 1.0, 3.0))


@pytest.mark.parametrize(
    ("is_peak", "value"),
    [pytest.param(True, 4.0, id="peak"), pytest.param(False, 3.0, id="middle")],
)
def test_one_value_stands_for_a_series_and_gaps_do_not_count(is_peak, value):
    assert so_far(LOSS, is_peak=is_peak) == value
