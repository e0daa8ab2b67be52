"""Sign in: passwords, attempts, sessions, the current team, and their pages."""

import hashlib
import re
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import structlog
from django import forms
from django.conf import settings
from django.contrib import messages
from django.contrib.auth import SESSION_KEY, update_session_auth_hash
from django.contrib.auth.decorators import login_not_required
from django.contrib.auth.forms import (
    AuthenticationForm,
    PasswordChangeForm,
    PasswordResetForm,
    SetPasswordForm,
)
from django.contrib.auth.hashers import (
    Argon2PasswordHasher,
    PBKDF2PasswordHasher,
    make_password,
)
from django.contrib.auth.models import User
from django.contrib.auth.tokens import default_token_generator
from django.contrib.auth.views import LoginView
from django.contrib.messages.storage.cookie import CookieStorage
from django.contrib.messages.storage.fallback import FallbackStorage
from django.contrib.messages.storage.session import SessionStorage
from django.contrib.sessions.models import Session
from django.db import transaction
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.middleware.csrf import CsrfViewMiddleware
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.cache import patch_vary_headers
from django.utils.decorators import method_decorator
from django.utils.encoding import escape_uri_path, force_bytes
from django.utils.http import urlsafe_base64_decode, urlsafe_base64_encode
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from webapp.accounts.initial_passwords import MUST_CHANGE, LoginForm, must_change
from webapp.accounts.models import InitialPassword, LoginTry, OpenSession
from webapp.accounts.services import choose_team, signed_in
from webapp.audit.models import Event
from webapp.core import vault
from webapp.core.clock import now
from webapp.core.middleware import redirect_to_own
from webapp.core.outages import UseNotes
from webapp.core.pace import Limit, Pace
from webapp.core.problems import BusyProblem

# ---------------------------------------------------------------------------
# Sessions: their storage of secrets and CSRF, their expiry, and the page that ends them.
# ---------------------------------------------------------------------------


SEEN_EVERY = timedelta(minutes=10)


def sessions_of(user: User) -> QuerySet[OpenSession]:
    """Return a user's open sessions, latest used first."""
    alive = Session.objects.filter(expire_date__gt=now()).values("session_key")
    return OpenSession.objects.filter(user=user, session_key__in=alive)


def sessions_end(chosen: QuerySet[OpenSession]) -> int:
    """End sessions at once; return their number."""
    with transaction.atomic():
        keys = list(chosen.values_list("session_key", flat=True))
        Session.objects.filter(session_key__in=keys).delete()
        OpenSession.objects.filter(session_key__in=keys).delete()
    return len(keys)


def closed_account_leave(instance: User, **_others: Any) -> None:
    """End every session of an account that was closed, so that none returns with the account."""
    if not instance.is_active:
        sessions_end(OpenSession.objects.filter(user=instance))


def session_touch(session_key: str) -> bool:
    """Record use of a session at most every ten minutes; return whether it was recorded."""
    instant = now()
    rows = OpenSession.objects.filter(session_key=session_key, seen_at__lte=instant - SEEN_EVERY)
    return bool(rows.update(seen_at=instant))


def sessions_forget_ended() -> int:
    """Delete expired and logged-out sessions; return the number of ``OpenSession`` rows."""
    Session.objects.filter(expire_date__lte=now()).delete()
    alive = Session.objects.values("session_key")
    return OpenSession.objects.exclude(session_key__in=alive).delete()[0]


# Secrets to be shown to one browser on a later page, encrypted in its session.
#
# Sessions are in the database and its backups; the encryption keys are not.


def session_secret_keep(request: HttpRequest, kind: str, owner_id: str, text: str) -> None:
    """Store an object's secret in the session, replacing the last one of its kind."""
    request.session[kind] = {owner_id: vault.seal(text, owner=f"session {kind} {owner_id}")}


def session_secret_of(request: HttpRequest, kind: str, owner_id: str) -> str:
    """Return an object's secret from the session, or "" if there is none.

    The result is also "" if the encryption key is gone; the user can create a new secret.
    """
    sealed = (request.session.get(kind) or {}).get(owner_id, "")
    try:
        return vault.unseal(sealed, owner=f"session {kind} {owner_id}") if sealed else ""
    except vault.VaultError:
        return ""


# Signal handler that records a login.


AUTHENTICATED_AT = "authenticated_at"
LONGEST_BROWSER = 200


def session_note(request: HttpRequest | None, user: User, **_others: Any) -> None:
    """Record the browser of a login, the time of its authentication, and an initial password."""
    if request is None:
        return
    instant = now()
    request.session[AUTHENTICATED_AT] = instant.timestamp()
    request.session[MUST_CHANGE] = InitialPassword.objects.filter(user=user).exists()
    request.session.set_expiry(None)  # the default instead of a visitor's expiry
    request.session.save()
    OpenSession.objects.update_or_create(
        session_key=request.session.session_key,
        defaults={
            "user": user,
            "address": address_of(request),
            "browser": request.headers.get("User-Agent", "")[:LONGEST_BROWSER],
            "began_at": instant,
            "seen_at": instant,
        },
    )


def address_of(request: HttpRequest) -> str:
    """Return the client address of a request."""
    return str(request.META.get("REMOTE_ADDR", ""))[:64]


# Session expiry: a session ends half a day after its last request, and a month after its login.
#
# If the database rejects the update, the page is still served (``UseNotes``).


SEEN_AT = "seen_at"
LONGEST_SESSION = timedelta(days=30)  # NIST SP 800-63B-4 at AAL1
FORGET = '"cache", "storage"'  # what a browser deletes when its session is over
REFUSALS = Limit("A line about a refused request", 1 / 10, 20)
log = structlog.get_logger(__name__)


class SessionInUse:
    """Extends the session in use, with one write per ten minutes, up to ``LONGEST_SESSION``.

    No response to a logged-in user is cached. The response to a session that is over has the
    browser delete what it keeps of the site. A refused request leaves a line in the log.
    """

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response
        self._notes = UseNotes()
        self._lines = Pace()

    def __call__(self, request: HttpRequest) -> HttpResponse:
        """Call the next handler, then record that the session is in use."""
        response = self.get_response(request)
        session = request.session
        if _is_refused(request, response):
            self._log_refusal(request, response.status_code)
        if not session.accessed or session.session_key is None:
            if session.accessed and settings.SESSION_COOKIE_NAME in request.COOKIES:
                response["Clear-Site-Data"] = FORGET
            return response
        began = session.get(AUTHENTICATED_AT)
        if not began:
            return response
        response.headers.setdefault("Cache-Control", "no-store")
        instant = now().timestamp()
        is_due = instant - session.get(SEEN_AT, began) >= SEEN_EVERY.total_seconds()
        key = session.session_key
        if is_due and self._notes.store(lambda: session_touch(key), "a session in use"):
            session[SEEN_AT] = instant
            seconds_left = int(began + LONGEST_SESSION.total_seconds() - instant)
            session.set_expiry(min(settings.SESSION_COOKIE_AGE, max(seconds_left, 1)))
        return response

    def _log_refusal(self, request: HttpRequest, status: int) -> None:
        """Log who was refused where, in ASCII, so that no name or path breaks a line."""
        actor = request.user.get_username().encode("ascii", "backslashreplace").decode()
        address = address_of(request)
        if not self._lines.count(REFUSALS, f"{actor} {address}"):
            log.warning(
                "request refused",
                at=now().isoformat(),
                actor=actor or "visitor",
                address=address,
                method=request.method,
                path=escape_uri_path(request.path[:200]),
                status=status,
            )


def _is_refused(request: HttpRequest, response: HttpResponse) -> bool:
    """Return whether a role, a token or the ownership of an object was missing.

    Another team's object is answered like one that does not exist.
    """
    if response.status_code != HTTP_NOT_FOUND:
        return response.status_code == HTTP_FORBIDDEN
    match = request.resolver_match
    return match is not None and bool(match.kwargs) and request.user.is_authenticated


# The page of a user's open sessions, with log-out of other browsers.


EVERY_OTHER = "others"


@require_GET
def session_list(request: HttpRequest) -> HttpResponse:
    """List the browsers in which the user is logged in."""
    open_here = list(sessions_of(signed_in(request)))
    context = {"open_sessions": open_here, "this_key": request.session.session_key}
    response = render(request, "accounts/sessions.html", context)
    response["Cache-Control"] = "no-store"
    return response


@sensitive_post_parameters("password")
@require_POST
def session_end(request: HttpRequest) -> HttpResponse:
    """Log out one of the user's browsers, or all but this one, after the password."""
    user = signed_in(request)
    tried = try_begin(name=user.get_username(), address=address_of(request))
    if not user.check_password(request.POST.get("password", "")):
        refusal_write(request, user.get_username(), way="sessions")
        messages.warning(request, "The password is incorrect. No browser was logged out.")
        return redirect("sessions")
    tries_forgive(tried)
    rows = sessions_of(user)
    chosen = request.POST.get("session", "")
    if chosen == EVERY_OTHER:
        rows = rows.exclude(session_key=request.session.session_key)
    else:
        rows = rows.filter(pk=chosen)
    if count := sessions_end(rows):
        messages.success(request, f"{count} browser{'s' if count > 1 else ''} logged out.")
    else:
        messages.warning(request, "None of your browsers was logged in under that name.")
    return redirect("sessions")


# Storage of the CSRF secret: in the session if logged in, else in a cookie.
#
# A visitor has it in a host-only cookie: a session per visitor would be a database row, and the
# login page must work while the database rejects writes.


COOKIE = "visitor"  # with the prefix "__Host-" behind TLS
SECRET = re.compile(r"[a-zA-Z0-9]{32}")


class CsrfMiddleware(CsrfViewMiddleware):
    """Django's CSRF protection, with a visitor's secret in a cookie."""

    def _get_secret(self, request: HttpRequest) -> str | None:
        if _is_logged_in(request):
            return super()._get_secret(request)  # type: ignore[misc,no-any-return] # not in stubs
        secret = request.COOKIES.get(_cookie(), "")
        return secret if SECRET.fullmatch(secret) else None

    def _set_csrf_cookie(self, request: HttpRequest, response: HttpResponseBase) -> None:
        if _is_logged_in(request):
            super()._set_csrf_cookie(request, response)  # type: ignore[misc] # not in stubs
            return
        response.set_cookie(
            _cookie(),
            request.META["CSRF_COOKIE"],
            secure=bool(settings.SESSION_COOKIE_SECURE),
            httponly=True,
            samesite="Lax",
        )
        patch_vary_headers(response, ("Cookie",))


def _cookie() -> str:
    return host_cookie(COOKIE)


def host_cookie(name: str) -> str:
    """Return the name of a cookie: behind TLS one that browsers bind to this host."""
    return f"__Host-{name}" if settings.SESSION_COOKIE_SECURE else name


class MessageCookie(CookieStorage):
    """Messages for the next page, in a signed cookie that is bound to this host behind TLS."""

    @property
    def cookie_name(self) -> str:  # type: ignore[override]  # Django's is a constant
        """The name of the cookie."""
        return host_cookie("messages")


class MessageStorage(FallbackStorage):
    """Django's storage of messages, with the cookie of this host."""

    storage_classes = (MessageCookie, SessionStorage)


def _is_logged_in(request: HttpRequest) -> bool:
    return SESSION_KEY in request.session


# ---------------------------------------------------------------------------
# Password hashing, and changes by the owner or through a one-time link.
# ---------------------------------------------------------------------------


# Password hashing: Argon2id with parameters for the memory of a small server.


OLD = f"{PBKDF2PasswordHasher.algorithm}$"


class SmallArgon2PasswordHasher(Argon2PasswordHasher):
    """Argon2id with 19 MiB, three passes and one lane.

    Above OWASP's minimum (19 MiB, two passes; Password Storage Cheat Sheet). With Django's
    100 MiB, a hundred simultaneous logins would take 10 GB.
    """

    memory_cost = 19_456  # KiB
    time_cost = 3
    parallelism = 1


def refusal_even_out(name: str, password: str) -> None:
    """Equalise the time of a rejected password, so that it does not reveal the kind of account.

    While accounts with PBKDF2 hashes of an older version exist (replaced at their next login),
    every rejection computes both hashes.
    """
    old = User.objects.filter(password__startswith=OLD)
    if not old.exists():
        return
    if old.filter(username=name).exists():
        make_password(password)
    else:
        hasher = PBKDF2PasswordHasher()
        hasher.encode(password, hasher.salt())


SYSTEM = "system:web"


def password_set(
    *, user: User, password: str, way: str, actor: str, session_key: str = ""
) -> None:
    """Set an account's password, and log out every browser but that of ``session_key``.

    ``way`` is "own" or "link"; it and the actor are recorded in the audit.
    """
    with transaction.atomic():
        user.set_password(password)
        user.save(update_fields=["password"])
        others = OpenSession.objects.filter(user=user).exclude(session_key=session_key)
        num_ended = sessions_end(others)
        event_write(
            kind="account.password", user=user, actor=actor, way=way, num_sessions_ended=num_ended
        )


def event_write(*, kind: str, user: User, actor: str, **detail: object) -> None:
    """Record an event of an account in the audit, which superusers can read."""
    Event.objects.create(
        at=now(),
        team_id="",
        kind=kind,
        subject=str(user.pk),
        actor=actor[:80],
        detail={"account": user.get_username()[:80], **detail},
    )


def refusal_write(request: HttpRequest, name: str, *, way: str) -> None:
    """Record a wrong password; a name that no account has may be a password and is left out."""
    user = User.objects.filter(username=name).first()
    Event.objects.create(
        at=now(),
        team_id="",
        kind="account.refused",
        subject=str(user.pk) if user else "",
        actor=name[:80] if user else "unknown",
        detail={"way": way, "address": address_of(request)},
    )


def session_renamed(before: str, after: str) -> None:
    """Update the row of a browser whose session key changed."""
    OpenSession.objects.filter(session_key=before).update(session_key=after)


def link_path(user: User) -> str:
    """Return the path of an account's password reset link."""
    uid = urlsafe_base64_encode(force_bytes(user.pk))
    token = default_token_generator.make_token(user)
    return reverse("password-new", kwargs={"uid": uid, "token": token})


def user_of_link(uid: str, token: str) -> User | None:
    """Return the user of a reset link; None if it is used, expired or invalid."""
    try:
        number = int(urlsafe_base64_decode(uid).decode())
        user = User.objects.get(pk=number, is_active=True)
    except (ValueError, OverflowError, User.DoesNotExist):
        return None
    return user if default_token_generator.check_token(user, token) else None


# ---------------------------------------------------------------------------
# Login: Django's view, with rate limits per account, per address and per site.
# ---------------------------------------------------------------------------


# Rate limits of password attempts: per account and address, per address, and per site.
#
# An attempt is counted before the password is checked, so that parallel attempts gain nothing.
# Unknown names are counted like others, so that the response reveals nothing. An account is never
# locked for other addresses, so nobody can lock out somebody else, except through the limit of the
# whole site.


WINDOW = timedelta(minutes=15)
CLOCK_TOLERANCE = timedelta(seconds=5)  # between web processes
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
        minutes = -(-wait // 60)
        raise BusyProblem(
            "too_many_tries",
            f"Too many wrong passwords. Try again in {minutes} "
            f"minute{'s' if minutes > 1 else ''}; until then no password is checked.",
            retry_after_seconds=wait,
        )
    return attempt


def _wait_seconds(most: int, **which: str) -> int:
    """Return the seconds until another attempt is allowed, including the one just counted.

    Attempts dated in the future, because the clock was set back since, do not count: they would
    lock people out until the clock has caught up.
    """
    instant = now()
    within = (instant - WINDOW, instant + CLOCK_TOLERANCE)
    recent = LoginTry.objects.filter(at__range=within, **which).order_by("-at", "-pk")
    too_old = recent.values_list("at", flat=True)[most : most + 1]
    return max((1 + int((at + WINDOW - instant).total_seconds()) for at in too_old), default=0)


def tries_forgive(tried: LoginTry) -> None:
    """Delete the attempts of an account from an address, after a correct password."""
    LoginTry.objects.filter(account=tried.account, address=tried.address).delete()


def tries_forget_old() -> int:
    """Delete attempts outside the window; return their number."""
    return LoginTry.objects.filter(at__lte=now() - WINDOW).delete()[0]


LIMITED = Limit("An event of too many passwords", 1 / 60, 1)
limited_addresses = Pace()


class GuardedLogin(LoginView):
    """The login page; after too many attempts it shows how long to wait.

    Logins, wrong passwords and, once a minute and address, exceeded limits are in the audit.
    """

    authentication_form = LoginForm
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
        name = self.request.POST.get("username", "")
        refusal_even_out(name, form.data.get("password", ""))
        refusal_write(self.request, name, way="login")
        return super().form_invalid(form)

    def form_valid(self, form: AuthenticationForm) -> HttpResponse:
        """Log the user in."""
        tries_forgive(self.tried)
        response = super().form_valid(form)
        user, address = form.get_user(), address_of(self.request)
        event_write(
            kind="account.login",
            user=user,
            actor=user.get_username(),
            way="password",
            address=address,
        )
        return response

    def _wait(self, problem: BusyProblem) -> HttpResponse:
        if not limited_addresses.count(LIMITED, address_of(self.request)):
            refusal_write(self.request, self.request.POST.get("username", ""), way="limit")
        form = self.get_form_class()(self.request)
        context = self.get_context_data(form=form, wait=problem.detail)
        response = self.render_to_response(context, status=problem.status)
        response["Retry-After"] = str(problem.facts["retry_after_seconds"])
        return response


# ---------------------------------------------------------------------------
# Password pages: change one's own, request a reset link, and use it.
# ---------------------------------------------------------------------------


# Password forms: Django's with shorter hints, and reset e-mails sent in the background.


RULES = (
    "At least 12 characters, not a common password, not like your name, not of words of this site."
)
if TYPE_CHECKING:
    _SetPasswordForm = SetPasswordForm[User]
else:
    _SetPasswordForm = SetPasswordForm  # generic only in the stubs


def _hint(form: forms.BaseForm) -> None:
    form.fields["new_password1"].help_text = RULES
    form.fields["new_password2"].help_text = ""
    for field in form.fields.values():
        field.widget.attrs["class"] = "input"
        field.label = str(field.label).replace("confirmation", "again")


class OwnPasswordForm(PasswordChangeForm):
    """The old password, and the new one twice."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _hint(self)


class NewPasswordForm(_SetPasswordForm):
    """The new password twice."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _hint(self)


class ForgottenForm(PasswordResetForm):
    """An e-mail address; neither the response nor its time reveals whether an account has it."""

    email = forms.EmailField(
        label="E-mail address",
        max_length=254,
        widget=forms.EmailInput(attrs={"autocomplete": "email", "class": "input"}),
    )

    def send_mail(self, *args: Any, **kwargs: Any) -> None:
        """Send the link from a separate thread; a failure is logged by the web process."""
        context: Mapping[str, Any] = args[2]
        event_write(kind="account.password-link", user=context["user"], actor=SYSTEM, way="e-mail")
        threading.Thread(
            target=super().send_mail, args=args, kwargs=kwargs, daemon=True, name="password-mail"
        ).start()


HTTP_FORBIDDEN, HTTP_NOT_FOUND = 403, 404
HTTP_UNPROCESSABLE = 422
HTTP_GONE = 410
WRITES = ["GET", "POST"]


@never_cache
@sensitive_post_parameters()
@require_http_methods(WRITES)
def password_change(request: HttpRequest) -> HttpResponse:
    """Change one's own password; log out every other browser of the account."""
    user = signed_in(request)
    form = OwnPasswordForm(user=user, data=request.POST or None)
    page, is_initial = "accounts/password.html", must_change(request)
    context = {"form": form, "is_initial": is_initial}
    if request.method != "POST":
        return render(request, page, context)
    try:
        tried = try_begin(name=user.get_username(), address=address_of(request))
    except BusyProblem as problem:
        context["form"] = OwnPasswordForm(user=user)
        return _wait(request, page, problem, **context)
    is_valid = form.is_valid()
    if "old_password" in form.errors:
        refusal_write(request, user.get_username(), way="password")
    else:
        tries_forgive(tried)
    if not is_valid:
        return render(request, page, context, status=HTTP_UNPROCESSABLE)
    before = request.session.session_key or ""
    password_set(
        user=user,
        password=form.cleaned_data["new_password1"],
        way="own",
        actor=user.get_username(),
        session_key=before,
    )
    request.session[MUST_CHANGE] = False
    update_session_auth_hash(request, user)
    session_renamed(before, request.session.session_key or "")
    if is_initial:
        messages.success(request, "Your password is set. The initial one is no longer valid.")
        return redirect("home")
    messages.success(request, "Your password is changed. Your other browsers are logged out.")
    return redirect("sessions")


@login_not_required
@never_cache
@require_http_methods(WRITES)
def password_forgotten(request: HttpRequest) -> HttpResponse:
    """Send a reset link by e-mail; without e-mail, the page says who can create one."""
    page = "accounts/forgotten.html"
    form = ForgottenForm(request.POST or None)
    if not settings.HAS_EMAIL or request.method != "POST":
        return render(request, page, {"form": form, "has_email": settings.HAS_EMAIL})
    if not form.is_valid():
        return render(request, page, {"form": form, "has_email": True}, status=HTTP_UNPROCESSABLE)
    try:
        try_begin(name=f"link for {form.cleaned_data['email']}", address=address_of(request))
    except BusyProblem as problem:
        return _wait(request, page, problem, form=form, has_email=True)
    form.save(
        request=request,
        use_https=request.is_secure(),
        subject_template_name="accounts/link_subject.txt",
        email_template_name="accounts/link.txt",
    )
    return render(request, page, {"is_sent": True, "has_email": True})


@login_not_required
@never_cache
@sensitive_post_parameters()
@require_http_methods(WRITES)
def password_new(request: HttpRequest, uid: str, token: str) -> HttpResponse:
    """Set a new password through a reset link; the link is invalid afterwards."""
    page = "accounts/new_password.html"
    user = user_of_link(uid, token)
    if user is None:
        return render(request, page, {}, status=HTTP_GONE)
    form = NewPasswordForm(user, request.POST or None)
    if request.method != "POST" or not form.is_valid():
        context = {"form": form, "account": user}
        return render(request, page, context, status=HTTP_UNPROCESSABLE if form.errors else 200)
    password_set(
        user=user,
        password=form.cleaned_data["new_password1"],
        way="link",
        actor=user.get_username(),
    )
    messages.success(request, "Your password is set. Log in with the new password.")
    return redirect("login")


def _wait(request: HttpRequest, page: str, problem: BusyProblem, **context: Any) -> HttpResponse:
    response = render(request, page, {"wait": problem.detail, **context}, status=problem.status)
    response["Retry-After"] = str(problem.facts["retry_after_seconds"])
    return response


# ---------------------------------------------------------------------------
# Theme and team switches of the account menu.
# ---------------------------------------------------------------------------


YEAR_SECONDS = 365 * 24 * 3600
THEMES = ("light", "dark", "system")


@login_not_required
@require_POST
def theme_choose(request: HttpRequest) -> HttpResponse:
    """Store the theme in a cookie and redirect to the previous page."""
    theme = request.POST.get("theme", "")
    response = _back(request)
    if theme in THEMES:
        is_secure = bool(settings.SESSION_COOKIE_SECURE)
        response.set_cookie(
            host_cookie("theme"),
            theme,
            max_age=YEAR_SECONDS,
            secure=is_secure,
            samesite="Lax",
        )
    return response


@require_POST
def team_choose(request: HttpRequest) -> HttpResponse:
    """Switch to another of the user's teams and redirect to the previous page."""
    team = choose_team(request, request.POST.get("team", ""))
    messages.success(
        request, f"Current team: {team.name}. New plans and jobs belong to this team."
    )
    return _back(request)


def _back(request: HttpRequest) -> HttpResponse:
    """Redirect to the page named by the form, if it is a page of this site."""
    return redirect_to_own(request, request.POST.get("next", ""), "/")
