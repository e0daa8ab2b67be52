"""The error of a command: one sentence for people, a problem document for programs."""

from enum import IntEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner.specs.base import PlannerError


class ExitCode(IntEnum):
    """What the exit status of ``slipway`` means."""

    DONE = 0
    FAILED = 1
    USAGE = 2  # an argument or a field is wrong
    NOTHING_FITS = 3  # no plan fits or meets the targets; the reasons are printed
    DENIED = 4  # a server refused the token, or the role does not allow it


# Exit code -> status of the problem document, as the HTTP API has it, and its title.
PROBLEMS = {
    ExitCode.FAILED: (500, "The command failed"),
    ExitCode.USAGE: (422, "The request is not valid"),
    ExitCode.NOTHING_FITS: (409, "Nothing fits"),
    ExitCode.DENIED: (403, "The role does not allow this"),
}


class CliError(Exception):
    """An expected error: a sentence with field, value, limit and way out."""

    def __init__(
        self,
        detail: str,
        *,
        code: str = "invalid",
        exit_code: ExitCode = ExitCode.USAGE,
        field: str | None = None,
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.code = code
        self.exit_code = exit_code
        self.field = field

    def to_json(self) -> dict[str, Any]:
        """Return the error as an RFC 9457 problem document, as the HTTP API writes it."""
        status, title = PROBLEMS[self.exit_code]
        document: dict[str, Any] = {
            "type": f"urn:slipway:problem:{self.code}",
            "title": title,
            "status": status,
            "detail": self.detail,
            "code": self.code,
        }
        return document if self.field is None else {**document, "field": self.field}


def planner_error(error: "PlannerError") -> CliError:
    """Return the error of the planner as that of a command: a wrong request is a wrong usage."""
    is_covered = error.code != "not_covered"
    exit_code = ExitCode.USAGE if is_covered else ExitCode.FAILED
    return CliError(error.message, code=error.code, exit_code=exit_code, field=error.field)
