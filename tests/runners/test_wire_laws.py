"""Laws of what goes over the wire: whatever is sent comes back, and nothing else passes."""

import json
import string

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from runners.app import (
    LIFETIME_SECONDS,
    MAX_BODY_BYTES,
    SKEW_SECONDS,
    SignatureRefusedError,
    SignedDoorbell,
    key_id,
    sign,
    verify,
)
from runners.jobspec import BenchmarkSpec, CompressSpec, DemoModel, JobSpec, TrainSpec
from runners.messages import (
    MAX_BATCH_EVENTS,
    Beat,
    BeatReply,
    Doorbell,
    EventBatch,
    ExitRecord,
    RunEvent,
    RunRequest,
    StopOrder,
)
from runners.reasons import STOPPED, Reason
from runners.tasks import NonceStore

SPEC = TypeAdapter(JobSpec)
NOW = 1_800_000_000.0
WORDS = st.text(max_size=20)
COUNTS = st.integers(1, 10**9)
MODELS = st.one_of(
    st.just({"source": "demo"}),
    st.builds(lambda path: {"source": "folder", "path": path}, WORDS),
    st.builds(lambda one: {"source": "artefact", "attempt_id": one}, WORDS),
    st.builds(lambda n: {"source": "random", "config": {"hidden_size": n}}, COUNTS),
)
DOORBELLS = st.builds(
    Doorbell,
    command_id=WORDS,
    kind=st.sampled_from(["start", "stop", "ping"]),
    attempt_id=st.none() | WORDS,
    fence=st.none() | WORDS,
)


@settings(max_examples=80, deadline=None)
@given(model=MODELS, kind=st.sampled_from(["train", "compress", "benchmark"]), seed=st.integers())
def test_every_spec_comes_back_as_it_was_sent(model, kind, seed):
    spec = SPEC.validate_python({"kind": kind, "model": model, "seed": seed})
    sent = RunRequest(attempt_id="a", job_id="j", number=1, fence="f", spec=spec)

    received = RunRequest.model_validate_json(sent.model_dump_json())

    assert received == sent
    assert (received.spec.kind, received.spec.seed) == (kind, seed)
    assert received.spec.model.source == model["source"]


@settings(max_examples=60, deadline=None)
@given(name=st.text(string.ascii_lowercase, min_size=1, max_size=12), value=WORDS)
@pytest.mark.parametrize("shape", [TrainSpec, DemoModel, StopOrder, Doorbell])
def test_a_field_that_a_shape_lacks_is_refused_by_its_name(shape, name, value):
    assume(name not in shape.model_fields)

    with pytest.raises(ValidationError) as caught:
        shape.model_validate({name: value})

    assert (name,) in {one["loc"] for one in caught.value.errors() if one["type"] != "missing"}


def test_training_without_an_end_is_refused_with_both_ways_to_give_one():
    with pytest.raises(ValidationError, match="max_steps or time_budget_seconds, or both"):
        TrainSpec(time_budget_seconds=None)

    assert TrainSpec(time_budget_seconds=None, max_steps=1).max_steps == 1
    assert TrainSpec().time_budget_seconds == 120.0


@pytest.mark.parametrize(
    ("shape", "field", "value"),
    [
        (TrainSpec, "weight_dtype", "bf16"),  # it has a compute_dtype only
        (TrainSpec, "compute_dtype", "int8"),
        (CompressSpec, "method", "fp32"),
        (CompressSpec, "bits", 5),
        (BenchmarkSpec, "weight_dtype", "fp4"),
        (BenchmarkSpec, "repetitions", 0),
        (DemoModel, "num_hidden_layers", 0),
    ],
)
def test_what_a_job_cannot_do_is_refused_by_its_field(shape, field, value):
    required = {} if shape in {TrainSpec, DemoModel} else {"model": {"source": "demo"}}

    with pytest.raises(ValidationError) as caught:
        shape.model_validate({**required, field: value})

    assert [one["loc"] for one in caught.value.errors()] == [(field,)]


@pytest.mark.parametrize("source", ["https", "", None])
def test_a_model_comes_from_one_of_four_places_only(source):
    with pytest.raises(ValidationError) as caught:
        BenchmarkSpec.model_validate({"model": {"source": source}})

    message = str(caught.value)
    assert all(f"'{known}'" in message for known in ("demo", "folder", "artefact", "random"))


@pytest.mark.parametrize(("count", "passes"), [(0, True), (500, True), (501, False)])
def test_a_batch_holds_at_most_five_hundred_events(count, passes):
    events = [{"seq": n + 1, "t_ms": 0, "kind": "log", "body": {}} for n in range(count)]
    document = json.dumps({"attempt_id": "a", "fence": "f", "events": events})

    if passes:
        assert len(EventBatch.model_validate_json(document).events) == count
    else:
        with pytest.raises(ValidationError, match=f"at most {MAX_BATCH_EVENTS} items"):
            EventBatch.model_validate_json(document)


@pytest.mark.parametrize("kind", ["Started", "end", ""])
def test_an_event_of_an_unknown_kind_is_refused(kind):
    with pytest.raises(ValidationError, match="'exited'"):
        RunEvent.model_validate({"seq": 1, "t_ms": 0, "kind": kind, "body": {}})


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_crosses_the_wire_as_its_code(reason):
    record = ExitRecord(
        exit_code=None, signal=9, reason=reason, by="reaper", started_at_ms=None, ended_at_ms=1
    )

    assert json.loads(record.model_dump_json())["reason"] == reason.value
    assert ExitRecord.model_validate_json(record.model_dump_json()).reason is reason


def test_what_a_person_asked_for_is_never_counted_as_an_error():
    asked = {one for one in Reason if "by_user" in one.value or "by_operator" in one.value}

    assert len(asked) == 3
    assert asked <= STOPPED


def test_a_beat_of_an_older_agent_needs_none_of_the_newer_fields():
    least = {
        "boot_id": "b",
        "sent_at_ms": 1,
        "agent_version": "0",
        "cpu_utilization": 0.5,
        "memory_available_bytes": 0,
        "disk_free_bytes": 0,
    }

    beat = Beat.model_validate(least)

    assert (beat.gpus, beat.attempts, beat.problems, beat.facts) == ((), (), (), None)
    assert not beat.is_agent_start
    assert BeatReply(server_time_ms=1).stop == ()


@pytest.mark.parametrize("field", ["memory_available_bytes", "disk_free_bytes"])
def test_a_beat_of_less_than_nothing_is_refused(field):
    figures = {"memory_available_bytes": 0, "disk_free_bytes": 0, field: -1}

    with pytest.raises(ValidationError, match=field):
        Beat(boot_id="b", sent_at_ms=1, agent_version="0", cpu_utilization=0, **figures)


def always_new(_nonce, _until):
    return True


def checked(signed, *, host_id="h", key="key", now=NOW):
    return verify(signed, host_id=host_id, key=key, now=now, is_new_nonce=always_new)


@settings(max_examples=80, deadline=None)
@given(doorbell=DOORBELLS, key=st.text(min_size=1), host=WORDS, seq=st.integers(0))
def test_whatever_is_signed_passes_with_the_same_key_for_the_same_host(doorbell, key, host, seq):
    signed = sign(doorbell, host_id=host, key=key, now=NOW, seq=seq)

    assert checked(signed, host_id=host, key=key) == doorbell
    assert json.loads(signed.body)["seq"] == seq


@settings(max_examples=120, deadline=None)
@given(data=st.data(), doorbell=DOORBELLS)
def test_no_changed_character_of_a_body_or_its_signature_passes(data, doorbell):
    signed = sign(doorbell, host_id="h", key="key", now=NOW)
    part = data.draw(st.sampled_from(["body", "mac"]))
    text = getattr(signed, part)
    place = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.characters(codec="utf-8").filter(lambda one: one != text[place]))
    forged = signed._replace(**{part: text[:place] + other + text[place + 1 :]})

    with pytest.raises(SignatureRefusedError) as caught:
        checked(forged)

    assert caught.value.code == "bad_mac"


@settings(max_examples=60, deadline=None)
@given(offset=st.integers(-5000, 5000))
def test_a_doorbell_holds_from_the_skew_before_its_issue_to_the_skew_after_its_end(offset):
    signed = sign(Doorbell(command_id="c", kind="ping"), host_id="h", key="key", now=NOW)

    try:
        checked(signed, now=NOW + offset)
        code = None
    except SignatureRefusedError as error:
        code = error.code

    late = offset > LIFETIME_SECONDS + SKEW_SECONDS
    assert code == ("expired" if late else "from_the_future" if offset < -SKEW_SECONDS else None)


def test_a_body_is_measured_in_bytes_and_not_in_characters():
    within = SignedDoorbell("ä" * (MAX_BODY_BYTES // 2), "")
    beyond = SignedDoorbell(within.body + "a", "")

    codes = []
    for one in (within, beyond):
        with pytest.raises(SignatureRefusedError) as caught:
            checked(one)
        codes.append(caught.value.code)

    assert codes == ["bad_mac", "too_large"]


def test_a_nonce_is_kept_until_no_clock_would_accept_it_any_more():
    kept = []
    signed = sign(Doorbell(command_id="c", kind="ping"), host_id="h", key="key", now=NOW)

    verify(
        signed,
        host_id="h",
        key="key",
        now=NOW,
        is_new_nonce=lambda nonce, until: kept.append((nonce, until)) is None,
    )

    assert kept == [(json.loads(signed.body)["nonce"], NOW + LIFETIME_SECONDS + SKEW_SECONDS)]


def test_two_doorbells_never_share_a_nonce_or_a_signature():
    ping = Doorbell(command_id="c", kind="ping")

    rung = [sign(ping, host_id="h", key="k", now=NOW) for _ in range(200)]

    assert len({json.loads(one.body)["nonce"] for one in rung}) == 200
    assert len({one.mac for one in rung}) == 200


def test_a_keys_public_name_tells_keys_apart_without_a_piece_of_them():
    keys = [f"secret-{n}" for n in range(100)]

    names = {key_id(key) for key in keys}

    assert len(names) == 100
    assert not any(name in key or key in name for name in names for key in keys)


def test_a_nonce_that_expired_makes_room_and_those_that_hold_stay(tmp_path):
    store = NonceStore(tmp_path / "nonces")
    assert store.is_new("old", until=1.0)
    assert store.is_new("held", until=4e9)

    assert store.is_new("old", until=4e9)
    assert not store.is_new("held", until=4e9)
    assert not store.is_new("old", until=4e9)
