"""The page of repositories whose own code the team's jobs may run."""

from django import forms
from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_GET, require_POST

from webapp.accounts.models import Role
from webapp.accounts.services import (
    check_role,
    current_role,
    current_team,
    is_at_least,
    membership_of,
    require_role,
    visible_or_404,
)
from webapp.core.problems import InvalidProblem
from webapp.modelhub.models import TrustedCode
from webapp.modelhub.remote_code import code_allow, code_forbid

PAGE = "remote-code"
SAMPLE = "0123456789abcdef0123456789abcdef01234567"
UNPROCESSABLE = 422


class CodeForm(forms.Form):
    """A repository at a commit, and why its code is trusted; ``code_allow`` checks both."""

    use_required_attribute = False

    model = forms.CharField(
        label="Model and commit",
        help_text="Of the Hugging Face Hub, with the 40 digits of the commit that you have read; "
        "a branch may change.",
        widget=forms.TextInput(
            {"class": "input", "autocomplete": "off", "placeholder": f"org/name@{SAMPLE}"}
        ),
        error_messages={"required": "Name the repository and the commit that you have read."},
    )
    reason = forms.CharField(
        label="Reason",
        required=False,
        help_text="Who read it, and what it is for. It stays in the history.",
        widget=forms.TextInput({"class": "input", "autocomplete": "off"}),
    )


@require_GET
@require_role(Role.VIEWER)
def code_list(request: HttpRequest) -> HttpResponse:
    """List the repositories whose code is allowed; admins also get a form to allow one."""
    return _page(request, CodeForm(label_suffix=""))


def _page(request: HttpRequest, form: CodeForm) -> HttpResponse:
    team = current_team(request)
    context = {
        "form": form,
        "team": team,
        "rows": TrustedCode.objects.filter(team=team),
        "may_change": is_at_least(current_role(request), Role.ADMIN),
    }
    status = UNPROCESSABLE if form.errors else 200
    return render(request, "modelhub/remote_code.html", context, status=status)


@require_POST
@require_role(Role.ADMIN)
def code_save(request: HttpRequest) -> HttpResponse:
    """Allow the code of a repository at a commit, or show the form with its errors."""
    form = CodeForm(request.POST, label_suffix="")
    if not form.is_valid():
        return _page(request, form)
    try:
        row = code_allow(
            team=current_team(request),
            name=form.cleaned_data["model"],
            reason=form.cleaned_data["reason"],
            by=request.user.get_username(),
        )
    except InvalidProblem as problem:
        form.add_error(problem.code, problem.detail)  # which names the field
        return _page(request, form)
    messages.success(request, f"Jobs may run the code of {row}, and of no other commit.")
    return redirect(PAGE)


@require_POST
def code_remove(request: HttpRequest, code_id: str) -> HttpResponse:
    """Withdraw the permission."""
    row = visible_or_404(TrustedCode, request.user, pk=code_id)
    membership = membership_of(request.user, row.team)
    check_role(Role(membership.role) if membership else Role.VIEWER, Role.ADMIN)
    code_forbid(row=row, by=request.user.get_username())
    messages.success(request, f"The code of {row} no longer runs in new jobs.")
    return redirect(PAGE)
