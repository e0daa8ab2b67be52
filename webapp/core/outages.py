"""Outages of Redis, the database and the disk."""

import errno
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple

import redis
import structlog
from django.conf import settings
from django.db import (
    DatabaseError,
    InterfaceError,
    InternalError,
    OperationalError,
    connections,
    transaction,
)
from django.http import HttpRequest, HttpResponse
from django.template.loader import render_to_string
from django.views import defaults

from runners.host.redis_access import connect
from webapp.core.problems import (
    REQUEST_ID,
    BusyProblem,
    NotFoundProblem,
    Problem,
    UnavailableProblem,
    UnexpectedProblem,
    problem_response,
)

# ---------------------------------------------------------------------------
# Failures of the database or disk: one sentence, and when to retry.
#
# All such failures are classified here. Pages and the API answer them with 503 through
# ``server_error``, Django's handler of uncaught exceptions; the heartbeat endpoint uses
# ``outage_of``. Programming errors remain 500.
# ---------------------------------------------------------------------------


log = structlog.get_logger(__name__)
API_PREFIX = "/api/"
SOON_SECONDS, LATER_SECONDS = 5, 30


class Outage(NamedTuple):
    """One kind of failure: its code, its message, and the seconds until a retry."""

    code: str
    sentence: str
    seconds: int


FULL = Outage(
    "disk_full",
    "The server's disk is full. This change was not stored; earlier data is safe, and jobs "
    "continue. An operator of the server has to free disk space.",
    LATER_SECONDS,
)
READ_ONLY = Outage(
    "read_only",
    "The server cannot write to its data folder or database. This change was not stored. An "
    "operator of the server has to check its disk and the owner of its files.",
    LATER_SECONDS,
)
BUSY = Outage(
    "database_busy",
    "The database is locked by another process. This change was not stored. Try again soon.",
    SOON_SECONDS,
)
OLD_SCHEMA = Outage(
    "schema_incomplete",
    "The database lacks tables of this version. An operator of the server has to start Slipway "
    "again, which creates them.",
    LATER_SECONDS,
)
DAMAGED = Outage(
    "database_damaged",
    "The database is damaged. An operator of the server has to restore a backup with "
    "python3 manage.py restore.",
    LATER_SECONDS,
)
DATABASE_UNAVAILABLE = Outage(
    "database_away",
    "The database does not answer. Jobs continue, and hosts keep their reports. Try again in a "
    "moment.",
    SOON_SECONDS,
)
# Parts of error messages of SQLite, PostgreSQL and their drivers; the first match counts.
BY_WORDS = (
    (FULL, ("is full", "no space left", "disk quota")),
    (READ_ONLY, ("readonly", "read-only", "unable to open database file", "permission denied")),
    (BUSY, ("locked", "deadlock", "lock timeout", "canceling statement")),
    (OLD_SCHEMA, ("no such table", "no such column", "has no column")),
    (DAMAGED, ("malformed", "not a database")),
)
BY_ERRNO = {
    errno.ENOSPC: FULL,
    errno.EDQUOT: FULL,
    errno.EROFS: READ_ONLY,
}


def outage_of(error: BaseException | None) -> UnavailableProblem | None:
    """Return the problem of a database or disk failure; None for any other error."""
    if isinstance(error, OSError):
        return _problem(BY_ERRNO.get(error.errno or 0))
    if not isinstance(error, DatabaseError | InterfaceError):
        return None
    words = str(error).lower()
    kind = next(
        (kind for kind, phrases in BY_WORDS if any(phrase in words for phrase in phrases)), None
    )
    if isinstance(error, OperationalError | InterfaceError):
        return _problem(kind or DATABASE_UNAVAILABLE)
    is_outage = kind is DAMAGED or (isinstance(error, InternalError) and kind is READ_ONLY)
    return _problem(kind) if is_outage else None


def _problem(kind: Outage | None) -> UnavailableProblem | None:
    if kind is None:
        return None
    return UnavailableProblem(kind.code, kind.sentence, retry_after_seconds=kind.seconds)


def server_error(request: HttpRequest) -> HttpResponse:
    """Answer an uncaught exception: an outage with 503, anything else with 500.

    The API answers both with a problem document; its request id is the one in the server's log.
    """
    problem = outage_of(sys.exception())
    if request.path.startswith(API_PREFIX):
        return _problem_of(request, problem)
    if problem is None:
        return defaults.server_error(request)
    seconds = problem.facts["retry_after_seconds"]
    html = render_to_string("503.html", {"detail": problem.detail, "seconds": seconds})
    response = HttpResponse(html, status=HTTPStatus.SERVICE_UNAVAILABLE)
    response["Retry-After"] = str(seconds)
    response["Cache-Control"] = "no-store"
    return response


def _problem_of(request: HttpRequest, problem: Problem | None) -> HttpResponse:
    request_id = getattr(request, "request_id", "")
    words = (
        "The server failed in a way that it does not expect. Its log has the error"
        f"{' with the request id ' * bool(request_id)}{request_id}."
    )
    answer = problem_response(problem or UnexpectedProblem("unexpected", words))
    if request_id:
        answer[REQUEST_ID] = request_id
    return answer


def not_found(request: HttpRequest, exception: Exception) -> HttpResponse:
    """Answer an unknown URL: with a problem document for the API, else with the 404 page."""
    if not request.path.startswith(API_PREFIX):
        return defaults.page_not_found(request, exception)
    return problem_response(NotFoundProblem("no_such_address", "The API has no such address."))


# ---------------------------------------------------------------------------
# Notes of a use, stored beside a request that only reads: it waits for none and fails with none.
# ---------------------------------------------------------------------------


NOTE_WAIT_MS = 100
REST_SECONDS = 60.0


class UseNotes:
    """Writes that a request can do without, such as the time of a token's last use.

    A write that the database refuses or another process locks out is left out, and for a minute
    none is tried again.
    """

    def __init__(self) -> None:
        self._rests_until = 0.0

    def store(self, write: Callable[[], object], what: str) -> bool:
        """Write, and return whether it was stored; ``what`` names it in the log."""
        if time.monotonic() < self._rests_until:
            return False
        try:
            with _short_lock_wait():
                write()
        except DatabaseError:
            self._rests_until = time.monotonic() + REST_SECONDS
            log.warning("a use was not noted", what=what, exc_info=True)
            return False
        return True

    def forget(self) -> None:
        """Try again at once."""
        self._rests_until = 0.0


@contextmanager
def _short_lock_wait() -> Iterator[None]:
    """Let the writes of a block wait for a lock no longer than ``NOTE_WAIT_MS``."""
    connection = connections["default"]
    if connection.vendor == "postgresql":
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("SELECT set_config('lock_timeout', %s, true)", [str(NOTE_WAIT_MS)])
            yield
        return
    with connection.cursor() as cursor:
        cursor.execute("PRAGMA busy_timeout = " + str(int(NOTE_WAIT_MS)))
        try:
            with transaction.atomic():  # a failure within an outer transaction leaves that whole
                yield
        finally:
            seconds = connection.settings_dict["OPTIONS"].get("timeout", 5)
            cursor.execute("PRAGMA busy_timeout = " + str(int(seconds * 1000)))


# ---------------------------------------------------------------------------
# Redis connections of the web side, and a circuit breaker for an unavailable Redis.
# ---------------------------------------------------------------------------


RETRY_AFTER_SECONDS = 1.0
CONSUMER = "slipway-consumer"  # reads the hosts' event streams
DISPATCHER = "slipway-dispatcher"  # sends wake signals to hosts
_roles: dict[tuple[str, str], str] = {}


@cache
def client(url: str) -> redis.Redis:
    """Return this process's client for a Redis URL, with short timeouts."""
    limits = {"socket_timeout": 2, "socket_connect_timeout": 1, "health_check_interval": 10}
    return connect(url, settings.REDIS_CA, **limits)


def connection(role: str = "") -> redis.Redis:
    """Return this process's client for the configured Redis, with the role's user if set."""
    return client(url_for(role))


def url_for(role: str) -> str:
    """Return the Redis URL of a role; the configured URL if the role has no own user."""
    return _roles.get((settings.REDIS_URL, role), settings.REDIS_URL)


def take_role(role: str, url: str) -> None:
    """Set the Redis URL that this process uses for a role."""
    _roles[settings.REDIS_URL, role] = url


def is_of_one_host(error: BaseException | None) -> bool:
    """Return whether an error is Redis's WRONGTYPE for the value of a host's key.

    A host's users may write any type of value under the host's prefix.
    """
    while error is not None and "WRONGTYPE" not in str(error):
        error = error.__cause__ or error.__context__
    return error is not None


class Breaker:
    """Circuit breaker: after a failure, fail at once for a second instead of timing out."""

    def __init__(self) -> None:
        self._closed_at = 0.0

    def is_open(self) -> bool:
        """Return whether it is too early to retry."""
        return time.monotonic() < self._closed_at

    def trip(self) -> None:
        """Record a failure."""
        self._closed_at = time.monotonic() + RETRY_AFTER_SECONDS


# ---------------------------------------------------------------------------
# Reject uploads before the disk is full; the senders keep their data and retry.
# ---------------------------------------------------------------------------


MIN_FREE_BYTES = 256 * 1024**2
PAUSE_SECONDS = 60


def check_room(folder: Path, needed_bytes: int) -> None:
    """Check that the disk of ``folder`` has enough free space.

    Raises:
        BusyProblem: less than ``needed_bytes`` are free.
    """
    if shutil.disk_usage(folder).free < needed_bytes:
        raise BusyProblem(
            "disk_full",
            "The server's disk is nearly full. Hosts keep their data and send it later. Free disk "
            "space on the server.",
            retry_after_seconds=PAUSE_SECONDS,
        )
