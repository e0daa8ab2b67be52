"""What the launch form adds to a plan."""

import pytest

from webapp.core.problems import InvalidProblem
from webapp.plans.launching import LaunchOptions, launch_options_of


def test_the_form_is_read_and_nobody_launches_with_high_priority_by_it():
    for posted, wish in [
        ({}, LaunchOptions()),
        ({"hours": "1.5"}, LaunchOptions(max_duration_seconds=5400.0)),
        ({"hours": " ", "retries": ""}, LaunchOptions()),
        ({"retries": "2"}, LaunchOptions(max_retries=2)),
        ({"priority": "-1"}, LaunchOptions(priority=-1)),
    ]:
        assert launch_options_of(posted) == wish, posted
    assert launch_options_of({"priority": "1"}).priority == 0


def test_hours_and_retries_that_cannot_be_are_refused_with_the_bounds():
    for hours in ["0", "-1", "nan", "inf", "1e9", "soon"]:
        with pytest.raises(InvalidProblem, match=r"it can be 0\.01 to 8784 hours"):
            launch_options_of({"hours": hours})

    for retries in ["-1", "many", "1.5"]:
        with pytest.raises(InvalidProblem, match="it can be 0 to 5"):
            launch_options_of({"retries": retries})
