"""What a job writes of a secret never passes, however it is cut and spelt."""

import base64
import json
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runners.supervision.output import MASK, Masker

TOKEN = b"hf_AbC+d/e=f0123456789"


def through(masker: Masker, *pieces: bytes) -> bytes:
    return b"".join(masker.feed(piece) for piece in pieces) + masker.flush()


@pytest.mark.parametrize("cut", range(len(TOKEN) + 1))
def test_a_value_that_comes_in_two_reads_is_masked(cut):
    assert (
        through(Masker([TOKEN]), b"a " + TOKEN[:cut], TOKEN[cut:] + b" b") == b"a " + MASK + b" b"
    )


def test_what_only_looks_like_a_beginning_is_passed_on():
    assert through(Masker([TOKEN]), b"hf_AbC", b" is short") == b"hf_AbC is short"


@pytest.mark.parametrize(
    "spelt",
    [
        TOKEN,
        base64.b64encode(TOKEN),
        quote(TOKEN.decode(), safe="").encode(),
        json.dumps('say "hf_AbC+d/e=f0123456789"').encode(),
    ],
    ids=["plain", "base64", "url", "json"],
)
def test_other_spellings_of_a_value_are_masked_too(spelt):
    assert TOKEN not in through(Masker([TOKEN]), spelt)
    assert spelt.strip(b'"') not in through(Masker([TOKEN]), spelt)


def test_every_line_of_a_value_of_several_is_masked():
    key = b"-----BEGIN KEY-----\nMIIEvQIBADANBgkq\nhkiG9w0BAQEFAASC\n-----END KEY-----"

    assert b"hkiG9w0" not in through(Masker([key]), b"line: hkiG9w0BAQEFAASC\n")


def test_without_secrets_nothing_is_changed_or_held_back():
    masker = Masker([])

    assert masker.feed(TOKEN) == TOKEN
    assert masker.flush() == b""


@given(st.lists(st.binary(max_size=12), max_size=8), st.integers(0, 40))
def test_no_cut_of_any_stream_lets_a_value_through(noise, at):
    stream = b"".join(noise)
    stream = stream[:at] + TOKEN + stream[at:]
    masker = Masker([TOKEN])

    out = through(masker, *(stream[i : i + 5] for i in range(0, len(stream), 5)))

    assert TOKEN not in out


@given(st.lists(st.sampled_from([b"x", b"h", b"hf_", b"\n"]), max_size=30))
def test_a_stream_without_a_value_comes_out_as_it_went_in(pieces):
    assert through(Masker([TOKEN]), *pieces) == b"".join(pieces)
