"""Middleware that rejects text that databases cannot store.

PostgreSQL cannot store NUL in text, and no database can store a lone surrogate. This middleware
checks URLs, queries and forms; ``webapp.api.parsing`` checks JSON bodies.
"""

import re
from collections.abc import Callable, Iterator

from django.http import HttpRequest, HttpResponse
from django.http.request import UnreadablePostError
from django.shortcuts import render

from webapp.core.problems import Problem

UNKEPT = re.compile("[\x00\ud800-\udfff]")
FORMS = ("application/x-www-form-urlencoded", "multipart/form-data")
LONGEST_NAME = 40
API = "/api/"  # parses its bodies itself and has no forms
GetResponse = Callable[[HttpRequest], HttpResponse]


class ReadableTextMiddleware:
    """Answers 400 with the name of the field; ignores cookies with such text."""

    def __init__(self, get_response: GetResponse) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        """Delete unreadable cookies, and call the next handler."""
        for name in [name for name, value in request.COOKIES.items() if UNKEPT.search(value)]:
            del request.COOKIES[name]
        return self.get_response(request)

    def process_view(
        self, request: HttpRequest, _view: object, _args: object, _kwargs: object
    ) -> HttpResponse | None:
        """Return the 400 response, or None for a readable request."""
        try:
            where = next((where for where, text in _texts(request) if UNKEPT.search(text)), None)
        except UnreadablePostError:
            return None  # the client disconnected
        return None if where is None else _refused(request, where)


def _texts(request: HttpRequest) -> Iterator[tuple[str, str]]:
    """Yield the location and the text of every text in a request."""
    yield "The address", request.path_info
    fields = [("The query", request.GET)]
    is_api = request.path_info.startswith(API)
    if request.method == "POST" and request.content_type in FORMS and not is_api:
        fields.append(("The form", request.POST))
    for place, values in fields:
        for name, texts in values.lists():
            yield f"The name of a field of {place.lower()}", name
            for text in texts:
                yield f"Field “{name[:LONGEST_NAME]}” of {place.lower()}", str(text)
    if len(fields) > 1:
        for name, files in request.FILES.lists():
            for file in files:
                yield f"The name of the file in the field “{name[:LONGEST_NAME]}”", file.name or ""


def _refused(request: HttpRequest, where: str) -> HttpResponse:
    from webapp.api.problems import problem_response  # here: webapp.api imports webapp.core

    detail = (
        f"{where} holds a NUL character or half of a surrogate pair, which no database keeps. "
        "Take it out and send the rest again."
    )
    problem = Problem("unreadable_text", detail)
    if request.path_info.startswith(API):
        return problem_response(problem)
    return render(request, "400.html", {"detail": detail}, status=problem.status)
