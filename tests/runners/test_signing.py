"""Doorbells: genuine ones pass once, all others are refused by name."""

import json

import pytest

from runners.app import (
    LIFETIME_SECONDS,
    MAX_BODY_BYTES,
    SKEW_SECONDS,
    SignatureRefusedError,
    SignedDoorbell,
    _mac,
    sign,
    verify,
)
from runners.messages import Doorbell
from runners.tasks import NonceStore

RING = Doorbell(command_id="c1", kind="start", attempt_id="a1", fence="f")
NOW = 1_800_000_000.0


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


def test_a_genuine_doorbell_passes(nonces):
    assert check(signed(), nonces) == RING


def test_the_same_doorbell_does_not_pass_twice(nonces):
    doorbell = signed(now=4e9)
    check(doorbell, nonces, 4e9)

    assert refusal(doorbell, nonces, 4e9) == "replayed"


def test_one_changed_byte_is_noticed(nonces):
    body, mac = signed()

    assert refusal(SignedDoorbell(body.replace('"a1"', '"a2"'), mac), nonces) == "bad_mac"


def test_another_key_is_noticed(nonces):
    assert refusal(signed(key="stolen"), nonces) == "bad_mac"


def test_a_signature_that_is_no_ascii_is_refused(nonces):
    assert refusal(SignedDoorbell(signed().body, "ä"), nonces) == "bad_mac"


def test_a_doorbell_for_another_host_is_refused(nonces):
    assert refusal(signed(host_id="h2"), nonces) == "other_host"


def test_an_old_doorbell_is_refused_after_its_end_and_the_skew(nonces):
    late = NOW + LIFETIME_SECONDS + SKEW_SECONDS

    assert refusal(signed(), nonces, late + 1) == "expired"
    assert check(signed(), nonces, late - 1) == RING


def test_a_doorbell_from_the_future_is_refused_beyond_the_skew(nonces):
    assert refusal(signed(), nonces, NOW - SKEW_SECONDS - 1) == "from_the_future"
    assert check(signed(), nonces, NOW - SKEW_SECONDS + 1) == RING


def test_a_huge_body_is_refused_before_it_is_looked_at(nonces):
    assert refusal(SignedDoorbell("x" * (MAX_BODY_BYTES + 1), ""), nonces) == "too_large"


@pytest.mark.parametrize("body", ["", "{}", "[]", '{"v": 1}', "\0"])
def test_a_signed_body_of_another_form_is_refused(nonces, body):
    assert refusal(SignedDoorbell(body, _mac(body, "key")), nonces) == "malformed"


def test_another_version_is_refused(nonces):
    body = json.dumps(json.loads(signed().body) | {"v": 2})

    assert refusal(SignedDoorbell(body, _mac(body, "key")), nonces) == "malformed"


def test_a_refused_doorbell_does_not_use_up_its_nonce(nonces):
    doorbell = signed()
    refusal(doorbell, nonces, NOW - 1000)

    assert check(doorbell, nonces) == RING


def test_nonces_are_shared_between_processes_and_kept_over_restarts(tmp_path):
    until = 4e9

    assert NonceStore(tmp_path / "n").is_new("x", until)
    assert not NonceStore(tmp_path / "n").is_new("x", until)


def test_nonces_are_forgotten_when_they_expire(nonces):
    assert nonces.is_new("x", until=1.0)
    assert nonces.is_new("x", until=1.0)
