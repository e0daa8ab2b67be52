"""Expected errors of services, with messages that a person or a host can act on.

The API turns them into RFC 9457 problem documents, pages into messages.
"""


class Problem(Exception):  # noqa: N818 (RFC 9457 calls the document a problem)
    """An expected error with a stable ``code`` and a sentence that says what to do."""

    status = 400
    title = "The request cannot be carried out"

    def __init__(self, code: str, detail: str, **facts: object) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.facts = facts


class InvalidProblem(Problem):
    """The request is invalid."""

    status = 422
    title = "The request is not valid"


class UnauthorizedProblem(Problem):
    """The caller is not authenticated."""

    status = 401
    title = "Who is asking is not known"


class ForbiddenProblem(Problem):
    """The caller is not allowed to do this."""

    status = 403
    title = "The role does not allow this"


class NotFoundProblem(Problem):
    """The object does not exist or is not visible to the caller."""

    status = 404
    title = "Nothing was found"


class ConflictProblem(Problem):
    """The current state does not allow the request."""

    status = 409
    title = "The present state does not allow this"


class TooLargeProblem(Problem):
    """The body exceeds the size limit."""

    status = 413
    title = "The body is too large"


class UnavailableProblem(Problem):
    """The database or the disk has failed; ``retry_after_seconds`` says when to retry."""

    status = 503
    title = "The server cannot do this just now"


class BusyProblem(Problem):
    """The server accepts no more now; ``retry_after_seconds`` says when to retry."""

    status = 429
    title = "Too many requests"
