"""The error of a command: one sentence for people, a problem document for programs."""

import contextlib
from collections.abc import Iterator, Mapping
from enum import IntEnum
from typing import Any


class ExitCode(IntEnum):
    """What the exit status of ``slipway`` means."""

    DONE = 0
    FAILED = 1
    USAGE = 2  # an argument or a field is wrong
    NOTHING_FITS = 3  # no plan fits or meets the targets; the reasons are printed
    DENIED = 4  # a server refused the token, or its scope, its budget or the role
    INTERRUPTED = 130  # 128 + SIGINT, as shells have it


# Exit code -> status of the problem document, as the HTTP API has it, and its title.
PROBLEMS = {
    ExitCode.FAILED: (500, "The command failed"),
    ExitCode.USAGE: (422, "The request is not valid"),
    ExitCode.NOTHING_FITS: (409, "Nothing fits"),
    ExitCode.DENIED: (403, "The role does not allow this"),
}
# Code -> the same, for errors of which the exit code says too little.
PROBLEMS_BY_CODE = {
    "not_found": (404, "Nothing was found"),
    "not_logged_in": (401, "Nobody is logged in"),
    "unreachable": (503, "The server does not answer"),
}


class CliError(Exception):
    """An expected error: a sentence with field, value, limit and way out.

    ``problem`` is the problem document of a server that refused a request.
    """

    def __init__(
        self,
        detail: str,
        *,
        code: str = "invalid",
        exit_code: ExitCode = ExitCode.USAGE,
        field: str | None = None,
        problem: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.code = code
        self.exit_code = exit_code
        self.field = field
        self.problem = problem

    def to_json(self) -> dict[str, Any]:
        """Return the error as an RFC 9457 problem document: the server's, or one of its form."""
        if self.problem:
            return dict(self.problem)
        status, title = PROBLEMS_BY_CODE.get(self.code, PROBLEMS[self.exit_code])
        document: dict[str, Any] = {
            "type": f"urn:slipway:problem:{self.code}",
            "title": title,
            "status": status,
            "detail": self.detail,
            "code": self.code,
        }
        if self.field is None:
            return document
        errors = [{"field": self.field, "message": self.detail}]
        return {**document, "field": self.field, "errors": errors}


@contextlib.contextmanager
def planner_errors() -> Iterator[None]:
    """Raise an error of the planner as that of a command: a wrong request is a wrong usage.

    Raises:
        CliError: the block raised one.
    """
    from planner.specs.base import PlannerError

    try:
        yield
    except PlannerError as error:
        exit_code = ExitCode.FAILED if error.code == "not_covered" else ExitCode.USAGE
        raise CliError(
            error.message, code=error.code, exit_code=exit_code, field=error.field
        ) from error
