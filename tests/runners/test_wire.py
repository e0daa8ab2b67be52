"""What goes over the wire: it survives JSON, it has bounds, and only genuine doorbells pass."""

import itertools
import json
import math
import string
from inspect import isfunction, signature

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter, ValidationError

from runners.host.app import (
    MAX_BODY_BYTES,
    SignatureRefusedError,
    SignedDoorbell,
    _mac,
    key_id,
    sign,
    verify,
)
from runners.host.tasks import NonceStore
from runners.jobspec import (
    ArtefactModel,
    BenchmarkSpec,
    CompressSpec,
    DemoModel,
    JobSpec,
    TrainSpec,
)
from runners.shared import messages
from runners.shared.facts import HostFacts, Microbench, SchedulerFacts
from runners.shared.messages import (
    MAX_BATCH_EVENTS,
    Beat,
    BeatReply,
    Doorbell,
    EventBatch,
    ExitRecord,
    ReceivedBatch,
    RunEvent,
    RunRequest,
    StopOrder,
)
from runners.shared.reasons import ERROR, FAILED, STOPPED, Reason
from runners.shared.timing import CLOCK_SKEW_SECONDS, DOORBELL_LIFETIME_SECONDS
from webapp.core import display

# Everything on the wire: it survives JSON, and it is strict.

SPEC = TypeAdapter(JobSpec)
SPECS = [
    TrainSpec(max_steps=3),
    CompressSpec(model=ArtefactModel(attempt_id="a1"), method="nf4"),
    BenchmarkSpec(model=ArtefactModel(attempt_id="a1")),
]


def test_a_spec_survives_json_and_is_told_by_its_kind():
    for spec in SPECS:
        request = RunRequest(attempt_id="a", job_id="j", number=1, fence="f", spec=spec)
        assert RunRequest.model_validate_json(request.model_dump_json()) == request, spec
    for spec in SPECS:
        assert type(SPEC.validate_python(spec.model_dump())) is type(spec), spec


def test_what_a_message_cannot_mean_is_refused_by_its_field():
    with pytest.raises(ValidationError, match="shell"):
        TrainSpec.model_validate({"kind": "train", "shell": "rm -rf /"})
    with pytest.raises(ValidationError, match="kind"):
        SPEC.validate_python({"kind": "exec", "argv": ["sh"]})

    for name, value in [("max_steps", 0), ("micro_batch_size", -1), ("learning_rate", 0)]:
        with pytest.raises(ValidationError, match=name):
            TrainSpec.model_validate({name: value})

    with pytest.raises(ValidationError, match="seq"):
        RunEvent(seq=0, t_ms=0, kind="phase", body={})

    with pytest.raises(ValidationError, match="reason"):
        ExitRecord.model_validate(
            {"exit_code": 0, "signal": None, "reason": "bad luck", "by": "reaper",
             "started_at_ms": None, "ended_at_ms": 1}
        )  # fmt: skip


def test_every_shape_on_the_wire_is_frozen_and_refuses_unknown_fields():
    order = StopOrder(attempt_id="a", reason=Reason.SUPERSEDED)
    with pytest.raises(ValidationError, match="frozen"):
        order.reason = Reason.OK
    shapes = messages.Message.__subclasses__()
    assert len(shapes) > 20
    assert {shape.model_config["extra"] for shape in shapes} == {"forbid"}


def test_every_reason_has_one_class_and_crosses_the_wire_as_its_code():
    classes = [FAILED, STOPPED, ERROR]
    assert sum(len(each) for each in classes) == len(FAILED | STOPPED | ERROR)
    assert set(Reason) - (FAILED | STOPPED | ERROR) == {Reason.OK, Reason.QUEUE_TIMEOUT}
    for reason in Reason:
        record = ExitRecord(
            exit_code=None, signal=9, reason=reason, by="reaper", started_at_ms=None, ended_at_ms=1
        )
        assert json.loads(record.model_dump_json())["reason"] == reason.value, reason
        assert ExitRecord.model_validate_json(record.model_dump_json()).reason is reason, reason
    asked = {one for one in Reason if "by_user" in one.value or "by_operator" in one.value}
    assert len(asked) == 3
    assert asked <= STOPPED


# Every figure that a host may send has a range, so that no page meets one that it cannot show.

# Values of a run's own metrics may be any that are finite: a loss may well explode.
FREE = {"MetricPoint.properties.values.additionalProperties"}
FROM_SERVER = (
    "Reply",
    "Order",
    "WantedAttempt",
    "Needs",
    "RunRequest",
    "Gang",
)  # and what they hold
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
    for name, one in vars(display).items()
    if isfunction(one) and one.__module__ == display.__name__ and name[0] != "_"
    if [each.name for each in signature(one).parameters.values() if each.default is each.empty]
    in (["value"], ["ratio"])
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


def test_every_figure_of_a_message_has_an_upper_end():
    wrong = {
        path for shape in SENT for path in endless(shape.model_json_schema(), shape.__name__)
    } - FREE
    assert not wrong, wrong


def test_what_a_database_is_asked_by_is_printable():
    for text in ["a\x00b", "\x00", "a\nb", "\u00e4", "\ud800"]:
        for name in ["attempt_id", "fence"]:
            sent = {"attempt_id": "a", "fence": "f", "events": []}
            assert ReceivedBatch.model_validate(sent), (name, text)
            with pytest.raises(ValidationError, match=name):
                ReceivedBatch.model_validate(sent | {name: text})


def test_any_number_is_shown_without_a_fault():
    """PostgreSQL returns a large float of a document as an integer that no float may hold."""
    assert len(UNITS) > 20
    for shown, (name, value) in itertools.product(UNITS, HUGE.items()):
        assert isinstance(str(shown(value)), str), (shown, name)


def test_figures_beyond_their_range_are_refused_by_their_field():
    with pytest.raises(ValidationError, match="less than or equal to 1000"):
        TypeAdapter(messages.Beat).validate_python({"cpu_utilization": 1.7e308})
    # 82,000 jobs of a scheduler were 82,000 rows, written one by one within one request.
    with pytest.raises(ValidationError, match="less than or equal to 256"):
        SchedulerFacts(time_limit_minutes=60, max_jobs=81_814)
    for field in ["memory_available_bytes", "disk_free_bytes"]:
        figures = {"memory_available_bytes": 0, "disk_free_bytes": 0, field: -1}
        with pytest.raises(ValidationError, match=field):
            Beat(boot_id="b", sent_at_ms=1, agent_version="0", cpu_utilization=0, **figures)


# Laws of what goes over the wire: whatever is sent comes back, and nothing else passes.

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
def test_a_field_that_a_shape_lacks_is_refused_by_its_name(name, value):
    for shape in (TrainSpec, DemoModel, StopOrder, Doorbell):
        if name not in shape.model_fields:
            with pytest.raises(ValidationError) as caught:
                shape.model_validate({name: value})
            found = {one["loc"] for one in caught.value.errors() if one["type"] != "missing"}
            assert (name,) in found, shape


def test_what_a_job_cannot_do_is_refused_by_its_field():
    with pytest.raises(ValidationError, match="max_steps or time_budget_seconds, or both"):
        TrainSpec(time_budget_seconds=None)
    assert TrainSpec(time_budget_seconds=None, max_steps=1).max_steps == 1
    assert TrainSpec().time_budget_seconds == 120.0

    for shape, field, value in [
        (TrainSpec, "weight_dtype", "bf16"),  # it has a compute_dtype only
        (TrainSpec, "compute_dtype", "int8"),
        (CompressSpec, "method", "fp32"),
        (CompressSpec, "bits", 5),
        (BenchmarkSpec, "weight_dtype", "fp4"),
        (BenchmarkSpec, "repetitions", 0),
        (DemoModel, "num_hidden_layers", 0),
    ]:
        required = {} if shape in {TrainSpec, DemoModel} else {"model": {"source": "demo"}}
        with pytest.raises(ValidationError) as caught:
            shape.model_validate({**required, field: value})
        assert [one["loc"] for one in caught.value.errors()] == [(field,)], (shape, field, value)

    for source in ["https", "", None]:
        with pytest.raises(ValidationError) as caught:
            BenchmarkSpec.model_validate({"model": {"source": source}})
        message = str(caught.value)
        assert all(f"'{known}'" in message for known in ("demo", "folder", "artefact", "random"))

    for kind in ["Started", "end", ""]:
        with pytest.raises(ValidationError, match="'exited'"):
            RunEvent.model_validate({"seq": 1, "t_ms": 0, "kind": kind, "body": {}})


def test_a_batch_holds_at_most_five_hundred_events():
    for count, passes in [(0, True), (500, True), (501, False)]:
        events = [{"seq": n + 1, "t_ms": 0, "kind": "log", "body": {}} for n in range(count)]
        document = json.dumps({"attempt_id": "a", "fence": "f", "events": events})
        if passes:
            assert len(EventBatch.model_validate_json(document).events) == count, (count, passes)
        else:
            with pytest.raises(ValidationError, match=f"at most {MAX_BATCH_EVENTS} items"):
                EventBatch.model_validate_json(document)


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
    late = offset > DOORBELL_LIFETIME_SECONDS + CLOCK_SKEW_SECONDS
    assert code == (
        "expired" if late else "from_the_future" if offset < -CLOCK_SKEW_SECONDS else None
    )


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
    assert kept == [
        (json.loads(signed.body)["nonce"], NOW + DOORBELL_LIFETIME_SECONDS + CLOCK_SKEW_SECONDS)
    ]


def test_no_two_doorbells_or_keys_are_told_by_the_same_words():
    ping = Doorbell(command_id="c", kind="ping")
    rung = [sign(ping, host_id="h", key="k", now=NOW) for _ in range(200)]
    assert len({json.loads(one.body)["nonce"] for one in rung}) == 200
    assert len({one.mac for one in rung}) == 200
    keys = [f"secret-{n}" for n in range(100)]
    names = {key_id(key) for key in keys}
    assert len(names) == 100
    assert not any(name in key or key in name for name in names for key in keys)


def test_nonces_are_kept_over_restarts_until_they_expire(tmp_path):
    store = NonceStore(tmp_path / "nonces")
    assert store.is_new("old", until=1.0)
    assert store.is_new("held", until=4e9)
    assert store.is_new("old", until=4e9)
    assert not store.is_new("held", until=4e9)
    assert not store.is_new("old", until=4e9)
    until = 4e9
    assert NonceStore(tmp_path / "n").is_new("x", until)
    assert not NonceStore(tmp_path / "n").is_new("x", until)


# Doorbells: genuine ones pass once, all others are refused by name.

RING = Doorbell(command_id="c1", kind="start", attempt_id="a1", fence="f")


@pytest.fixture
def nonces(tmp_path):
    return NonceStore(tmp_path / "nonces.sqlite3")


def signed(key="key", host_id="h1", now=NOW):
    return sign(RING, host_id=host_id, key=key, now=now)


def check(doorbell, nonces, now=NOW):
    return verify(doorbell, host_id="h1", key="key", now=now, is_new_nonce=nonces.is_new)


def refusal(doorbell, nonces, now=NOW):
    with pytest.raises(SignatureRefusedError) as caught:
        check(doorbell, nonces, now)
    return caught.value.code


def test_a_genuine_doorbell_passes_even_after_a_refusal(nonces):
    assert check(signed(), nonces) == RING
    doorbell = signed()
    refusal(doorbell, nonces, NOW - 1000)
    assert check(doorbell, nonces) == RING


def test_fields_of_a_newer_server_do_not_spoil_a_genuine_doorbell(nonces):
    envelope = json.loads(signed().body)
    body = json.dumps(envelope | {"more": 1, "cmd": envelope["cmd"] | {"more": 1}})
    assert check(SignedDoorbell(body, _mac(body, "key")), nonces) == RING


def test_the_same_doorbell_does_not_pass_twice(nonces):
    doorbell = signed(now=4e9)
    check(doorbell, nonces, 4e9)
    assert refusal(doorbell, nonces, 4e9) == "replayed"


def test_one_changed_byte_is_noticed(nonces):
    body, mac = signed()
    assert refusal(SignedDoorbell(body.replace('"a1"', '"a2"'), mac), nonces) == "bad_mac"


def test_another_key_or_a_signature_that_is_no_ascii_is_refused(nonces):
    assert refusal(signed(key="stolen"), nonces) == "bad_mac"
    assert refusal(SignedDoorbell(signed().body, "ä"), nonces) == "bad_mac"


def test_a_doorbell_for_another_host_is_refused(nonces):
    assert refusal(signed(host_id="h2"), nonces) == "other_host"


def test_a_doorbell_holds_for_its_lifetime_and_the_skew_on_both_sides(nonces):
    late = NOW + DOORBELL_LIFETIME_SECONDS + CLOCK_SKEW_SECONDS
    assert refusal(signed(), nonces, late + 1) == "expired"
    assert check(signed(), nonces, late - 1) == RING
    assert refusal(signed(), nonces, NOW - CLOCK_SKEW_SECONDS - 1) == "from_the_future"
    assert check(signed(), nonces, NOW - CLOCK_SKEW_SECONDS + 1) == RING


def test_a_body_of_another_size_form_or_version_is_refused(nonces):
    assert refusal(SignedDoorbell("x" * (MAX_BODY_BYTES + 1), ""), nonces) == "too_large"
    for body in ["", "{}", "[]", '{"v": 1}', "\0"]:
        assert refusal(SignedDoorbell(body, _mac(body, "key")), nonces) == "malformed", body
    body = json.dumps(json.loads(signed().body) | {"v": 2})
    assert refusal(SignedDoorbell(body, _mac(body, "key")), nonces) == "malformed"
