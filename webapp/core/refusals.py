"""Why a change was refused, at the field of the form that asked for it."""

from collections.abc import Mapping
from typing import ClassVar

from django import forms

from runners.plans.refusals import DraftProblem
from webapp.core.problems import Problem
from webapp.core.vault import VaultError

Refusal = DraftProblem | Problem | VaultError


class RefusableForm(forms.Form):
    """A form of a change that may be refused once its fields are read."""

    # The form's fields that have another name than the change's, by that name.
    OTHER_NAMES: ClassVar[Mapping[str, str]] = {}

    def refuse(self, refusal: Refusal) -> None:
        """Show a refusal at the field that it names, else above them all."""
        if isinstance(refusal, VaultError):
            named = "key"
        else:
            named = refusal.field if isinstance(refusal, DraftProblem) else refusal.code
        field = self.OTHER_NAMES.get(named, named)
        self.add_error(field if field in self.fields else None, str(refusal))
