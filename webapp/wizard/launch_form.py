"""The launch form of the review page, made from the document's part ``launch``."""

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from django import forms

from runners.jobspec.engine_args import engines_with_arguments
from runners.jobspec.engines import OWN, EngineName, Feature, titles, with_feature
from runners.plans.fields import Key, shown_of
from runners.plans.launch import (
    ENGINE_ARGS_HINT,
    ENGINES_HINT,
    USED_BY,
    Launch,
    kind_of,
    shell_words,
)
from runners.plans.refusals import DraftProblem
from runners.plans.workloads import TRAINING_GOALS
from webapp.core.numbers import number_of
from webapp.core.problems import Problem
from webapp.plans.repositories import RepositoryProblem
from webapp.wizard.forms import Choice, FormOfPart

ONE_HOUR = 3600.0
SHOW_COMMAND = "command"  # a run that starts nothing: the endpoint's command is shown
SEARCHED = "best-engine"  # an endpoint of the engine that a search of the host's finds
RUNS = ("job", "endpoint", "load", "evaluation", "workflow", "deployment", SHOW_COMMAND, SEARCHED)
ARGS_EXAMPLES: Mapping[EngineName, str] = {
    "llamacpp": "--reasoning-format none",
    "vllm": "--enable-auto-tool-choice --tool-call-parser hermes",
    "sglang": "--tool-call-parser qwen25",
}
PAIR = re.compile(r"\d+,\d+", re.ASCII)


class LoadLevels(forms.CharField):
    """Numbers apart by commas or blanks."""

    def prepare_value(self, value: object) -> object:
        """Return the text to show."""
        return ", ".join(f"{each:g}" for each in value) if isinstance(value, list) else value

    def to_python(self, value: object) -> Any:  # noqa: ANN401 -- no text, as Django has it
        """Return the numbers; refuse text, and what may be one number or two."""
        text = str(super().to_python(value))
        for each in re.split(r"[\s;]+", text):
            if PAIR.fullmatch(each):  # in half of the world's languages one number
                one, other = each.split(",")
                raise forms.ValidationError(
                    f"“Load levels” has {each[:20]}, which may be {one}.{other} or two levels; "
                    f"write {one}.{other}, or a blank after the comma: {one}, {other}."
                )
        try:
            levels = [number_of(each) for each in re.split(r"[\s,;]+", text.strip()) if each]
        except ValueError:
            levels = [math.nan]
        if not all(map(math.isfinite, levels)):
            raise forms.ValidationError(
                f"“Load levels” is {text[:60]}; give 1 to 12 rising numbers, such as 1, 2, 4."
            )
        return levels


ENDPOINTS = dict.fromkeys((SHOW_COMMAND, SEARCHED, "deployment"), "endpoint")


class ShellWords(forms.CharField):
    """Words as a shell takes them."""

    widget = forms.Textarea(attrs={"rows": 2, "spellcheck": "false"})

    def prepare_value(self, value: object) -> object:
        """Return the text to show."""
        return shlex.join(value) if isinstance(value, list) else value

    def to_python(self, value: object) -> Any:  # noqa: ANN401 -- no text, as Django has it
        """Return the words; refuse a quote that is not closed."""
        text = str(super().to_python(value))
        try:
            return shell_words(text)
        except ValueError as error:
            raise forms.ValidationError(f"“{self.label}”: {error}.") from error


class LaunchForm(FormOfPart):
    """What is started, for how long, and the options of its program.

    The button says what is run. Options of another run than the pressed one are not used.
    """

    unshown: ClassVar = frozenset(
        {"run", "save_as", "secrets", "points", "engine", "adapter", "engine_args"}
    )
    run = forms.ChoiceField(
        choices=[(each, each) for each in RUNS],
        required=False,
    )
    save_as = forms.ChoiceField(choices=[("next", "next"), ("new", "new")], required=False)
    engine_args = ShellWords(
        label=shown_of(Launch.model_fields["engine_args"]).title,
        required=False,
        help_text=f"{ENGINE_ARGS_HINT}.",
    )
    points = LoadLevels(
        label="Load levels",
        required=False,
        help_text="Numbers of clients, requests a second, or requests at once; rising, at most "
        "12.",
    )

    def __init__(
        self,
        data: Any = None,  # noqa: ANN401 -- a QueryDict or None, as Django has it
        *,
        note: Mapping[str, Any],
        secrets: Sequence[str],
        **kwargs: Any,
    ) -> None:
        super().__init__(data, **kwargs)
        for field in self.fields.values():  # a section that is not shown sends nothing
            field.required = False
        self.note, launch = note, self.part
        if not isinstance(launch, Launch):
            raise TypeError(launch)
        self.initial = dict(self.initial) | {
            name: getattr(launch, name)
            for name in ("save_as", "secrets", "engine", "adapter", "engine_args")
        }
        self.initial["points"] = launch.points or note.get("points", "")
        engines = dict(note.get("engines") or {OWN: OWN})
        if launch.engine not in engines:
            self.initial["engine_args"] = []  # they are of an engine that does not run here
        self.fields["engine"] = Choice(
            "Engine", engines, next(iter(engines)), self._engine_hint(note)
        )
        self.taking_args = [name for name in engines if name in engines_with_arguments()]
        if self.taking_args:
            self.fields["engine_args"].widget.attrs["placeholder"] = ARGS_EXAMPLES[
                self.taking_args[0]
            ]
        self.fields["adapter"] = Choice("Adapter of your team", self._adapters(note), "")
        self.fields["secrets"] = forms.MultipleChoiceField(
            label="Secrets for the job",
            required=False,
            choices=[(name, name) for name in secrets],
            widget=forms.CheckboxSelectMultiple,
        )
        self.scheduler_fields = self._choose_of_scheduler(note.get("scheduler") or {})
        drafts: dict[Key, str] = {each.id: each.name for each in note.get("drafts") or ()}
        lookup: dict[Key, str] = {}
        if self._offers("prompt_lookup"):
            lookup = {"lookup": f"Prompt lookup ({titles(with_feature('prompt_lookup'))})"}
        self.fields["draft_model"] = Choice(
            "Speculative decoding",
            {"": "None", **lookup, **drafts},
            "",
            "The output stays the same; accepted draft tokens save passes. A draft model is a "
            "smaller model of your team on this host, with the same tokenizer.",
        )

    def _choose_of_scheduler(
        self, offered: Mapping[str, Sequence[str] | None]
    ) -> list[forms.BoundField]:
        """Offer what the host read from its scheduler; a name that it does not tell is typed."""
        for name, values in offered.items():
            if values:
                shown = shown_of(Launch.model_fields[name])
                own: dict[Key, str] = {"": "The host's own", **{each: each for each in values}}
                self.fields[name] = Choice(shown.title, own, "", f"{shown.help}.")
        return [self[name] for name, values in offered.items() if values is None or values]

    @staticmethod
    def _engine_hint(note: Mapping[str, Any]) -> str:
        return " ".join([ENGINES_HINT, *(note.get("refusals") or ())])

    @staticmethod
    def _adapters(note: Mapping[str, Any]) -> dict[Any, str]:
        names = {name: name for name in note.get("adapter_names") or ()}
        per_prompt = "Per prompt: the adapter named in each line of the prompts file"
        return {"": "None: the base model", **names, "all": per_prompt}

    def _offers(self, *features: Feature) -> bool:
        """Return whether an engine that can be chosen has one of the features."""
        offered = {name for name, _ in self.note.get("engines") or ()}
        return any(offered & {each.name for each in with_feature(one)} for one in features)

    @property
    def endpoint_fields(self) -> list[forms.BoundField]:
        """Return the options of an endpoint."""
        names = ["idle_stop_seconds", "engine"]
        names += ["prefix_caching"] if self._offers("prefix_caching") else []
        names += ["draft_model"] if self._offers("draft_model", "prompt_lookup") else []
        names += ["engine_args"] if self.taking_args else []
        return [self[name] for name in names]

    @property
    def tracker_fields(self) -> list[forms.BoundField]:
        """Return the options of a training's tracker."""
        if self.note.get("goal") not in TRAINING_GOALS:
            return []
        return [self[name] for name in Launch.model_fields if name.startswith("tracker")]

    @property
    def load_fields(self) -> list[forms.BoundField]:
        """Return the options of a load test."""
        names = ["arrivals", "levels", "points", "requests_per_repetition", "repetitions"]
        names += ["max_search_seconds"]
        return [self[name] for name in names]

    def values(self) -> dict[str, Any]:
        """Return the values that the pressed button's run uses; the others have their default."""
        found = {**self.part.model_dump(), **super().values()}
        run = self.cleaned_data.get("run") or "job"
        run = ENDPOINTS.get(run, "job" if run == "workflow" else run)
        kind = run if self.note.get("is_serving") else kind_of(self.note.get("goal", run), run)
        unused = [name for name, kinds in USED_BY.items() if kind not in kinds]
        for name in unused:
            found[name] = Launch.model_fields[name].get_default()
        # The form shows what both ways to choose levels take; the other way's is not used.
        other = "points" if found["levels"] == "search" else "max_search_seconds"
        found[other] = Launch.model_fields[other].get_default(call_default_factory=True)
        save_as = self.cleaned_data.get("save_as") or "next"
        return {**found, "run": run, "save_as": save_as}

    @property
    def launch(self) -> Launch:
        """Return the launch that a valid form asks for."""
        if not isinstance(self.part, Launch):
            raise TypeError(self.part)
        return self.part

    def refuse(self, problem: DraftProblem | Problem) -> None:
        """Show a problem of the launch at the field that it names, or above the form."""
        if isinstance(problem, DraftProblem):
            field, words = problem.field, problem.sentence
        else:
            errors: Any = problem.facts.get("errors")
            field, words = (str(errors[0]["field"]) if errors else problem.code), problem.detail
            if isinstance(problem, RepositoryProblem):
                words = problem.sentence
        self.add_error(field if field in self.fields else None, words)


def launch_form(
    launch: Launch,
    title: str,
    note: Mapping[str, Any],
    secrets: Sequence[str],
    data: Any = None,  # noqa: ANN401 -- a QueryDict or None, as Django has it
) -> LaunchForm:
    """Return the form of a launch; a plan's first endpoint stops after an idle hour."""
    is_new = launch == Launch()
    shown = launch.with_values(
        name=launch.name or title,
        **({"idle_stop_seconds": ONE_HOUR} if is_new else {}),
    )
    return LaunchForm(data, part=shown, note=note, secrets=secrets)
