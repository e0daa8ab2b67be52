"""What a review page lets follow a job: its evaluation, a compression, an endpoint."""

import contextlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from django import forms
from pydantic import ValidationError

from runners.datasets.text import TextError, read_json
from runners.jobspec.engines import running_on
from runners.plans.document import GOALS
from runners.plans.fields import Part, faults_in, shown_of
from runners.plans.launch import ENGINE_ARGS_HINT, Launch
from runners.plans.methods import COMPRESSIONS
from runners.plans.workflow import MAKES_MODEL, WorkflowDocument
from runners.plans.workloads import CompressWork
from webapp.core.problems import InvalidProblem
from webapp.hosts.models import Host
from webapp.jobs.launching import gpu_vendors
from webapp.plans.models import Plan
from webapp.wizard.documents import document_of
from webapp.wizard.forms import form_field, from_form, to_form
from webapp.wizard.launch_form import ShellWords

RUN = "workflow"  # what the button of the form is called


SWEEP_LINE = re.compile(r"\s*(?P<path>[a-z]+\.[a-z_]+)\s*[=:]\s*(?P<values>\S.*?)\s*")


class SweepField(forms.CharField):
    """Values to try of some fields of a step, a field a line; cleaned to a sweep."""

    widget = forms.Textarea(attrs={"rows": 2, "spellcheck": "false"})

    def __init__(self, label: str) -> None:
        super().__init__(label=label, required=False, max_length=4000, help_text=SWEEP_HINT)

    def to_python(self, value: object) -> Any:  # noqa: ANN401 -- no text, as Django has it
        """Return the values by their paths; refuse a line that is none."""
        sweep: dict[str, list[Any]] = {}
        for line in str(super().to_python(value)).splitlines():
            if not line.strip():
                continue
            match = SWEEP_LINE.fullmatch(line)
            if match is None:
                raise forms.ValidationError(
                    f"“{self.label}”: {line.strip()[:80]!r} is no field with its values. Write "
                    "them as workload.bits = 4, 8."
                )
            sweep[match["path"]] = [value_of(each) for each in match["values"].split(",")]
        return sweep


def value_of(text: str) -> str | int | float | bool | None:
    """Return a value that a person typed: a number, true, false or null, else the text.

    >>> [value_of(each) for each in ("1e-4", " 8", "true", "awq")]
    [0.0001, 8, True, 'awq']
    """
    with contextlib.suppress(TextError):
        value = read_json(text.strip())
        if value is None or isinstance(value, str | int | float | bool):
            return value
    return text.strip()


# Options of the steps that follow, under the names of their documents' fields.
COMPRESS_OPTIONS = (
    "bits", "group_size", "sparsity", "recovery_steps", "data_repository", "data_records",
)  # fmt: skip
SERVE_OPTIONS = ("idle_stop_seconds", "prefix_caching")
SWEEP_HINT = (
    "One field a line, as workload.learning_rate = 1e-4, 3e-4. Each combination is a job of its "
    "own; the best model goes on"
)


class FollowingForm(forms.Form):
    """The steps after a job that makes a model, in their order, with their options."""

    sweep_job = SweepField("Values to try of this job")
    then_evaluate = forms.BooleanField(
        label="Evaluate the model, beside the one that it started from", required=False
    )
    evaluate_tasks = forms.CharField(
        label="Tasks",
        required=False,
        max_length=1000,
        help_text="Their names, with commas between; empty with a folder: all of it. Of held-out "
        "text there are held_out_choice and held_out_text",
    )
    evaluate_folder = forms.CharField(
        label="Folder of tasks on the host", required=False, max_length=1000
    )
    then_compress = forms.ChoiceField(label="Compress it", required=False)
    sweep_compress = SweepField("Values to try of the compression")
    then_serve = forms.ChoiceField(
        label="Serve it", required=False, help_text="As an endpoint, until somebody stops it"
    )
    serve_engine_args = ShellWords(
        label="Further engine arguments", required=False, help_text=ENGINE_ARGS_HINT
    )

    def __init__(self, data: Any = None, *, plan: Plan) -> None:  # noqa: ANN401 -- as Django has it
        super().__init__(data)
        self.plan = plan
        goal = plan.document.goal
        if goal == "pretrain":  # from random weights
            self.fields["then_evaluate"].label = "Evaluate the model"
        if goal == "compress":
            del self.fields["then_compress"], self.fields["sweep_compress"]
        else:
            methods = [(name, row.words) for name, row in COMPRESSIONS.items()]
            self.fields["then_compress"].choices = [("", "No"), *methods]  # type: ignore[attr-defined]
            self._offer("compress", CompressWork, COMPRESS_OPTIONS)
        hosts = Host.objects.filter(team=plan.team, pk=plan.document.hardware.host or "")
        vendors = [each for host in hosts for each in gpu_vendors(host)]
        engines = [(each.name, each.words) for each in running_on("cpu", *vendors)]
        self.fields["then_serve"].choices = [("", "No"), *engines]  # type: ignore[attr-defined]
        self._offer("serve", Launch, SERVE_OPTIONS)

    def _offer(self, step: str, part: type[Part], names: Sequence[str]) -> None:
        """Add the options of a step: the fields of its document, none of which is needed."""
        for name in names:
            offered = form_field(part, name)
            offered.required = False
            offered.initial = to_form(part(), name)
            if asked_for := offered.widget.attrs.get("data-asked-for"):
                offered.widget.attrs["data-asked-for"] = asked_for.replace(
                    "method=", "then_compress="
                )
            self.fields[f"{step}_{name}"] = offered

    def options_of(self, step: str) -> list[forms.BoundField]:
        """Return the fields of a step's options, in order."""
        return [
            self[name] for name in self.fields if name.startswith((f"{step}_", f"sweep_{step}"))
        ]

    @property
    def evaluate_options(self) -> list[forms.BoundField]:
        """Return the options of the evaluation."""
        return self.options_of("evaluate")

    @property
    def compress_options(self) -> list[forms.BoundField]:
        """Return the options of the compression."""
        return self.options_of("compress")

    @property
    def serve_options(self) -> list[forms.BoundField]:
        """Return the options of the endpoint."""
        return self.options_of("serve")

    def _chosen(
        self, step: str, part: type[Part], names: Sequence[str], method: str = ""
    ) -> dict[str, Any]:
        """Return what is stated of a step's options beside the defaults, as its document has it.

        ``method``: of a compression, whose options alone are used.
        """
        default = part()
        found = {}
        for name in names:
            value = from_form(part, name, self.cleaned_data.get(f"{step}_{name}"))
            used_by = shown_of(part.model_fields[name]).only_for.get("method", (method,))
            if value not in (None, "", getattr(default, name)) and method in used_by:
                found[name] = value
        return found

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Return what a valid form asks for, as steps of a workflow."""
        chosen = self.cleaned_data
        found: list[dict[str, Any]] = []
        if chosen["then_evaluate"]:
            names = [each.strip() for each in chosen["evaluate_tasks"].split(",") if each.strip()]
            tasks: dict[str, Any] = {"names": names} if names else {}
            tasks |= {"folder": folder} if (folder := chosen["evaluate_folder"]) else {}
            found.append({"goal": "evaluate"} | ({"tasks": tasks} if tasks else {}))
        if method := chosen.get("then_compress"):
            options = self._chosen("compress", CompressWork, COMPRESS_OPTIONS, method)
            step = {"goal": "compress", "workload": {"method": method} | options}
            sweep = chosen["sweep_compress"]
            found.append(step | ({"sweep": sweep} if sweep else {}))
        if engine := chosen["then_serve"]:
            launch = {"run": "endpoint", "engine": engine}
            launch |= self._chosen("serve", Launch, SERVE_OPTIONS)
            if words := chosen["serve_engine_args"]:
                launch["engine_args"] = words
            found.append({"goal": "serve", "launch": launch})
        return found

    def _field_of(self, path: Sequence[str]) -> str:
        """Return the form's field of a place in the workflow, ``steps.2.workload.bits``."""
        position = int(path[1]) if path[1:] and path[1].isdigit() else 0
        if position == 0:
            return "sweep_job" if "sweep" in path else "then_evaluate"
        goal = self.steps[position - 1]["goal"]
        named = f"sweep_{goal}" if "sweep" in path else f"{goal}_{path[-1]}"
        return named if named in self.fields else f"then_{goal}"

    def document(self, name: str, launch: Launch) -> WorkflowDocument:
        """Return the workflow of the plan's job and the steps after it; ``name``: "" for none.

        Raises:
            InvalidProblem: no step is chosen, or the steps do not go together.
        """
        if not self.is_valid():
            name, texts = next(iter(self.errors.items()))
            raise InvalidProblem(name, f"“{self[name].label}”: {texts[0]}")
        if not self.steps and not self.cleaned_data["sweep_job"]:
            raise InvalidProblem(
                "then_evaluate", "Nothing is to follow. Choose what does, or launch the job alone."
            )
        first = document_of(self.plan)
        first.pop("name", None)
        options = launch.model_dump(mode="json", exclude_defaults=True, exclude={"name"})
        first |= {"launch": options} if options else {}
        if sweep := self.cleaned_data["sweep_job"]:
            first["sweep"] = sweep
        try:
            return WorkflowDocument(name=name, steps=[first, *self.steps])
        except ValidationError as error:
            fault = faults_in(error)[0]
            named = self._field_of([part for part in fault.path if part not in GOALS])
            words = f"“{self[named].label}”: {fault.sentence}"
            raise InvalidProblem(named, words) from error


def following_form(
    plan: Plan,
    note: Mapping[str, Any],
    data: Any = None,  # noqa: ANN401 -- a QueryDict or None, as Django has it
) -> FollowingForm | None:
    """Return the form of what may follow a plan's job; None where nothing can."""
    if plan.document.goal not in MAKES_MODEL or not note.get("can"):
        return None
    return FollowingForm(data, plan=plan)
