"""Which answers are compressed: pages and JSON, but no stream and nothing that shows a secret."""

import gzip

import pytest
from django.http import HttpResponse, StreamingHttpResponse
from django.test import RequestFactory

from tests.webapp.conftest import client_of
from webapp.core.middleware import CompressionMiddleware, uncompressed

TEXT = b"the same words again and again. " * 200


def answered(response: HttpResponse, **headers: str) -> HttpResponse:
    request = RequestFactory().get("/", headers={"Accept-Encoding": "gzip, br"} | headers)
    return CompressionMiddleware(lambda _request: response)(request)


def test_a_page_is_compressed_and_says_that_it_varies():
    found = answered(HttpResponse(TEXT))

    assert found["Content-Encoding"] == "gzip"
    assert "Accept-Encoding" in found["Vary"]
    assert gzip.decompress(found.content) == TEXT
    assert int(found["Content-Length"]) == len(found.content) < len(TEXT) / 5


def test_the_length_of_an_answer_is_padded_at_random():
    lengths = {len(answered(HttpResponse(TEXT)).content) for _ in range(50)}

    assert len(lengths) > 10


@pytest.mark.parametrize("accepted", ["", "identity", "br", "gzip;q=0", "xgzip"])
def test_who_does_not_take_gzip_gets_the_plain_text(accepted):
    assert answered(HttpResponse(TEXT), **{"Accept-Encoding": accepted}).content == TEXT


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_what_another_site_asked_for_is_not_compressed(site):
    assert answered(HttpResponse(TEXT), **{"Sec-Fetch-Site": site}).content == TEXT


@pytest.mark.parametrize("site", ["same-origin", "none"])
def test_what_this_site_or_the_address_bar_asked_for_is_compressed(site):
    found = answered(HttpResponse(TEXT), **{"Sec-Fetch-Site": site})

    assert found["Content-Encoding"] == "gzip"


def test_a_stream_is_left_alone():
    stream = StreamingHttpResponse(iter([b"data: 1\n\n" * 100]), content_type="text/event-stream")

    found = answered(stream)

    assert found is stream
    assert "Content-Encoding" not in found


def test_an_answer_that_shows_a_secret_is_not_compressed():
    assert answered(uncompressed(HttpResponse(TEXT))).content == TEXT


@pytest.mark.django_db(databases="__all__")
def test_the_page_with_an_enrolment_command_is_not_compressed(olga):
    client = client_of(olga)
    client.post("/hosts/add/", {"name": "box", "pool": "default"})
    asked = {"Accept-Encoding": "gzip"}

    page = client.post(
        "/hosts/add/", {"name": "box 2", "pool": "default"}, follow=True, headers=asked
    )

    assert b"slt_" in page.content
    assert "Content-Encoding" not in page.headers
    assert client.get("/hosts/", headers=asked)["Content-Encoding"] == "gzip"
