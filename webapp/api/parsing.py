"""Parse request bodies of the API: accept only JSON that every database can store."""

from typing import Any, cast

from django.http import HttpRequest
from ninja.parser import Parser

from runners.wire import parse_json, plain


class LimitedParser(Parser):
    """Rejects integers beyond 64 bits, deep nesting and invalid JSON.

    Events of an attempt are checked one by one (``runners.messages``), so that one invalid
    event does not block the others.
    """

    def parse_body(self, request: HttpRequest) -> dict[str, Any]:
        """Return the body of a request.

        Raises:
            ValueError: the body cannot be parsed; ninja answers with status 400.
        """
        body = parse_json(request.body)
        is_batch = request.path.startswith("/api/v1/attempts/") and request.path.endswith(
            "/events"
        )
        return cast("dict[str, Any]", body if is_batch else plain(body))
