"""Liveness and readiness of the web process; public, without details."""

from http import HTTPStatus

import redis
from django.contrib.auth.decorators import login_not_required
from django.db import DatabaseError, connection
from django.http import HttpRequest, JsonResponse

from webapp.core import broker


@login_not_required
def healthz(_request: HttpRequest) -> JsonResponse:
    """Return 200 while the process is alive."""
    return JsonResponse({"status": "ok"})


@login_not_required
def readyz(_request: HttpRequest) -> JsonResponse:
    """Return 200 if the database works; a missing broker is reported but is not an error."""
    checks = {"database": _database(), "broker": _broker()}
    is_ready = checks["database"]
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
        return bool(broker.connection().ping())
    except (redis.RedisError, OSError):
        return False
