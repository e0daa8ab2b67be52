"""A finished job keeps its points: the store's roll-ups are for long runs."""

import json
import re

import pytest

from webapp.metrics.rollup import seal_due

pytestmark = pytest.mark.django_db(databases=["default", "metrics"])


def test_a_short_run_is_still_drawn_point_by_point_after_it_was_rolled_up(as_alice, finished):
    assert seal_due() > 0
    page = as_alice.get(f"/jobs/{finished.pk}/").content.decode()
    figure = re.search(r'<script id="figure-loss" type="application/json">(.*?)</script>', page)
    assert json.loads(figure[1])["data"][-1]["y"] == [8.0, 7.0, 6.0, 5.0, 4.0]
