"""What a job may say: every event that passes is one that the server takes."""

import json
from typing import get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runners import messages
from runners.supervision.output import EventRefusedError, parse_line

BODIES = {
    "phase": messages.PhaseBody,
    "progress": messages.ProgressBody,
    "metric": messages.MetricPoint,
    "log": messages.LogBody,
    "result": messages.ResultBody,
    "artefact": messages.ArtefactBody,
    "endpoint": messages.EndpointBody,
}


def line(kind: str, body: object) -> bytes:
    return json.dumps({"kind": kind, "body": body}).encode()


def test_a_metric_keeps_its_values_and_step():
    assert parse_line(line("metric", {"values": {"loss": 2.5}, "step": 3})) == (
        "metric",
        {"source": "job", "values": {"loss": 2.5}, "step": 3},
    )


ENDPOINT = {"host": "127.0.0.1", "port": 8000, "model": "demo", "has_keys": True}


def test_an_endpoint_says_where_it_answers():
    assert parse_line(line("endpoint", ENDPOINT)) == ("endpoint", ENDPOINT)


@pytest.mark.parametrize(
    "changes",
    [
        {"host": "metadata.internal"},
        {"host": "127.0.0.1/admin"},
        {"port": 22},
        {"port": 70_000},
        {"port": "8000"},
        {"model": "a b"},
    ],
)
def test_an_endpoint_at_no_address_is_refused(changes):
    with pytest.raises(EventRefusedError, match=f"^{next(iter(changes))} is "):
        parse_line(line("endpoint", {**ENDPOINT, **changes}))


def test_a_job_cannot_speak_as_the_host():
    _, body = parse_line(line("metric", {"source": "host", "values": {"loss": 1}}))

    assert body["source"] == "job"


def test_what_a_job_measures_of_its_gpu_keeps_its_source():
    _, body = parse_line(line("metric", {"source": "gpu", "values": {"gpu0_utilization": 0.5}}))

    assert body["source"] == "gpu"


def test_a_loss_that_is_not_a_number_is_left_out_and_the_rest_stays():
    _, body = parse_line(b'{"kind":"metric","body":{"values":{"loss":NaN,"lr":1e999,"tps":5}}}')

    assert body["values"] == {"tps": 5}


def test_a_metric_without_any_finite_value_is_refused():
    with pytest.raises(EventRefusedError, match="no finite number"):
        parse_line(b'{"kind":"metric","body":{"values":{"loss":NaN}}}')


@pytest.mark.parametrize("kind", ["started", "exited", "beat", ""])
def test_a_job_cannot_send_what_only_its_supervisor_knows(kind):
    with pytest.raises(EventRefusedError, match="a job sends no"):
        parse_line(line(kind, {}))


@pytest.mark.parametrize("text", [b"loss: 3", b"[]", b"{}", b'{"kind":"phase"}', b"\xff", b"1"])
def test_a_line_that_is_no_event_is_refused(text):
    with pytest.raises(EventRefusedError):
        parse_line(text)


def test_deep_nesting_is_refused_rather_than_fatal():
    with pytest.raises(EventRefusedError):
        parse_line(b"[" * 200_000)


def test_a_refusal_names_the_field_and_what_was_expected():
    with pytest.raises(EventRefusedError, match="done is -1, expected a number from 0 up"):
        parse_line(line("progress", {"done": -1, "total": 2, "unit": "steps"}))


@pytest.mark.parametrize("kind", get_args(messages.ArtefactKind))
def test_whatever_the_server_takes_a_job_may_leave(kind):
    body = {"name": "it", "kind": kind, "total_bytes": 1, "files": {"a": 1}, "sha256": {"a": "0"}}

    assert parse_line(line("artefact", body))[1]["kind"] == kind


def test_an_artefact_of_another_kind_is_refused_with_the_known_ones():
    body = {"name": "it", "kind": "rootkit", "total_bytes": 0, "files": {}, "sha256": {}}

    with pytest.raises(EventRefusedError, match="one of model, adapter, report"):
        parse_line(line("artefact", body))


def test_an_artefact_must_have_a_digest_for_each_file():
    body = {"name": "model", "kind": "model", "total_bytes": 1, "files": {"a": 1}, "sha256": {}}

    with pytest.raises(EventRefusedError, match="same paths"):
        parse_line(line("artefact", body))


SCALARS = st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.text(max_size=5)
NAMED = st.dictionaries(st.text(max_size=4), SCALARS, max_size=3)
FIELDS = {name for body in BODIES.values() for name in body.model_fields}


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    kind=st.sampled_from(sorted(BODIES)),
    body=st.dictionaries(st.sampled_from(sorted(FIELDS)), SCALARS | NAMED, max_size=8),
)
def test_whatever_passes_is_an_event_of_the_protocol(kind, body):
    try:
        kind, passed = parse_line(line(kind, body))
    except EventRefusedError:
        return

    BODIES[kind].model_validate(passed)
    json.dumps(passed, allow_nan=False)
