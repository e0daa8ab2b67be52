"""What a service refuses, in words that a person or a host can act on.

The API turns these into RFC 9457 problem documents, pages into messages.
"""


class Problem(Exception):  # noqa: N818 (RFC 9457 calls the document a problem)
    """A refusal with a stable ``code`` and a sentence that says what to do."""

    status = 400
    title = "The request cannot be carried out"

    def __init__(self, code: str, detail: str, **facts: object) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.facts = facts


class InvalidProblem(Problem):
    """What was sent does not hold together."""

    status = 422
    title = "The request is not valid"


class UnauthorizedProblem(Problem):
    """Whoever asks did not show who they are."""

    status = 401
    title = "Who is asking is not known"


class ForbiddenProblem(Problem):
    """Whoever asks may not do this."""

    status = 403
    title = "The role does not allow this"


class NotFoundProblem(Problem):
    """There is no such thing for whoever asks."""

    status = 404
    title = "Nothing was found"


class ConflictProblem(Problem):
    """It was possible once, or will be, but not in the present state."""

    status = 409
    title = "The present state does not allow this"


class TooLargeProblem(Problem):
    """The body exceeds what the server takes in one piece."""

    status = 413
    title = "The body is too large"


class BusyProblem(Problem):
    """The server cannot take more now; ``retry_after_seconds`` says when to come back."""

    status = 429
    title = "The server asks for a pause"
