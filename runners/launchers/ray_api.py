"""Our requests to a Ray cluster: its Jobs REST API, and the list of its nodes.

Both are plain HTTP with JSON, so the agent needs no Ray of the cluster's release: the library
weighs some 380 MB and talks to its own release alone. The standard library speaks it: a machine
is validated before packages for HTTP are on it.

Jobs: https://docs.ray.io/en/latest/cluster/running-applications/job-submission/api.html; the nodes
are what ``ray list nodes`` asks for (``/api/v0/nodes``, Ray's State API). A token is that of
https://docs.ray.io/en/latest/ray-security/token-auth.html.
"""

import json
from collections.abc import Mapping
from contextlib import closing
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

from pydantic import BaseModel, TypeAdapter, ValidationError

from runners.launchers.scheduler import SchedulerError, SchedulerUnreachableError
from runners.shared.log_text import lines_of, shortened
from runners.shared.ray import RayConfig

TIMEOUT_SECONDS = 20.0
MESSAGE_CHARACTERS = 500
BAD_REQUEST, NOT_FOUND = 400, 404
SERVER_FAULT = 500
# Of these the same request may succeed later: a token that is being replaced, a timeout, a proxy.
PASSING = frozenset({401, 408, 429})
# Ray answers 500 also to what its head node refuses; its text then has the head's own status.
REFUSED = "status code 400"
EXISTS = "already exists"


T = TypeVar("T")


class _RayReply(BaseModel):
    """What we read of a reply; each release of Ray adds fields of its own."""


class _Job(_RayReply):
    """A job; one that nobody submitted, such as an interactive session, has no such id."""

    submission_id: str | None = None
    status: str
    message: str | None = None
    end_time: float | None = None  # in milliseconds since 1970


class _SubmittedJob(_Job):
    submission_id: str


class _Version(_RayReply):
    ray_version: str


class _Node(_RayReply):
    state: str
    resources_total: dict[str, float] = {}


class _NodeList(_RayReply):
    result: list[_Node]


class _NodeResult(_RayReply):
    result: _NodeList


class _NodeReply(_RayReply):
    data: _NodeResult


JOBS, JOB = TypeAdapter(list[_Job]), TypeAdapter(_SubmittedJob)
VERSION, NODES = TypeAdapter(_Version), TypeAdapter(_NodeReply)


class RayError(SchedulerError):
    """Ray rejected a request; the text is its message."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class RayUnreachableError(RayError, SchedulerUnreachableError):
    """Ray does not answer: the state of its jobs is unknown."""


class Api:
    """The requests of one host."""

    def __init__(self, config: RayConfig) -> None:
        self._config = config

    def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> object:
        """Make one request and return the reply's document.

        Raises:
            RayUnreachableError: there is no answer, or one that a moment may mend.
            RayError: Ray rejects it.
        """
        url = urlsplit(self._config.address)
        make = HTTPSConnection if url.scheme == "https" else HTTPConnection
        sent = None if body is None else json.dumps(body)
        try:
            connection = make(url.hostname or "", url.port, timeout=TIMEOUT_SECONDS)
            with closing(connection):
                connection.request(method, f"{url.path}{path}", sent, self._headers())
                reply = connection.getresponse()
                status, words = reply.status, reply.read().decode(errors="replace")
        except (HTTPException, OSError) as error:
            raise RayUnreachableError(_one_line(str(error)) or type(error).__name__) from None
        if status < BAD_REQUEST:
            try:
                return cast("object", json.loads(words))
            except ValueError:
                raise RayUnreachableError("Ray's reply is no JSON") from None
        is_refusal = status not in PASSING and (status < SERVER_FAULT or REFUSED in words)
        error_type = RayError if is_refusal else RayUnreachableError
        raise error_type(_one_line(words) or f"status {status}", status)

    def _headers(self) -> dict[str, str]:
        """Return the token's header; the file is read anew, since tokens are replaced."""
        headers = {"Content-Type": "application/json"}
        if self._config.token_file is None:
            return headers
        token = Path(self._config.token_file).read_text().strip()
        return {**headers, "Authorization": f"Bearer {token}"}

    # Jobs

    def jobs(self) -> list[dict[str, Any]]:
        """Return all jobs that were submitted to the cluster, also ended ones."""
        found = _read(JOBS, self.request("GET", "/api/jobs/"), "the list of jobs")
        return [each.model_dump() for each in found if each.submission_id]

    def job(self, submission_id: str) -> dict[str, Any] | None:
        """Return a job, or None if there is none of this id."""
        try:
            reply = self.request("GET", f"/api/jobs/{submission_id}")
            return _read(JOB, reply, "a job").model_dump()
        except RayUnreachableError:
            raise
        except RayError as error:
            if error.status == NOT_FOUND:
                return None
            raise

    def submit(self, job: Mapping[str, Any]) -> None:
        """Submit a job; one of this id that is there already is ours."""
        try:
            self.request("POST", "/api/jobs/", job)
        except RayUnreachableError:
            raise
        except RayError as error:
            if EXISTS not in str(error):
                raise

    def stop(self, submission_id: str) -> None:
        """Send SIGTERM to a job's driver, and SIGKILL after the job's own time."""
        self.request("POST", f"/api/jobs/{submission_id}/stop")

    def delete(self, submission_id: str) -> None:
        """Let Ray forget an ended job."""
        self.request("DELETE", f"/api/jobs/{submission_id}")

    # Facts

    def version(self) -> str:
        """Return the cluster's release, such as 2.60.0."""
        return _read(VERSION, self.request("GET", "/api/version"), "its version").ray_version

    def nodes(self) -> list[dict[str, Any]]:
        """Return the nodes that are alive."""
        reply = self.request("GET", "/api/v0/nodes?limit=10000")
        found = _read(NODES, reply, "the list of nodes").data.result.result
        return [each.model_dump() for each in found if each.state == "ALIVE"]


def _read(form: TypeAdapter[T], reply: object, what: str) -> T:
    """Return a reply's document in its form.

    Raises:
        RayUnreachableError: it has another form, as that of a proxy has: nothing is known.
    """
    try:
        return form.validate_python(reply)
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(map(str, fault["loc"])) or "it"
        raise RayUnreachableError(
            f"Ray's reply with {what} has another form: {where}: {fault['msg']}"
        ) from None


def _one_line(text: str) -> str:
    """Return the sentence of an error: the last line of a traceback, or of its JSON."""
    try:
        document = json.loads(text)
        text = str(document.get("msg") or text)
    except (ValueError, AttributeError):
        pass
    lines = [each.strip() for each in lines_of(text) if any(map(str.isalpha, each))]
    return shortened(lines[-1] if lines else "", MESSAGE_CHARACTERS)
