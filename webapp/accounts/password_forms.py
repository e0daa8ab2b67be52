"""Password forms: Django's with shorter hints, and reset e-mails sent in the background."""

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from django import forms
from django.contrib.auth.forms import PasswordChangeForm, PasswordResetForm, SetPasswordForm
from django.contrib.auth.models import User

from webapp.accounts.passwords import SYSTEM, event_write

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
