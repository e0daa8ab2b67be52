"""Initial passwords: given by somebody else, valid for seven days, replaced at the first login.

The row ``InitialPassword`` of an account says that its password is one. A session that began with
it opens only the page that replaces it. Source: OWASP ASVS 5.0.0, requirement 6.4.1.
"""

from collections.abc import Callable
from datetime import timedelta

from django.conf import settings
from django.contrib.auth.forms import AuthenticationForm
from django.contrib.auth.models import AbstractBaseUser, User
from django.core.exceptions import ValidationError
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect

from webapp.accounts.models import InitialPassword
from webapp.core.clock import now
from webapp.core.middleware import API
from webapp.core.problems import ForbiddenProblem, problem_response

LIFETIME = timedelta(days=7)
MUST_CHANGE = "must_change_password"  # in a session that began with an initial password
ALWAYS_OPEN = frozenset({"password", "logout"})  # names of URLs
EXPIRED = (
    "This is an initial password, which expired on {day} because nobody used it. An administrator "
    "creates a link that sets a new one (Administration, Users), or on the server "
    "`python3 manage.py changepassword {name}` does."
)
REFUSED = (
    "You logged in with an initial password. Choose your own at /settings/password/, then repeat "
    "the request."
)


def initial_password_mark(user: User) -> None:
    """Mark an account's current password, which somebody else knows, as initial."""
    InitialPassword.objects.update_or_create(user=user, defaults={"given_at": now()})


class InitialPasswordValidator:
    """Refuses to keep an initial password; any other password ends the state."""

    def validate(self, password: str, user: AbstractBaseUser | None = None) -> None:
        """Check a new password.

        Raises:
            ValidationError: it is the account's initial password.
        """
        if (
            user is not None
            and InitialPassword.objects.filter(user_id=user.pk).exists()
            and user.check_password(password)
        ):
            raise ValidationError(
                "This is your initial password. Choose another one.", code="password_initial"
            )

    def password_changed(self, _password: str, user: AbstractBaseUser | None = None) -> None:
        """Forget that the last password was initial; Django calls this after each change."""
        if user is not None:
            InitialPassword.objects.filter(user_id=user.pk).delete()

    def get_help_text(self) -> str:
        """Return the rule for forms."""
        return "Your password cannot be your initial one."


class LoginForm(AuthenticationForm):
    """Name and password; refuses an expired initial password with the way out."""

    expired = ""  # the refusal

    def confirm_login_allowed(self, user: User) -> None:
        """Check that the account may log in; its password was correct.

        Raises:
            ValidationError: the account is closed, or its initial password has expired.
        """
        super().confirm_login_allowed(user)
        initial = InitialPassword.objects.filter(user_id=user.pk).first()
        if initial is not None and now() >= (ends_at := initial.given_at + LIFETIME):
            day = f"{ends_at:%Y-%m-%d}"
            self.expired = EXPIRED.format(day=day, name=user.get_username())
            raise ValidationError(self.expired, code="initial_password_expired")


class OwnPasswordFirstMiddleware:
    """Leads a session that began with an initial password to the page that replaces it.

    Every other page redirects there; the API answers 403. Pages that need no login stay open.
    """

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        """Call the next handler."""
        return self.get_response(request)

    def process_view(
        self, request: HttpRequest, view: object, _args: object, _kwargs: object
    ) -> HttpResponse | None:
        """Return the redirect or the refusal, or None for a request that may go on."""
        is_api = request.path_info.startswith(API)
        if not (is_api or getattr(view, "login_required", True)) or not must_change(request):
            return None
        if request.resolver_match and request.resolver_match.view_name in ALWAYS_OPEN:
            return None
        if is_api:
            return problem_response(ForbiddenProblem("initial_password", REFUSED))
        return redirect("password")


def must_change(request: HttpRequest) -> bool:
    """Return whether the session of a request began with an initial password."""
    return (
        settings.SESSION_COOKIE_NAME in request.COOKIES
        and bool(request.session.get(MUST_CHANGE))
        and request.user.is_authenticated
    )
