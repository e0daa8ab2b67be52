"""What all operations share: request ids, idempotency keys, and pages with cursors."""

import base64
import difflib
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import wraps
from typing import Annotated, Any, NamedTuple, TypeVar

import structlog
from django.core.exceptions import ValidationError
from django.db import DatabaseError, IntegrityError, transaction
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from ninja import Query, Schema
from ninja.operation import Operation
from pydantic import ConfigDict

from runners.jobspec.base import parse_json
from webapp.accounts.models import StoredReply
from webapp.accounts.tokens import acting_as
from webapp.core import vault
from webapp.core.clock import now
from webapp.core.ids import new_ulid
from webapp.core.pace import calls
from webapp.core.problems import (
    BYTES_TYPE,
    REQUEST_ID,
    ConflictProblem,
    InvalidProblem,
    MediaTypeProblem,
    problem_response,
)
from webapp.core.queries import NewestFirst

log = structlog.get_logger(__name__)

# Request ids: each response names one, and what is logged during the request names it too.

KEY_HEADER = "Idempotency-Key"
REPLAYED = "Idempotency-Replayed"
RATE_LIMIT, RATE_REMAINING = "RateLimit-Limit", "RateLimit-Remaining"
RATE_RESET = "RateLimit-Reset"
LONGEST_KEY = 64
WRITES = frozenset({"POST", "PUT", "PATCH", "DELETE"})
NO_BODY = re.compile(rb"\s*(\{\}|null|--[^\r\n]{1,70}--)?\s*")  # nothing, as JSON or multipart
KEPT = timedelta(hours=24)  # replies, for repetitions
FORM_TYPE = "multipart/form-data"
STUCK = timedelta(minutes=2)  # a request without a reply for so long was cut off

View = Callable[..., HttpResponseBase]


class Inputs(NamedTuple):
    """What an operation reads of a request: query parameters, those that repeat, and a body."""

    operation_id: str
    query: frozenset[str]
    repeated: frozenset[str]
    has_body: bool
    has_file: bool


def inputs_of(operation: Operation) -> Inputs:
    """Return what an operation reads of a request."""
    sources = {model.__ninja_param_source__ for model in operation.models}
    queries = [each for each in operation.models if each.__ninja_param_source__ == "query"]
    return Inputs(
        operation_id=operation.operation_id or "",
        query=frozenset(
            names[-1]
            for model in queries
            for names in model.__ninja_flatten_map_reverse__.values()
        ),
        repeated=frozenset(
            name for model in queries for name in model.__ninja_collection_fields__ or ()
        ),
        has_body=bool(sources & {"body", "form", "file"})
        or BYTES_TYPE in str((operation.openapi_extra or {}).get("requestBody")),
        has_file="file" in sources,
    )


def inputs_check(request: HttpRequest) -> None:
    """Refuse what the operation would not read, once the caller is known.

    Raises:
        InvalidProblem: a query parameter is unknown or stands twice, or there is a body where
            none is read.
        MediaTypeProblem: there is no form where a file is read.
    """
    inputs: Inputs | None = getattr(request, "inputs", None)
    if inputs is None:
        return
    for name, values in request.GET.lists():
        if name not in inputs.query:
            near = difflib.get_close_matches(name, inputs.query, 1)
            known = ", ".join(sorted(inputs.query)) or "none"
            hint = f"Did you mean {near[0]}? " if near else ""
            raise InvalidProblem(
                name[:40],
                f"There is no query parameter {name[:40]!r} here. {hint}There are: {known}.",
            )
        if len(values) > 1 and name not in inputs.repeated:
            raise InvalidProblem(
                name, f"The query parameter {name} stands {len(values)} times; it is read once."
            )
    if inputs.has_file and request.content_type != FORM_TYPE:
        kind = (request.content_type or "missing")[:80]
        raise MediaTypeProblem(
            "unsupported_media_type",
            f"The Content-Type is {kind}; this operation reads a file as a part of "
            f"{FORM_TYPE}, such as `curl -F file=@data.jsonl`.",
        )
    if not inputs.has_body and request.method in WRITES and not NO_BODY.fullmatch(request.body):
        raise InvalidProblem(
            "body",
            f"This operation reads no body, and {len(request.body)} bytes were sent. Leave them "
            "out; nothing was done.",
        )


def with_request_rules(view: View, inputs: Mapping[str, Inputs]) -> View:
    """Return the view of operations with a request id, and with idempotency keys on writes.

    ``inputs``, by method, are checked when the caller is known (``inputs_check``). The token of a
    request (``acting_token``) ends with it.
    """

    @wraps(view)
    def ruled(request: HttpRequest, *args: object, **kwargs: object) -> HttpResponseBase:
        request.inputs = inputs.get(str(request.method))  # type: ignore[attr-defined]
        request_id = new_ulid()
        with structlog.contextvars.bound_contextvars(request_id=request_id), acting_as(None):
            try:
                response = _once(view, request, *args, **kwargs)
            except Exception as error:  # Django logs it with its notes
                error.add_note(f"Request id: {request_id}")
                request.request_id = request_id  # type: ignore[attr-defined]
                raise
        response[REQUEST_ID] = request_id
        if paced := getattr(request, "paced", None):
            rest, seconds = calls.rest(*paced)
            response[RATE_LIMIT] = str(paced[0].burst)
            response[RATE_REMAINING], response[RATE_RESET] = str(rest), str(seconds)
        return response

    return ruled


def _once(view: View, request: HttpRequest, *args: object, **kwargs: object) -> HttpResponseBase:
    """Carry out a write with an idempotency key once; a repetition gets the first reply.

    Only successes are kept: after a refusal, the same key may be used with a corrected request.
    Bytes are not kept either: what sends them back stores nothing.
    """
    key = request.headers.get(KEY_HEADER, "")
    if request.method not in WRITES or KEY_HEADER not in request.headers:
        return view(request, *args, **kwargs)
    if not 0 < len(key) <= LONGEST_KEY or not key.isascii() or not key.isprintable():
        return problem_response(
            InvalidProblem(
                "idempotency_key",
                f"The header {KEY_HEADER} has {len(key)} characters; it can have 1 to "
                f"{LONGEST_KEY} printable ASCII characters, such as a UUID.",
            )
        )
    row, is_new = _row_of(_caller(request), key, _digest(request))
    if not is_new:
        return _repeated(row, request)
    try:
        response = view(request, *args, **kwargs)
    except BaseException:
        row.delete()
        raise
    if _is_kept(response):
        _keep(row, response)
    else:
        row.delete()
    return response


def _keep(row: StoredReply, response: HttpResponseBase) -> None:
    """Store the reply to a write that was carried out.

    A reply that cannot be stored is given to this caller alone: the key stays used, so that its
    repetition is told so (``reply_lost``) instead of carrying the write out again.
    """
    try:
        with transaction.atomic():
            row.status, row.sealed = response.status_code, _sealed(row, response)
            row.save(update_fields=["status", "sealed"])
    except Exception:
        log.exception("reply_not_stored", key=row.key, status=row.status)
        with suppress(DatabaseError):  # the caller has the reply even if nothing can be stored
            StoredReply.objects.filter(pk=row.pk).update(status=row.status, sealed="")


def _is_kept(response: HttpResponseBase) -> bool:
    is_success = response.status_code < 400  # noqa: PLR2004
    return is_success and not response.streaming and response.get("Content-Type") != BYTES_TYPE


def _caller(request: HttpRequest) -> str:
    """Return a digest of the credential, so that nobody meets another caller's keys."""
    shown = request.headers.get("Authorization") or f"session {request.session.session_key}"
    return hashlib.sha256(shown.encode(errors="replace")).hexdigest()


def job_key(request: HttpRequest) -> str | None:
    """Return the key under which a launch stores its job: one per caller and idempotency key.

    A launch that was cut off after its job was stored finds that job when it is repeated.
    """
    key = request.headers.get(KEY_HEADER, "")
    return hashlib.sha256(f"{_caller(request)} {key}".encode()).hexdigest() if key else None


def _digest(request: HttpRequest) -> str:
    """Return a digest of what is asked for; of a form its fields and files, not how they came.

    Each sending of a form has a boundary of its own, and a file may be larger than memory allows.
    """
    parts = [str(request.method).encode(), request.get_full_path().encode()]
    if request.content_type == FORM_TYPE:
        fields = sorted((name, request.POST.getlist(name)) for name in request.POST)
        parts.append(json.dumps(fields).encode())
        for name, files in sorted(request.FILES.lists()):
            for file in files:
                digest = hashlib.sha256()
                for piece in file.chunks():
                    digest.update(piece)
                file.seek(0)
                parts.append(json.dumps([name, file.name, digest.hexdigest()]).encode())
    else:
        parts.append(request.body)
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def _row_of(caller: str, key: str, digest: str) -> tuple[StoredReply, bool]:
    """Return the row of a key, and whether this request made it."""
    rows = StoredReply.objects.filter(caller=caller, key=key)
    instant = now()
    rows.filter(Q(at__lt=instant - KEPT) | Q(status=None, at__lt=instant - STUCK)).delete()
    fields = {"caller": caller, "key": key, "request_digest": digest, "at": instant}
    try:
        with transaction.atomic():
            return StoredReply.objects.create(**fields), True
    except IntegrityError:
        row = rows.first()
        return (row, False) if row else (StoredReply(**fields), False)


def _repeated(row: StoredReply, request: HttpRequest) -> HttpResponse:
    if row.request_digest != _digest(request):
        return problem_response(
            InvalidProblem(
                "key_reused",
                f"The {KEY_HEADER} {row.key!r} was used for another request. Use a new key for "
                "each request, and the same one only to repeat a request.",
            )
        )
    if row.status is None:
        return problem_response(
            ConflictProblem(
                "in_progress",
                "A request with this key is being carried out. Repeat it in a second.",
                retry_after_seconds=1,
            )
        )
    try:
        content_type, text, *more = parse_json(vault.unseal(row.sealed, owner=_owner(row)))
    except vault.VaultError:  # it was not stored, or the keys of the site were replaced since
        return problem_response(
            ConflictProblem(
                "reply_lost",
                "The request with this key was carried out, and its reply cannot be read again. "
                "Look at what it made before you repeat it with a new key.",
            )
        )
    response = HttpResponse(text.encode(), status=row.status, content_type=content_type)
    response[REPLAYED] = "true"
    if any(more):  # none in a reply that was stored before an upgrade
        response["Location"] = more[0]
    return response


def _sealed(row: StoredReply, response: HttpResponseBase) -> str:
    body = response.content.decode() if isinstance(response, HttpResponse) else ""
    parts = [response.get("Content-Type", ""), body, response.get("Location", "")]
    return vault.seal(json.dumps(parts), owner=_owner(row))


def _owner(row: StoredReply) -> str:
    return f"reply {row.caller} {row.key}"


def replies_forget_old() -> int:
    """Delete the replies that are no longer repeated; return how many."""
    return StoredReply.objects.filter(at__lt=now() - KEPT).delete()[0]


class Sent(Schema):
    """What a caller sends: a field that it does not know is an error."""

    model_config = ConfigDict(extra="forbid")


# Pages of lists, continued by a cursor that names the last item, so that new items shift none.

Item = TypeVar("Item")
Position = TypeVar("Position")
MOST_ITEMS = 200


class Paging(Schema):
    """The query of a list."""

    limit: Annotated[
        int, Query(ge=1, le=MOST_ITEMS, description=f"Most items of the page, 1 to {MOST_ITEMS}")
    ] = 50
    cursor: Annotated[
        str,
        Query(
            description="``next_cursor`` of the page before, with the same filters; empty for the "
            "first page"
        ),
    ] = ""


class ShortPaging(Paging):
    """The query of a list that seldom has more than a page."""

    limit: Annotated[
        int, Query(ge=1, le=MOST_ITEMS, description=f"Most items of the page, 1 to {MOST_ITEMS}")
    ] = MOST_ITEMS


def list_mark(name: str, paging: Paging) -> str:
    """Return a short digest of a list and of its filters, which a cursor belongs to."""
    filters = paging.model_dump(mode="json", exclude={"limit", "cursor"})
    text = json.dumps([name, filters], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def cursor_text(position: str, key: str, mark: str) -> str:
    """Return a cursor as opaque text: position and key of the last item, and its list's mark."""
    raw = json.dumps([position, key, mark]).encode()
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def cursor_of(text: str, mark: str, read: Callable[[str], Position]) -> tuple[Position, str]:
    """Return the position and key in a cursor of the list with this mark.

    ``read`` turns the position's text into what it is, and may raise a ``ValueError``.

    Raises:
        InvalidProblem: the text is no cursor, or one of another list or of other filters.
    """
    try:
        raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        position, key, of_list = parse_json(raw)
        if of_list == mark and isinstance(key, str) and "\0" not in key:
            return read(position), key
    except (ValueError, TypeError, OverflowError):
        pass
    raise foreign_cursor(text)


def _instant(text: str) -> datetime:
    """Return an instant as the database stores it: with a time zone, not before the year 1."""
    return datetime.fromisoformat(text).astimezone(UTC)


def foreign_cursor(text: str) -> InvalidProblem:
    """Return the problem of a cursor that a list has not given."""
    return InvalidProblem(
        "cursor",
        f"The cursor {text[:40]!r} was not returned by this list with these filters. Leave "
        "it out for the first page, and continue with next_cursor.",
    )


class Listed(NamedTuple):
    """The keys of a page in order, and the cursor of the next page."""

    keys: list[str]
    next_cursor: str | None


def page_keys(
    rows: QuerySet[Any], by: str, teams: Sequence[str], paging: Paging, *, is_rising: bool = False
) -> Listed:
    """Return the keys of a page of teams' rows by the column ``by``: newest first, or rising."""
    mark = list_mark(rows.model._meta.label, paging)
    if paging.cursor:
        at, key = cursor_of(paging.cursor, mark, _instant)
        try:
            rows.model._meta.pk.to_python(key)
        except ValidationError as error:  # written by hand: the keys are numbers
            raise foreign_cursor(paging.cursor) from error
        beyond = "gt" if is_rising else "lt"
        rows = rows.filter(Q(**{f"{by}__{beyond}": at}) | Q(**{by: at, f"pk__{beyond}": key}))
    if is_rising:
        rising = rows.order_by(by, "pk").values_list(by, "pk")
        found: list[tuple[Any, str]] = list(rising[: paging.limit + 1])
    else:
        found = NewestFirst(rows, by, teams).pairs(paging.limit + 1)
    shown = found[: paging.limit]
    more = None
    if len(found) > paging.limit:
        last_at, last_key = shown[-1]
        more = cursor_text(last_at.isoformat(), str(last_key), mark)
    return Listed([key for _, key in shown], more)


def page_of(
    name: str, items: Sequence[Item], key: Callable[[Item], str], paging: Paging
) -> tuple[list[Item], str | None]:
    """Return a page of a list in memory, and the cursor of the next page.

    ``name`` and the filters say which list it is. A page goes on after the last item of the one
    before, and where that is gone, at its place.
    """
    mark, start = list_mark(name, paging), 0
    if paging.cursor:
        position, last = cursor_of(paging.cursor, mark, int)
        places = (place for place, item in enumerate(items, 1) if key(item) == last)
        start = next(places, max(0, position - 1))
    end = start + paging.limit
    shown = list(items[start:end])
    more = cursor_text(str(end), key(shown[-1]), mark) if len(items) > end else None
    return shown, more
