"""Password pages: change one's own, request a reset link, and use it."""

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from django import forms
from django.conf import settings
from django.contrib import messages
from django.contrib.auth import update_session_auth_hash
from django.contrib.auth.decorators import login_not_required
from django.contrib.auth.forms import PasswordChangeForm, PasswordResetForm, SetPasswordForm
from django.contrib.auth.models import User
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_http_methods

from webapp.accounts.login import tries_forgive, try_begin
from webapp.accounts.passwords import (
    SYSTEM,
    event_write,
    password_set,
    session_renamed,
    user_of_link,
)
from webapp.accounts.sessions import address_of
from webapp.core.problems import BusyProblem
from webapp.plans.access import signed_in

# Password forms: Django's with shorter hints, and reset e-mails sent in the background.


RULES = "At least 12 characters, not digits alone, not a common password, not like your name."
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


INVALID = 422
GONE = 410
WRITES = ["GET", "POST"]


@never_cache
@sensitive_post_parameters()
@require_http_methods(WRITES)
def password_change(request: HttpRequest) -> HttpResponse:
    """Change one's own password; log out every other browser of the account."""
    user = signed_in(request)
    form = OwnPasswordForm(user=user, data=request.POST or None)
    page = "accounts/password.html"
    if request.method != "POST":
        return render(request, page, {"form": form})
    try:
        tried = try_begin(name=user.get_username(), address=address_of(request))
    except BusyProblem as problem:
        return _wait(request, page, problem, form=OwnPasswordForm(user=user))
    is_valid = form.is_valid()
    if "old_password" not in form.errors:
        tries_forgive(tried)
    if not is_valid:
        return render(request, page, {"form": form}, status=INVALID)
    before = request.session.session_key or ""
    password_set(
        user=user,
        password=form.cleaned_data["new_password1"],
        way="own",
        actor=user.get_username(),
        session_key=before,
    )
    update_session_auth_hash(request, user)
    session_renamed(before, request.session.session_key or "")
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
        return render(request, page, {"form": form, "has_email": True}, status=INVALID)
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
        return render(request, page, {}, status=GONE)
    form = NewPasswordForm(user, request.POST or None)
    if request.method != "POST" or not form.is_valid():
        context = {"form": form, "account": user}
        return render(request, page, context, status=INVALID if form.errors else 200)
    password_set(
        user=user,
        password=form.cleaned_data["new_password1"],
        way="link",
        actor=user.get_username(),
    )
    messages.success(request, "Your password is set. Log in with it.")
    return redirect("login")


def _wait(request: HttpRequest, page: str, problem: BusyProblem, **context: Any) -> HttpResponse:
    response = render(request, page, {"wait": problem.detail, **context}, status=problem.status)
    response["Retry-After"] = str(problem.facts["retry_after_seconds"])
    return response
