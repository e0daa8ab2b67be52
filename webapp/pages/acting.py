"""What pages have in common that change something: by a form, or by a button alone."""

from collections.abc import Callable

from django.contrib import messages
from django.db.models import Model
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect

from runners.plans.refusals import DraftProblem
from webapp.core.problems import Problem
from webapp.core.refusals import RefusableForm
from webapp.core.vault import VaultError


def act(request: HttpRequest, change: Callable[[], object], words: str = "") -> bool:
    """Carry a change out, and say that it is done or why not; return whether it is."""
    try:
        change()
    except (DraftProblem, Problem) as refusal:
        messages.error(request, str(refusal))
        return False
    if words:
        messages.success(request, words)
    return True


def save_by_form(
    request: HttpRequest,
    form: RefusableForm,
    save: Callable[[], Model],
    show: Callable[[], HttpResponse],
    *,
    words: str,
    page: str,
) -> HttpResponse:
    """Save what a form says and go to the row's ``page``; refused, show the form again.

    ``words`` has ``{row}`` for the row's name.
    """
    if form.is_valid():
        try:
            row = save()
        except (DraftProblem, Problem, VaultError) as refusal:
            form.refuse(refusal)
        else:
            messages.success(request, words.format(row=row))
            return redirect(page, row.pk)
    return show()
