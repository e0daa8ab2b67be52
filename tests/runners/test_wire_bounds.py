"""Every figure that a host may send has a range, so that no page meets one that it cannot show."""

import math
from inspect import isfunction

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from runners import messages
from runners.facts import HostFacts, Microbench, SchedulerFacts
from runners.messages import ReceivedBatch
from webapp.core import units

# Values of a run's own metrics may be any that are finite: a loss may well explode.
FREE = {"MetricPoint.properties.values.additionalProperties"}
FROM_SERVER = ("Reply", "Order", "Wanted", "Needs", "RunRequest", "Gang")  # and what they hold
SENT = [
    shape
    for shape in {**vars(messages), "HostFacts": HostFacts, "Microbench": Microbench}.values()
    if isinstance(shape, type)
    and issubclass(shape, BaseModel)
    and not shape.__name__.endswith(FROM_SERVER)
]
HUGE = {
    "too long for a float": 10**400,
    "as long as a float": 10**308,
    "a float": 1.7e308,
    "a float below": -1.7e308,
    "long below": -(10**308),
    "inf": math.inf,
    "-inf": -math.inf,
    "nan": math.nan,
}
UNITS = [
    one
    for name, one in vars(units).items()
    if isfunction(one) and one.__module__ == units.__name__ and name[0] != "_"
]


def endless(schema, path):
    """Yield the paths of all numbers of a JSON schema that lack an upper end."""
    if isinstance(schema, dict):
        if schema.get("type") == "number" and not {"maximum", "exclusiveMaximum"} & set(schema):
            yield path
        for name, part in schema.items():
            yield from endless(part, f"{path}.{name}")
    elif isinstance(schema, list):
        for part in schema:
            yield from endless(part, path)


@pytest.mark.parametrize("shape", SENT, ids=lambda shape: shape.__name__)
def test_every_figure_of_a_message_has_an_upper_end(shape):
    assert {*endless(shape.model_json_schema(), shape.__name__)} <= FREE


@pytest.mark.parametrize("name", ["attempt_id", "fence"])
@pytest.mark.parametrize("text", ["a\x00b", "\x00", "a\nb", "\u00e4", "\ud800"])
def test_what_a_database_is_asked_by_is_printable(name, text):
    sent = {"attempt_id": "a", "fence": "f", "events": []}
    assert ReceivedBatch.model_validate(sent)

    with pytest.raises(ValidationError, match=name):
        ReceivedBatch.model_validate(sent | {name: text})


@pytest.mark.parametrize("value", HUGE.values(), ids=HUGE)
@pytest.mark.parametrize("shown", UNITS, ids=lambda one: one.__name__)
def test_any_number_is_shown_without_a_fault(shown, value):
    """PostgreSQL returns a large float of a document as an integer that no float may hold."""
    assert isinstance(str(shown(value)), str)


def test_a_share_beyond_all_is_refused_by_its_field():
    with pytest.raises(ValidationError, match="less than or equal to 1000"):
        TypeAdapter(messages.Beat).validate_python({"cpu_utilization": 1.7e308})


def test_a_host_cannot_claim_more_scheduler_jobs_than_the_server_stores_devices_for():
    """82,000 of them were 82,000 rows, written one by one within one request."""
    with pytest.raises(ValidationError, match="less than or equal to 256"):
        SchedulerFacts(time_limit_minutes=60, max_jobs=81_814)
