"""Compression of pages and JSON with mitigations against BREACH.

BREACH derives a secret from the length of a compressed page: the attacker makes the victim's
browser open the page with guesses in the URL and observes the size of the responses. Mitigations:

- Django masks the CSRF token in every response, and pads the response by up to 100 random bytes.
- Cross-site requests get uncompressed responses.
- A page that shows a secret is marked (``uncompressed``) and never compressed.
- Streamed responses are not compressed: server-sent events must not be buffered, and artefacts
  are compressed where it is worth it.

Static files bypass this: they contain no secrets and are compressed at collection.
"""

from typing import TypeVar

from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.middleware.gzip import GZipMiddleware
from servestatic.utils import parse_accept_encoding

OTHER_SITES = ("cross-site", "same-site")  # another host of the same domain is not trusted
MARK = "_shows_a_secret"
Response = TypeVar("Response", bound=HttpResponseBase)


def uncompressed(response: Response) -> Response:
    """Mark a response that shows a secret, so that it is never compressed."""
    setattr(response, MARK, True)
    return response


class CompressionMiddleware(GZipMiddleware):
    """Django's gzip middleware with random padding, for responses that may be compressed."""

    def process_response(
        self, request: HttpRequest, response: HttpResponseBase
    ) -> HttpResponseBase:
        """Return the response, compressed if the client accepts it and it may be compressed."""
        if response.streaming or hasattr(response, MARK) or not _may_compress(request):
            return response
        return super().process_response(request, response)


def _may_compress(request: HttpRequest) -> bool:
    accepted = parse_accept_encoding(request.headers.get("Accept-Encoding", ""))
    return "gzip" in accepted and request.headers.get("Sec-Fetch-Site") not in OTHER_SITES
