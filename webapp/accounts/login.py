"""Login: Django's view, with rate limits per account, per address and per site."""

import hashlib
from datetime import timedelta

from django.contrib.auth.decorators import login_not_required
from django.contrib.auth.forms import AuthenticationForm
from django.contrib.auth.views import LoginView
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.utils.decorators import method_decorator
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_post_parameters

from webapp.accounts.models import LoginTry
from webapp.accounts.passwords import refusal_even_out
from webapp.accounts.sessions import address_of
from webapp.core.clock import now
from webapp.core.problems import BusyProblem

# Rate limits of password attempts: per account and address, per address, and per site.
#
# An attempt is counted before the password is checked, so that parallel attempts gain nothing.
# Unknown names are counted like others, so that the response reveals nothing. An account is never
# locked for other addresses, so nobody can lock out somebody else, except through the limit of the
# whole site.


WINDOW = timedelta(minutes=15)
PER_ACCOUNT_AND_ADDRESS, PER_ADDRESS, PER_SITE = 10, 100, 1000


def try_begin(*, name: str, address: str) -> LoginTry:
    """Count an attempt and return it.

    Raises:
        BusyProblem: too many attempts; ``retry_after_seconds`` says when the next is allowed.
    """
    account = hashlib.sha256(name.strip().casefold().encode()).hexdigest()
    with transaction.atomic():
        attempt = LoginTry.objects.create(account=account, address=address, at=now())
        wait = max(
            _wait_seconds(PER_ACCOUNT_AND_ADDRESS, account=account, address=address),
            _wait_seconds(PER_ADDRESS, address=address),
            _wait_seconds(PER_SITE),
        )
        if wait:
            attempt.delete()
    if wait:
        raise BusyProblem("too_many_tries", wait_sentence(wait), retry_after_seconds=wait)
    return attempt


def _wait_seconds(most: int, **which: str) -> int:
    """Return the seconds until another attempt is allowed, including the one just counted."""
    instant = now()
    recent = LoginTry.objects.filter(at__gt=instant - WINDOW, **which).order_by("-at", "-pk")
    too_old = recent.values_list("at", flat=True)[most : most + 1]
    return max((1 + int((at + WINDOW - instant).total_seconds()) for at in too_old), default=0)


def wait_sentence(seconds: int) -> str:
    """Return the message for a user who has to wait."""
    minutes = -(-seconds // 60)
    return (
        f"Too many wrong passwords. Try again in {minutes} minute{'s' if minutes > 1 else ''}; "
        "until then no password is looked at."
    )


def tries_forgive(tried: LoginTry) -> None:
    """Delete the attempts of an account from an address, after a correct password."""
    LoginTry.objects.filter(account=tried.account, address=tried.address).delete()


def tries_forget_old() -> int:
    """Delete attempts outside the window; return their number."""
    return LoginTry.objects.filter(at__lte=now() - WINDOW).delete()[0]


class GuardedLogin(LoginView):
    """The login page; after too many attempts it shows how long to wait."""

    tried: LoginTry

    @method_decorator(login_not_required)
    @method_decorator(sensitive_post_parameters())
    @method_decorator(never_cache)
    def dispatch(self, request: HttpRequest, *args: str, **kwargs: object) -> HttpResponseBase:
        """Run Django's view without its second check of the CSRF token.

        The middleware has checked it; the view's check would store the secret in a session.
        """
        return super(LoginView, self).dispatch(request, *args, **kwargs)

    def post(self, request: HttpRequest, *args: str, **kwargs: object) -> HttpResponse:
        """Count the attempt, then check the password."""
        try:
            self.tried = try_begin(
                name=request.POST.get("username", ""), address=address_of(request)
            )
        except BusyProblem as problem:
            return self._wait(problem)
        return super().post(request, *args, **kwargs)

    def get_form(self, form_class: type[AuthenticationForm] | None = None) -> AuthenticationForm:
        """Return the form; a logged-in user starts in the password field."""
        form = super().get_form(form_class)
        if self.request.user.is_authenticated:
            form.fields["username"].widget.attrs.pop("autofocus", None)
            form.fields["password"].widget.attrs["autofocus"] = True
        return form

    def form_invalid(self, form: AuthenticationForm) -> HttpResponse:
        """Reject the login, with the same response time for every kind of name."""
        refusal_even_out(self.request.POST.get("username", ""), form.data.get("password", ""))
        return super().form_invalid(form)

    def form_valid(self, form: AuthenticationForm) -> HttpResponse:
        """Log the user in."""
        tries_forgive(self.tried)
        return super().form_valid(form)

    def _wait(self, problem: BusyProblem) -> HttpResponse:
        form = self.get_form_class()(self.request)
        context = self.get_context_data(form=form, wait=problem.detail)
        response = self.render_to_response(context, status=problem.status)
        response["Retry-After"] = str(problem.facts["retry_after_seconds"])
        return response
