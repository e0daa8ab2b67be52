"""The form that registers a model from its config.json."""

from typing import Any

from django import forms

from planner.catalog.models import model_from_config
from planner.specs.base import PlannerError
from runners.jobspec.base import NAME_LENGTH
from webapp.core.display import sentence
from webapp.core.names import shown_name
from webapp.wizard.forms import ConfigJson, read_upload


class ModelNewForm(forms.Form):
    """A name and a ``config.json``, pasted or uploaded."""

    use_required_attribute = False

    name = forms.CharField(
        label="Name",
        max_length=NAME_LENGTH,
        validators=[shown_name],
        error_messages={"required": "Give the model a name that your team will recognise."},
    )
    config = ConfigJson("config.json", "Paste the file as Hugging Face publishes it.")
    config_file = forms.FileField(
        label="Or upload the file",
        required=False,
        widget=forms.FileInput(attrs={"accept": ".json,application/json"}),
    )

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
        if not values["config"]:
            self.add_error("config", "Paste the content of config.json, or upload the file.")
            return values
        try:
            values["shape"] = model_from_config(values["config"])
        except PlannerError as error:
            self.add_error("config", sentence(error.message))
        return values
