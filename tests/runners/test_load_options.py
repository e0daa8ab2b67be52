"""What load may be asked for, and how much of it each point gets."""

import pytest
from pydantic import ValidationError

from runners.jobspec import ArtefactModel, BenchmarkSpec
from runners.jobspec.benchmark import Burst, ClosedLoop, LoadOptions, OpenLoop

MODEL = ArtefactModel(attempt_id="a1")


@pytest.mark.parametrize(
    ("arrivals", "requests", "places"),
    [
        (ClosedLoop(concurrency=(1, 64)), (32, 64), 64),
        (OpenLoop(request_rate_per_second=(0.5, 2.0)), (32, 32), 4),
        (Burst(burst_requests=(2, 16)), (2, 16), 16),
    ],
    ids=lambda one: getattr(one, "kind", ""),
)
def test_each_kind_sends_as_many_as_its_point_needs_and_reserves_places(
    arrivals, requests, places
):
    options = LoadOptions(arrivals=arrivals)

    assert tuple(options.requests_at(each) for each in arrivals.points) == requests
    assert options.places(4) == places


@pytest.mark.parametrize(
    ("arrivals", "message"),
    [
        ({"kind": "closed", "concurrency": (4, 1)}, "the points of a sweep rise.*4, 1"),
        ({"kind": "closed", "concurrency": ()}, "at least 1 item"),
        ({"kind": "closed", "concurrency": (2000,)}, "less than or equal to 1024"),
        ({"kind": "open", "request_rate_per_second": (0.0,)}, "greater than 0"),
        ({"kind": "burst", "burst_requests": tuple(range(1, 14))}, "at most 12 items"),
        ({"kind": "flood"}, "closed"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused(arrivals, message):
    with pytest.raises(ValidationError, match=message):
        LoadOptions(arrivals=arrivals)


def test_a_profile_is_of_a_model_and_not_of_an_endpoint():
    load = {"arrivals": {"kind": "closed", "concurrency": (1,)}}

    with pytest.raises(ValidationError, match="profile is of the model alone"):
        BenchmarkSpec(model=MODEL, load=load, profile=True)
