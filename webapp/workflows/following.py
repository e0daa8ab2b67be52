"""What a review page lets follow a job: its evaluation, a compression, an endpoint."""

from collections.abc import Mapping
from typing import Any

from django import forms
from pydantic import ValidationError

from runners.jobspec.engines import running_on
from runners.plans.fields import faults_in
from runners.plans.launch import Launch
from runners.plans.methods import COMPRESSIONS
from runners.plans.workflow import MAKES_MODEL, WorkflowDocument
from webapp.core.problems import InvalidProblem
from webapp.hosts.models import Host
from webapp.jobs.launching import gpu_vendors
from webapp.plans.models import Plan
from webapp.wizard.documents import document_of

RUN = "workflow"  # what the button of the form is called


class FollowingForm(forms.Form):
    """The steps after a job that makes a model, in their order."""

    then_evaluate = forms.BooleanField(
        label="Evaluate the model, beside the one that it started from", required=False
    )
    then_compress = forms.ChoiceField(label="Compress it", required=False)
    then_serve = forms.ChoiceField(
        label="Serve it", required=False, help_text="As an endpoint, until somebody stops it"
    )

    def __init__(self, data: Any = None, *, plan: Plan) -> None:  # noqa: ANN401 -- as Django has it
        super().__init__(data)
        self.plan = plan
        goal = plan.document.goal
        if goal == "pretrain":  # from random weights
            self.fields["then_evaluate"].label = "Evaluate the model"
        if goal == "compress":
            del self.fields["then_compress"]
        else:
            methods = [(name, row.words) for name, row in COMPRESSIONS.items()]
            self.fields["then_compress"].choices = [("", "No"), *methods]  # type: ignore[attr-defined]
        hosts = Host.objects.filter(team=plan.team, pk=plan.document.hardware.host or "")
        vendors = [each for host in hosts for each in gpu_vendors(host)]
        engines = [(each.name, each.words) for each in running_on("cpu", *vendors)]
        self.fields["then_serve"].choices = [("", "No"), *engines]  # type: ignore[attr-defined]

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Return what a valid form asks for, as steps of a workflow."""
        chosen = self.cleaned_data
        found: list[dict[str, Any]] = []
        if chosen["then_evaluate"]:
            found.append({"goal": "evaluate"})
        if method := chosen.get("then_compress"):
            found.append({"goal": "compress", "workload": {"method": method}})
        if engine := chosen["then_serve"]:
            found.append({"goal": "serve", "launch": {"run": "endpoint", "engine": engine}})
        return found

    def document(self, name: str, launch: Launch) -> WorkflowDocument:
        """Return the workflow of the plan's job and the steps after it; ``name``: "" for none.

        Raises:
            InvalidProblem: no step is chosen, or the steps do not go together.
        """
        if not self.is_valid():
            name, texts = next(iter(self.errors.items()))
            raise InvalidProblem(name, f"“{self[name].label}”: {texts[0]}")
        if not self.steps:
            raise InvalidProblem(
                "then_evaluate", "Nothing is to follow. Choose what does, or launch the job alone."
            )
        first = document_of(self.plan)
        first.pop("name", None)
        options = launch.model_dump(mode="json", exclude_defaults=True, exclude={"name"})
        first |= {"launch": options} if options else {}
        try:
            return WorkflowDocument(name=name, steps=[first, *self.steps])
        except ValidationError as error:
            fault = faults_in(error)[0]
            raise InvalidProblem("then_evaluate", fault.sentence) from error


def following_form(
    plan: Plan,
    note: Mapping[str, Any],
    data: Any = None,  # noqa: ANN401 -- a QueryDict or None, as Django has it
) -> FollowingForm | None:
    """Return the form of what may follow a plan's job; None where nothing can."""
    if plan.document.goal not in MAKES_MODEL or not note.get("can"):
        return None
    return FollowingForm(data, plan=plan)
