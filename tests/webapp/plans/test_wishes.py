"""What the launch form adds to a plan."""

import pytest

from webapp.core.problems import InvalidProblem
from webapp.plans.wishes import Wish, wish_of


@pytest.mark.parametrize(
    ("posted", "wish"),
    [
        ({}, Wish()),
        ({"hours": "1.5"}, Wish(max_duration_seconds=5400.0)),
        ({"hours": " ", "retries": ""}, Wish()),
        ({"retries": "2"}, Wish(max_retries=2)),
        ({"priority": "-1"}, Wish(priority=-1)),
    ],
)
def test_the_form_is_read(posted, wish):
    assert wish_of(posted) == wish


def test_nobody_launches_with_high_priority_by_the_form():
    assert wish_of({"priority": "1"}).priority == 0


@pytest.mark.parametrize("hours", ["0", "-1", "nan", "inf", "1e9", "soon"])
def test_hours_that_cannot_be_are_refused_with_the_bounds(hours):
    with pytest.raises(InvalidProblem, match=r"it can be 0\.01 to 8784 hours"):
        wish_of({"hours": hours})


@pytest.mark.parametrize("retries", ["-1", "many", "1.5"])
def test_retries_that_cannot_be_are_refused(retries):
    with pytest.raises(InvalidProblem, match="it can be 0 to 5"):
        wish_of({"retries": retries})
