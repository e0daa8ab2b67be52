"""The form that registers a model by its repository or its config.json."""

from typing import Any

from django import forms

from planner.catalog.models import model_from_config
from planner.specs.base import PlannerError
from runners.jobspec.base import LONGEST_NAME, NAME_LENGTH
from runners.plans.document import ModelChoice
from webapp.accounts.models import Team
from webapp.core.display import sentence
from webapp.core.names import shown_name
from webapp.plans.repositories import RepositoryProblem, UnreachableError, with_config
from webapp.wizard.forms import ConfigJson, read_upload


class ModelNewForm(forms.Form):
    """A name, and a repository of the Hub or a ``config.json``, pasted or uploaded.

    ``chosen`` of a valid form is what they say as a plan has it; ``team`` may read the repository.
    """

    use_required_attribute = False

    name = forms.CharField(
        label="Name",
        max_length=NAME_LENGTH,
        validators=[shown_name],
        error_messages={"required": "Give the model a name that your team will recognise."},
    )
    repository = forms.CharField(
        label="Repository on the Hub",
        required=False,
        max_length=LONGEST_NAME,
        help_text="As owner/name; its config.json is read there, and jobs load its weights. "
        "Empty: the model is for planning alone.",
    )
    config = ConfigJson("config.json", "Paste the file as Hugging Face publishes it.")
    config_file = forms.FileField(
        label="Or upload the file",
        required=False,
        widget=forms.FileInput(attrs={"accept": ".json,application/json"}),
    )

    def __init__(
        self,
        *args: Any,
        team: Team | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.team = team

    def clean(self) -> dict[str, Any]:
        """Parse the config; reject one that describes no model, with the missing field."""
        values = super().clean() or self.cleaned_data
        if "config" in self.errors:
            return values
        try:
            values["config"] = read_upload(values.get("config_file")) or values.get("config")
        except forms.ValidationError as error:
            self.add_error("config_file", error)
            return values
        values["chosen"] = ModelChoice(source="config", config=values["config"])
        name = (values.get("repository") or "").strip()
        if self.team is not None and name:
            self._read_repository(name, self.team, values)
        if self.errors:
            return values
        if not values["config"]:
            self.add_error(
                "config",
                "Name a repository, paste the content of config.json, or upload the file.",
            )
            return values
        try:
            values["shape"] = model_from_config(values["config"])
        except PlannerError as error:
            self.add_error("config", sentence(error.message))
        return values

    def _read_repository(self, name: str, team: Team, values: dict[str, Any]) -> None:
        """Take the config of a repository as the Hub has it, or the given one without the Hub."""
        named = ModelChoice(source="hub", repository=name, config=values["config"])
        try:
            values["chosen"] = with_config(named, team)
        except RepositoryProblem as problem:
            self.add_error("repository", problem.sentence)
        except UnreachableError as error:
            self.add_error(
                "repository", f"The Hub was not asked for it: {error} Give its config.json too."
            )
        else:
            values["config"] = values["chosen"].config
