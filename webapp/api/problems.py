"""RFC 9457: every refusal of the API is a problem document with a sentence that helps."""

from typing import Any

from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from ninja import NinjaAPI, Schema
from ninja.errors import AuthenticationError, AuthorizationError, HttpError, ValidationError
from pydantic import ValidationError as PydanticError

from webapp.core.problems import (
    ForbiddenProblem,
    InvalidProblem,
    NotFoundProblem,
    Problem,
    UnauthorizedProblem,
)

MEDIA_TYPE = "application/problem+json"


class ProblemDocument(Schema):
    """The body of every 4xx answer."""

    type: str
    title: str
    status: int
    detail: str
    code: str


REFUSALS = dict.fromkeys((400, 401, 403, 404, 409, 413, 422, 429), ProblemDocument)


def problem_response(problem: Problem) -> JsonResponse:
    """Return the response that carries a problem."""
    body = {
        "type": f"urn:slipway:problem:{problem.code}",
        "title": problem.title,
        "status": problem.status,
        "detail": problem.detail,
        "code": problem.code,
        **problem.facts,
    }
    response = JsonResponse(body, status=problem.status, content_type=MEDIA_TYPE)
    if "retry_after_seconds" in problem.facts:
        response["Retry-After"] = str(problem.facts["retry_after_seconds"])
    return response


def raw_problem(problem: Problem) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Return status, headers and body of a problem, for the branches without Django."""
    response = problem_response(problem)
    response["Cache-Control"] = "no-store"
    headers = [
        (name.lower().encode("latin-1"), value.encode("latin-1"))
        for name, value in response.items()
    ]
    return response.status_code, headers, response.content


def invalid(errors: list[dict[str, Any]]) -> InvalidProblem:
    """Return the problem that names the first wrong field, its value's fault, and the rest."""
    named = [(".".join(map(str, error["loc"])), str(error["msg"])) for error in errors]
    where, message = named[0]
    detail = f"The field {where or 'body'} is not valid: {message}."
    listed = [{"field": field, "message": message} for field, message in named]
    return InvalidProblem("invalid", detail, errors=listed)


def not_authenticated() -> UnauthorizedProblem:
    """Return the problem of a caller that shows nothing of who it is."""
    sentence = "Log in, or send this host's credential as `Authorization: Bearer …`."
    return UnauthorizedProblem("not_authenticated", sentence)


def install(api: NinjaAPI) -> None:
    """Answer every expected exception of ``api`` with a problem document."""

    @api.exception_handler(Problem)
    def on_problem(_request: HttpRequest, problem: Problem) -> HttpResponse:
        return problem_response(problem)

    @api.exception_handler(ValidationError)
    def on_invalid(_request: HttpRequest, error: ValidationError) -> HttpResponse:
        return problem_response(invalid(error.errors))

    @api.exception_handler(PydanticError)
    def on_invalid_inside(_request: HttpRequest, error: PydanticError) -> HttpResponse:
        return problem_response(invalid([dict(item) for item in error.errors()]))

    @api.exception_handler(AuthenticationError)
    def on_unknown(_request: HttpRequest, _error: AuthenticationError) -> HttpResponse:
        return problem_response(not_authenticated())

    @api.exception_handler(AuthorizationError)
    def on_forbidden(_request: HttpRequest, error: AuthorizationError) -> HttpResponse:
        return problem_response(ForbiddenProblem("forbidden", str(error)))

    @api.exception_handler(Http404)
    def on_missing(_request: HttpRequest, _error: Http404) -> HttpResponse:
        return problem_response(NotFoundProblem("not_found", "Nothing of yours has this id."))

    @api.exception_handler(HttpError)
    def on_http_error(_request: HttpRequest, error: HttpError) -> HttpResponse:
        problem = InvalidProblem("bad_request", error.message)
        problem.status = error.status_code
        return problem_response(problem)
