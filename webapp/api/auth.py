"""Authentication of people and their scripts at the API: a session, or an access token."""

from typing import Any

from django.contrib.auth.models import User
from django.http import HttpRequest
from ninja.errors import HttpError
from ninja.security import HttpBearer, SessionAuth

from webapp.accounts.models import AccessToken, Scope
from webapp.accounts.sign_in import address_of
from webapp.accounts.tokens import PREFIX, expired_token, includes, token_act, token_find
from webapp.api.requests import inputs_check
from webapp.core.pace import PERSON, STRANGER, calls
from webapp.core.problems import CsrfProblem, ScopeProblem, UnauthorizedProblem

CSRF_WAY_OUT = (
    "A request with a session's cookie needs its CSRF token: send the value of the field "
    "csrfmiddlewaretoken of any page's form as the header X-CSRFToken, and a Referer of this "
    "site. Or send an access token as `Authorization: Bearer slp_…` and no cookie."
)
UNKNOWN_TOKEN = (
    "unknown_token",
    (
        "No valid access token has this text: it was revoked, or its account is closed. Make a "
        "new one under Access tokens."
    ),
)


class TokenAuth(HttpBearer):
    """A person's access token, which permits ``scope`` in its team.

    The token's user becomes ``request.user``, who then belongs to the token's team only, and the
    token becomes ``request.auth``. Other bearer credentials are left to other authenticators.
    """

    openapi_name = "AccessToken"

    def __init__(self, scope: Scope) -> None:
        super().__init__()
        self.scope = scope

    def authenticate(self, request: HttpRequest, token: str) -> AccessToken | None:
        """Return the token.

        Raises:
            UnauthorizedProblem: no valid token has this text.
            ScopeProblem: the token's scope does not include the operation's.
            BusyProblem: the caller exceeds its rate limit.
            InvalidProblem: the operation does not read a part of the request.
        """
        if not token.startswith(PREFIX):
            return None
        found = token_find(token)
        if found is None:
            calls.keep(STRANGER, address_of(request))
            if expired := expired_token(token):
                raise UnauthorizedProblem(
                    "token_expired",
                    f"The access token “{expired.name}” expired at {expired.expires_at:%F %R} "
                    "UTC. Make a new one under Access tokens.",
                )
            raise UnauthorizedProblem(*UNKNOWN_TOKEN)
        request.paced = (PERSON, str(found.user_id))  # type: ignore[attr-defined]
        calls.keep(PERSON, str(found.user_id))
        held = Scope(found.scope)
        if not includes(held, self.scope):
            raise ScopeProblem(
                "scope_too_low",
                f"This needs the scope {self.scope.value}, and the scope of the token "
                f"“{found.name}” is {held.value}. Make a token of that scope.",
            )
        user: User = found.user
        user.token_team_id = found.team_id  # type: ignore[attr-defined]  # memberships_of reads it
        request.user = user
        token_act(found)
        inputs_check(request)
        return found


class PersonAuth(SessionAuth):
    """A logged-in person, with a rate limit for people and their scripts."""

    openapi_name = "Session"

    def _get_key(self, request: HttpRequest) -> str | None:
        """Return the session's cookie; without one there is no CSRF token to check either.

        Raises:
            CsrfProblem: the session's CSRF token is missing or another one.
        """
        if self.param_name not in request.COOKIES:
            return None
        try:
            return super()._get_key(request)
        except HttpError as error:
            raise CsrfProblem("csrf_failed", CSRF_WAY_OUT) from error

    def authenticate(self, request: HttpRequest, key: str | None) -> Any:  # noqa: ANN401 (ninja's)
        """Return the user, or None.

        Raises:
            BusyProblem: the user exceeds the rate limit.
            InvalidProblem: the operation does not read a part of the request.
        """
        person = super().authenticate(request, key)
        if person is not None:
            request.paced = (PERSON, str(person.pk))  # type: ignore[attr-defined]
            calls.keep(PERSON, str(person.pk))
            inputs_check(request)
        return person


def people(scope: Scope) -> list[TokenAuth | PersonAuth]:
    """Return the authenticators of an operation that needs ``scope``.

    A session has every scope; the person's role in the team limits it, as on the pages.
    """
    return [TokenAuth(scope), PersonAuth()]


READ, PLAN, LAUNCH, ADMIN = (people(scope) for scope in Scope)
