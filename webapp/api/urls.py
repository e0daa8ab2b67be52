"""The API's addresses, its OpenAPI document, and health checks."""

from collections.abc import Callable
from functools import cache, wraps
from http import HTTPStatus
from typing import Any, cast

import redis
from django.contrib.auth.decorators import login_not_required
from django.contrib.auth.views import redirect_to_login
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, connection
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed, JsonResponse
from django.urls import URLPattern, URLResolver, path
from ninja import NinjaAPI
from ninja.errors import AuthenticationError, ValidationError, ValidationErrorContext
from ninja.main import Exc
from ninja.openapi.schema import OpenAPISchema
from pydantic import BaseModel

from webapp.api import (
    agents,
    cached_models,
    deployments,
    hosts,
    jobs,
    launches,
    library,
    model_copies,
    observed_jobs,
    openapi,
    plans,
    remote_code,
    servers,
    stored_files,
    team,
    tunings,
    workflows,
)
from webapp.api.auth import READ, TokenAuth
from webapp.api.parsing import LimitedParser
from webapp.api.requests import Inputs, inputs_of, with_request_rules
from webapp.core import bodies, outages, problems, readiness
from webapp.core.faults import in_words
from webapp.core.problems import BYTES_TYPE, MethodProblem, problem_response
from webapp.wizard.documents import without_tags

# ---------------------------------------------------------------------------
# Liveness and readiness of the web process; public, without details.
# ---------------------------------------------------------------------------


@login_not_required
def healthz(_request: HttpRequest) -> JsonResponse:
    """Return 200 while the process is alive."""
    return JsonResponse({"status": "ok"})


@login_not_required
def readyz(_request: HttpRequest) -> JsonResponse:
    """Return 200 if the database works and ``manage.py prepare`` of this version has run.

    A missing broker is reported but is not an error.
    """
    checks = {"database": _database(), "prepared": False, "broker": _broker()}
    checks["prepared"] = checks["database"] and readiness.is_prepared()
    is_ready = checks["prepared"]
    status = HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE
    return JsonResponse({"status": "ok" if is_ready else "not ready", **checks}, status=status)


def _database() -> bool:
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
    except DatabaseError:
        return False
    return True


def _broker() -> bool:
    try:
        return bool(outages.connection().ping())
    except (redis.RedisError, OSError):
        return False


# ---------------------------------------------------------------------------
# URLs of the API and of the health checks.
# ---------------------------------------------------------------------------


@cache
def _schema_of(model: type[BaseModel]) -> dict[str, Any]:
    return model.model_json_schema()


class DocumentedAPI(NinjaAPI):
    """The API, with a completed OpenAPI document (``webapp.api.openapi``).

    Handled exceptions keep neither the rejected values nor the frames that held them.
    """

    _document: OpenAPISchema | None = None

    def on_exception(self, request: HttpRequest, exc: Exc[Exception]) -> HttpResponse:
        """Return the response to an expected exception, and delete its tracebacks."""
        response = super().on_exception(request, exc)
        problems.release_frames(cast("BaseException", exc))
        return response

    def create_response(self, request: HttpRequest, data: object, **options: Any) -> HttpResponse:
        """Return the response of an operation; a 201 with the address of what it made."""
        response = super().create_response(request, data, **options)
        inputs: Inputs | None = getattr(request, "inputs", None)
        template = openapi.LOCATIONS.get(inputs.operation_id) if inputs else None
        if template and response.status_code == HTTPStatus.CREATED and isinstance(data, dict):
            response["Location"] = f"/api/v1/{template.format(**data)}"
        return response

    def validation_error_from_error_contexts(
        self, error_contexts: list[ValidationErrorContext[Any]]
    ) -> ValidationError:
        """Return the location and the fault of each invalid field of a request."""
        faults = []
        for context in error_contexts:
            error, model = context.pydantic_validation_error, context.model
            names = model.__ninja_flatten_map_reverse__
            for fault in in_words(problems.faults_of(error), _schema_of(model)):
                location = without_tags(names.get(fault["loc"], fault["loc"]))
                faults.append({**fault, "loc": (model.__ninja_param_source__, *location)})
            problems.release_frames(error)
        return ValidationError(faults)

    def get_openapi_schema(self, **options: Any) -> OpenAPISchema:
        """Return the OpenAPI document with what holds for all operations alike.

        It is made once for a process, which takes a second; nobody changes it.
        """
        if self._document is None:
            self._document = super().get_openapi_schema(**options)
            openapi.complete(self._document)
        return self._document


api = DocumentedAPI(
    title="Slipway",
    version="1",
    urls_namespace="api-v1",
    parser=LimitedParser(),
    description=(
        "What people do on the pages, for scripts: models, hosts, plans, launches, jobs, data, "
        "limits and tokens, with an access token as bearer. The operations of the tag “host "
        "agents” are those by which hosts report; their credentials come from an enrolment."
    ),
)
problems.install(api)

api.add_router("/hosts", agents.router)
api.add_router("/attempts", agents.attempts_router)
api.add_router("/plans", plans.router)
api.add_router("", plans.jobs_router)
api.add_router("", launches.router)
api.add_router("/planner", plans.planner_router)
api.add_router("", jobs.router)
api.add_router("", stored_files.router)
api.add_router("/hosts", hosts.router)
api.add_router("/hosts", cached_models.router)
api.add_router("/hosts", model_copies.router)
api.add_router("/copies", model_copies.of_hosts)
api.add_router("/pools", hosts.queue_router)
api.add_router("/workflows", workflows.router)
api.add_router("", tunings.router)
api.add_router("", deployments.router)
api.add_router("", servers.router)
api.add_router("", observed_jobs.router)
api.add_router("", library.router)
api.add_router("", remote_code.router)
api.add_router("", team.router)


NEEDS_LOGIN = frozenset({"openapi-view", "api-root"})
View = Callable[..., HttpResponse]


def _for_sessions_and_tokens(view: View) -> View:
    """Return the view of the OpenAPI document for people with a session or an access token.

    Anyone else gets a 401 problem; a browser, which accepts HTML by name, the login page.
    """

    @wraps(view)
    def authenticated(request: HttpRequest) -> HttpResponse:
        if request.method not in {"GET", "HEAD"}:
            return HttpResponseNotAllowed(["GET", "HEAD"])
        try:
            if any(method(request) for method in READ):
                return view(request)
        except Exception as error:  # noqa: BLE001 (as ninja does: unexpected ones are raised again)
            return api.on_exception(request, error)
        if "text/html" in request.headers.get("Accept", ""):
            return redirect_to_login(request.get_full_path())
        return api.on_exception(request, AuthenticationError())

    return authenticated


def _inputs() -> dict[str, dict[str, Inputs]]:
    """Return what the operations for people read, by address as Django writes it and by method."""
    return {
        f"{router.prefix}{address}".lstrip("/").replace("{", "<").replace("}", ">"): {
            method: inputs_of(operation)
            for operation in view.operations
            for method in operation.methods
            if any(isinstance(each, TokenAuth) for each in operation.auth_callbacks)
        }
        for router in api._get_bound_routers()  # noqa: SLF001 (there is no public list)
        for address, view in router.path_operations.items()
    }


def _largest_files() -> dict[str, dict[str, int]]:
    """Return the bytes of the files that operations take, by address and by method.

    Raises:
        ImproperlyConfigured: an operation takes a file or bytes and does not say how many.
    """
    found: dict[str, dict[str, int]] = {}
    for router in api._get_bound_routers():  # noqa: SLF001 (as above)
        for address, view in router.path_operations.items():
            at = f"{router.prefix}{address}".lstrip("/").replace("{", "<").replace("}", ">")
            for each in view.operations:
                stated = getattr(each.view_func, bodies.FILES, {})
                takes_files = any(one.__ninja_param_source__ == "file" for one in each.models)
                takes_bytes = BYTES_TYPE in str((each.openapi_extra or {}).get("requestBody"))
                if stated.keys() != set(each.methods if takes_files or takes_bytes else ()):
                    msg = f"{each.operation_id}: say by takes_file how many bytes it takes"
                    raise ImproperlyConfigured(msg)
                found.setdefault(at, {}).update(stated)
    return found


def _with_method_problem(view: View) -> View:
    """Return the view of an address whose 405 is a problem that names its methods."""

    @wraps(view)
    def answered(request: HttpRequest, *args: object, **kwargs: object) -> HttpResponse:
        response = view(request, *args, **kwargs)
        if not isinstance(response, HttpResponseNotAllowed):
            return response
        allowed = ", ".join(sorted(response["Allow"].split(", ")))
        detail = f"{request.method} is not a method of this address; it has {allowed}."
        refusal = problem_response(MethodProblem("method_not_allowed", detail))
        refusal["Allow"] = allowed
        return refusal

    return answered


def _login_exempt(patterns: list[URLPattern | URLResolver]) -> list[URLPattern | URLResolver]:
    """Exempt the operations from Django's login requirement: each has its own auth.

    Each gets a request id and idempotency keys.
    """
    inputs, files = _inputs(), _largest_files()
    for pattern in patterns:
        if isinstance(pattern, URLPattern) and pattern.name not in NEEDS_LOGIN:
            view = pattern.callback
            if pattern.name == "openapi-json":
                view = _for_sessions_and_tokens(view)
            view = _with_method_problem(view)
            rules = inputs.get(str(pattern.pattern), {})
            pattern.callback = login_not_required(with_request_rules(view, rules))
            setattr(pattern.callback, bodies.FILES, files.get(str(pattern.pattern), {}))
    return patterns


_patterns, _app, _namespace = api.urls
urlpatterns: list[URLPattern | URLResolver] = [
    path("api/v1/", (_login_exempt(_patterns), _app, _namespace)),
    path("healthz", healthz, name="healthz"),
    path("readyz", readyz, name="readyz"),
]
