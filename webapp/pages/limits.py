"""Inverse questions: the largest model, context or batch that fits."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from django import forms
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.utils.http import urlencode
from django.views.decorators.http import require_GET
from pydantic import ValidationError

from planner.catalog.engines import DEFAULT_ENGINE
from planner.catalog.models import checkpoint_name
from planner.specs.base import PlannerError
from planner.specs.estimate import FirstFailure, InverseAnswer, InverseQuestion, Limit
from planner.specs.workload import Strategy
from runners.plans.document import (
    DEFAULT_DEVICE,
    DEFAULT_MODEL,
    GOALS,
    PLANS,
    HardwareChoice,
    ModelChoice,
    PlanDocument,
)
from runners.plans.fields import Part, faults_in
from runners.plans.pins import PINS
from runners.plans.refusals import DraftProblem
from runners.plans.workloads import WORKLOADS
from webapp.accounts.models import Team, memberships_of
from webapp.accounts.services import chosen_of
from webapp.core.display import (
    DASH,
    NBSP,
    TIMES,
    Figure,
    MemoryRow,
    capitalised,
    duration,
    memory,
    money_an_hour,
    parameters,
    sentence,
    whole,
)
from webapp.core.parameters import choice_in_query, reads_query
from webapp.hosts.models import RUNS_JOBS, Host, HostState
from webapp.plans.alternatives import TARGET_WORDS, target_words
from webapp.plans.engine_words import engine_title, family_words
from webapp.plans.explanation import device_words, strategy_words, weights_words
from webapp.plans.models import Plan
from webapp.plans.planning import limit_of
from webapp.plans.verdict import ERROR_WORDS, Verdict, estimate_figures, evidence_url, memory_rows
from webapp.wizard.combobox import device_choices, device_combobox, model_combobox
from webapp.wizard.drafts import stored_draft
from webapp.wizard.forms import (
    Choice,
    ModelForm,
    StepForm,
    form_field,
    from_form,
    to_form,
)

# ---------------------------------------------------------------------------
# The questions about limits: texts, unknowns, their form, and the answers' figures.
# ---------------------------------------------------------------------------


SERVING = ("serve", "generate")
TRAINING = ("finetune", "pretrain")


class Question(NamedTuple):
    """One question: tab name, title, hint, goals and unknowns.

    ``sought`` has the form fields of the unknown, which the form omits.
    """

    key: InverseQuestion
    name: str
    title: str
    hint: str
    goals: tuple[str, ...]
    sought: frozenset[str]


QUESTIONS = (
    Question(
        "longest_context",
        "Context",
        "What is the longest context?",
        "Prompt and answer in total, for each concurrent request",
        SERVING,
        frozenset({"input_tokens"}),
    ),
    Question(
        "most_users",
        "Concurrency",
        "How many concurrent requests?",
        "No request waits for memory, and all meet the target",
        ("serve",),
        frozenset({"concurrency"}),
    ),
    Question(
        "largest_batch",
        "Batch",
        "What is the largest batch?",
        "Sequences in one pass, without accumulation",
        ("generate", *TRAINING),
        frozenset({"batch_size", "global_batch_size"}),
    ),
    Question(
        "longest_sequence",
        "Sequence",
        "What is the longest training sequence?",
        "Tokens per sequence",
        TRAINING,
        frozenset({"sequence_length"}),
    ),
    Question(
        "largest_model",
        "Model",
        "What is the largest model?",
        "In the catalog, for each weight dtype",
        (*SERVING, "finetune"),
        frozenset({"model", "weight_dtype"}),
    ),
    Question(
        "fewest_devices",
        "Devices",
        "What is the minimum number of devices?",
        "In powers of two, because layouts need divisible sizes",
        (*SERVING, *TRAINING),
        frozenset({"devices_per_node", "nodes"}),
    ),
    Question(
        "cheapest_instance",
        "Cloud offer",
        "What is the cheapest cloud offer?",
        "The lowest firm price of each machine type",
        (*SERVING, *TRAINING),
        frozenset({"hardware", "devices_per_node", "nodes"}),
    ),
)
BY_KEY: dict[str, Question] = {question.key: question for question in QUESTIONS}


def questions_for_goal(goal: str) -> tuple[Question, ...]:
    """Return the questions that apply to a goal."""
    return tuple(question for question in QUESTIONS if goal in question.goals)


# The form of a question about limits: only the fields it needs, each with a default.


# Fields for the length of a run, and details that do not affect limits.
UNASKED = {
    "time_budget_seconds",
    "tokens",
    "prefix_share_ratio",
    "length_variation",
    "prompts_path",
    "batching",
    "kv_cache",
    "speculation",
    "compiled_step",
    "attention",
    "compute_dtype",
    "compiled",
    "objective",
    "beta",
    "preference_loss",
    "precompute_reference",
    "reward_function",
    "num_generations",
    "teacher_model",
    "max_completion_length",
    "max_prompt_length",
    "temperature",
    "num_iterations",
    "generator",
    "reward_timeout_seconds",
    "reward_memory_gib",
    "mixture",
    "dataset",
}
PRICES = [("balanced", "The lowest price by the hour"), ("cost", "The lowest price by the token")]
HOST = "host:"
HARDWARE_FIELDS = ("devices_per_node", "nodes")
# Planner field -> form field, where the names differ.
FORM_NAMES = {
    "host": "hardware",
    "pool": "hardware",
    "cluster": "hardware",
    "batch_size": "global_batch_size",
}


def limit_fields(part: type[Part]) -> list[str]:
    """Return the fields of a workload that a question about limits asks, in their order."""
    return [name for name in part.model_fields if name not in UNASKED]


class LimitForm(StepForm):
    """Work, model and hardware of a limit question; the question decides which fields it has."""

    goal = forms.ChoiceField(label="Goal")
    model = deepcopy(ModelForm.base_fields["catalog_id"])
    hardware = forms.ChoiceField(label="Hardware")

    def __init__(
        self, data: Mapping[str, Any], question: Question, hosts: Sequence[Host] = ()
    ) -> None:
        goal = _goal(data, question)
        super().__init__(_with_defaults(data, goal, hosts))
        self.question, self.chosen_goal = question, goal
        goals = [(each, GOALS[each][0]) for each in question.goals]
        self.fields["goal"] = forms.ChoiceField(label="Goal", choices=goals)
        self.fields["model"].widget = model_combobox()
        own = [(f"{HOST}{host.pk}", host.name) for host in hosts]
        groups: list[tuple[str, Any]] = [("Your hosts", own)] if own else []
        self.fields["hardware"] = forms.ChoiceField(
            label="Hardware",
            choices=[*groups, *device_choices()],
            widget=device_combobox(groups),
            help_text="All devices of a host are used." if own else "",
        )
        for name in HARDWARE_FIELDS:
            self.fields[name] = form_field(HardwareChoice, name)
        self.part = WORKLOADS[goal]
        for name in limit_fields(self.part):
            self.fields[name] = form_field(self.part, name)
        if goal == "serve":
            self.fields["latency_target"] = form_field(PlanDocument, "latency_target")
            self.fields["latency_target"].help_text = ""
        dtypes = PINS["weight_dtype"]
        self.fields["weight_dtype"] = Choice(dtypes.title, dtypes.choices or {}, None)
        if question.key == "cheapest_instance":
            self.fields["objective"] = forms.ChoiceField(label="Cheapest by", choices=PRICES)
        for name in question.sought:
            self.fields.pop(name, None)

    def clean_model(self) -> str:
        """Return the name of a model; reject an unknown one with similar names."""
        name = self.cleaned_data["model"]
        if not name:
            raise forms.ValidationError(f"Model is missing. Name one, such as {DEFAULT_MODEL}.")
        try:
            return checkpoint_name(name)
        except PlannerError as error:
            raise forms.ValidationError(sentence(error.message)) from error

    @property
    def document(self) -> PlanDocument:
        """Return the form as a document; the unknown of the question has its default."""
        values = self.cleaned_data
        hardware = values.get("hardware", DEFAULT_DEVICE)
        is_host = hardware.startswith(HOST)
        place = {"host": hardware.removeprefix(HOST)} if is_host else {"device": hardware}
        counts = {name: values[name] for name in HARDWARE_FIELDS if name in values}
        own = {
            name: from_form(self.part, name, values[name])
            for name in limit_fields(self.part)
            if name in values
        }
        return PLANS[self.chosen_goal](
            goal=self.chosen_goal,
            objective=values.get("objective", "balanced"),
            latency_target=values.get("latency_target", "none"),
            model=ModelChoice(source="catalog", catalog_id=values.get("model", DEFAULT_MODEL)),
            hardware=HardwareChoice(**place, **counts),
            workload=self.part.model_validate(own),
            pins=Strategy(weight_dtype=values.get("weight_dtype") or None),
        )

    def refuse(self, problem: str, field: str) -> None:
        """Add a planner error to its form field, or to the form if there is no such field."""
        last = field.rsplit(".", 1)[-1]
        name = FORM_NAMES.get(last, last)
        self.add_error(name if name in self.fields else None, problem)


def _goal(data: Mapping[str, Any], question: Question) -> str:
    """Return the chosen goal, else the question's first goal."""
    chosen = data.get("goal", "")
    return chosen if chosen in question.goals else question.goals[0]


def _with_defaults(data: Mapping[str, Any], goal: str, hosts: Sequence[Host]) -> dict[str, Any]:
    """Return the submitted values, with a default for every missing field."""
    proposed: dict[str, Any] = {
        "goal": goal,
        "model": DEFAULT_MODEL,
        "hardware": f"{HOST}{hosts[0].pk}" if hosts else DEFAULT_DEVICE,
        "devices_per_node": 1,
        "nodes": 1,
        "latency_target": "chat",
        "objective": PRICES[0][0],
        **_default_values(goal),
    }
    sent = {name: data[name] for name in data if name != "goal"}
    return {**proposed, **sent}


def _default_values(goal: str) -> dict[str, Any]:
    """Return the texts of a goal's workload that its form has if none are sent."""
    part = WORKLOADS[goal]()
    fields = {
        name: form_field(type(part), name)
        for name in type(part).model_fields
        if name not in UNASKED
    }
    return {name: each.prepare_value(to_form(part, name)) for name, each in fields.items()}


# Texts and figures of an answer about a limit: the limit, its figures, the first failure.


FIGURES = 4
ENOUGH = {"fewest_devices", "cheapest_instance"}
UNIT_WORDS = {"users": "requests", "USD per hour": "$/h"}


@dataclass(frozen=True)
class Row:
    """One of several limits: the largest model for one weight dtype."""

    name: str
    value: str
    memory: str
    beyond: str


@dataclass(frozen=True)
class LimitAnswer:
    """The answer below the form of the page."""

    question: Question
    verdict: Verdict
    figures: tuple[Figure, ...] = ()
    rows: tuple[MemoryRow, ...] = ()
    ends: str = ""
    others: tuple[Row, ...] = ()
    untargeted: str = ""  # what there is without the latency target, where only that is missed
    searched: str = ""
    calibration: str = ""


def shown(answer: InverseAnswer, document: PlanDocument) -> LimitAnswer:
    """Return an answer as texts and figures."""
    question = BY_KEY[answer.question]
    noun = "search" if answer.searches == 1 else "searches"
    searched = f"{whole(answer.searches)} {noun} in {duration(answer.seconds)}"
    if not answer.limits:
        verdict = _nothing(answer)
        return LimitAnswer(question, verdict, searched=searched, calibration=answer.calibration)
    best, *_ = answer.limits
    several = answer.limits if len(answer.limits) > 1 else ()
    return LimitAnswer(
        question=question,
        verdict=Verdict("good", "fits", _sentence(answer.question, best), _detail(best)),
        figures=_figures(best, document),
        rows=memory_rows(best.estimate),
        ends=_failure_sentence(best.beyond, best.unit, enough=answer.question in ENOUGH),
        others=tuple(_row(limit) for limit in several),
        searched=searched,
        calibration=answer.calibration,
    )


def _nothing(answer: InverseAnswer) -> Verdict:
    smallest = answer.smallest
    if smallest is None:
        return Verdict("bad", "does-not-fit", "No result", "No strategy applies.")
    units = {"most_users": "users", "largest_batch": "sequences", "fewest_devices": "devices"}
    tried = value_words(smallest.value, units.get(answer.question, "tokens"))
    return Verdict(
        "bad",
        "does-not-fit",
        f"No value works, not even {tried}",
        f"{capitalised(_reason(smallest))}.",
    )


def value_words(value: float | str, unit: str) -> str:
    """Return a tried value as text with its unit; a name is returned unchanged."""
    if isinstance(value, str):
        return value
    if unit == "parameters":
        return f"{parameters(value)} parameters"
    if unit == "USD per hour":
        return money_an_hour(value)
    words = UNIT_WORDS.get(unit, unit)
    if value == 1:
        words = words.removesuffix("s")
    return f"{whole(value)}{NBSP}{words}"


def _sentence(question: str, limit: Limit) -> str:
    value = value_words(limit.value, limit.unit)
    device = limit.cluster.device
    sentences = {
        "longest_context": f"Up to {value} of context",
        "most_users": f"Up to {value} at once",
        "largest_batch": f"Up to {value} in one batch",
        "longest_sequence": f"Up to {value} in one sequence",
        "largest_model": f"{limit.name} is the largest that fits",
        "fewest_devices": f"{value} {'is' if limit.value == 1 else 'are'} enough",
        "cheapest_instance": f"{limit.name} is enough, for {value}",
    }
    if question == "cheapest_instance":
        return sentences[question]
    name = device_words(device) if isinstance(device, str) else device.name or device.id
    count = limit.cluster.num_devices
    omits_count = question == "fewest_devices" or count == 1
    return f"{sentences[question]} on {name if omits_count else f'{count} {TIMES} {name}'}"


def _detail(limit: Limit) -> str:
    return f"{_in_engine(strategy_words(limit.estimate.strategy), limit)}."


def _in_engine(words: str, limit: Limit) -> str:
    """Return words with the engine of a limit, unless that is Slipway's own."""
    engine = limit.estimate.engine
    return words if engine == DEFAULT_ENGINE else f"{words} · {engine_title(engine)}"


def _figures(limit: Limit, document: PlanDocument) -> tuple[Figure, ...]:
    """Return the limit and the figures at the limit: four in total."""
    others = estimate_figures(limit.estimate, document)
    return (*_own_figure(limit), *others)[:FIGURES]


def _own_figure(limit: Limit) -> tuple[Figure, ...]:
    """Return the limit itself as a figure, if it is a number of tokens, users or sequences."""
    if limit.unit not in {"tokens", "users", "sequences"}:
        return ()
    words = UNIT_WORDS.get(limit.unit, limit.unit)
    low, high = limit.interval or (None, None)
    note, value = ERROR_WORDS[limit.estimate.error_class], float(limit.value)
    return (Figure("The limit", value, words, low, high, note=note, evidence=evidence_url()),)


def _failure_sentence(failure: FirstFailure | None, unit: str, *, enough: bool) -> str:
    """Return a sentence on the first failure beyond the limit."""
    if failure is None:
        return (
            "The search found no insufficient value."
            if enough
            else "The search knows no larger value."
        )
    tried = value_words(failure.value, unit)
    word = "is not enough" if enough else "is too much"
    return f"{tried} {word}: {_reason(failure)}."


def _reason(failure: FirstFailure) -> str:
    """Return the reason of the first failure; for targets, with both times."""
    family = family_words(failure.family)
    weights, is_weights, _ = family.partition(" weights")
    fits = f"{weights} weights fit; " if is_weights else ""
    if (words := target_words(failure)) and failure.required and failure.limit:
        return f"{fits}{words} {exact(failure.required)}, the target is {exact(failure.limit)}"
    if failure.constraint == "max_concurrency" and failure.required and failure.limit:
        # The strategy nearest to a plan is seldom the one that is shown: its memory may be full.
        holds = f"holds {whole(failure.required)} at once, not {whole(failure.limit)}"
        return f"the closest strategy, {family}, {holds}" if family else f"memory {holds}"
    if failure.constraint in TARGET_WORDS:
        return f"{fits}{failure.reason.removeprefix(f'{failure.family}: ')}"
    return failure.reason


def exact(seconds: float) -> str:
    """Return a time with four digits, to be distinguishable from its limit."""
    value, unit = (seconds * 1000, "ms") if seconds < 1 else (seconds, "s")
    return f"{value:.4g}{NBSP}{unit}"


def _row(limit: Limit) -> Row:
    weights = weights_words(limit.estimate.strategy)
    usage = limit.estimate.memory
    return Row(
        name=_in_engine(limit.name.rsplit(" in ", 1)[0], limit),
        value=f"{parameters(float(limit.value))} · {weights}",
        memory=f"{memory(usage.per_device_peak_bytes)} of {memory(usage.capacity_bytes)}",
        beyond=f"{limit.beyond.value}: {_reason(limit.beyond)}" if limit.beyond else DASH,
    )


# ---------------------------------------------------------------------------
# The limits page with its question form and answer, and the limits tab of a plan.
# ---------------------------------------------------------------------------


UNPROCESSABLE = 422
# Query parameters that links to other questions keep.
KEPT = ("goal", "model", "hardware", "devices_per_node", "nodes", "latency_target", "weight_dtype")
# Those of the page: the fields of every goal, for a form that changes its goal sends the old ones.
PARAMETERS = {
    *("question", "ask", "objective", *KEPT, *HARDWARE_FIELDS),
    *(name for part in WORKLOADS.values() for name in part.model_fields),
}


@require_GET
@reads_query(*PARAMETERS)
def limits(request: HttpRequest) -> HttpResponse:
    """Show the form of a question, and the answer after it was submitted."""
    question = BY_KEY.get(choice_in_query(request, "question", BY_KEY), QUESTIONS[0])
    team = _team(request)
    form = LimitForm(request.GET.dict(), question, _hosts(team))
    is_submitted = "ask" in request.GET
    answer = _answer(form, team) if is_submitted and form.is_valid() else None
    if not is_submitted:
        # Unbound, with its defaults and without errors.
        form.is_bound, form.initial = False, dict(form.data)
    context: dict[str, Any] = {
        "question": question,
        "form": form,
        "answer": answer,
        "tabs": [_tab(each, question, request) for each in QUESTIONS],
    }
    part = "limits/region.html" if "HX-Request" in request.headers else "limits/page.html"
    status = UNPROCESSABLE if is_submitted and answer is None else 200
    return render(request, part, context, status=200 if part != "limits/page.html" else status)


def _answer(form: LimitForm, team: Team | None) -> LimitAnswer | None:
    """Return the answer, or None after adding the planner's error to the form."""
    try:
        document = form.document
    except ValidationError as error:
        fault = faults_in(error)[0]
        form.refuse(fault.sentence, fault.path[-1])
        return None
    try:
        answer = _limit_for(document, form.question, team)
        untargeted = _untargeted(answer, document, form.question, team)
    except DraftProblem as problem:
        form.refuse(problem.sentence, problem.field)
        return None
    return replace(shown(answer, document), untargeted=untargeted)


def _untargeted(
    answer: InverseAnswer, document: PlanDocument, question: Question, team: Team | None
) -> str:
    """Return the limit without the latency target, "" unless that alone is missed."""
    missed = answer.smallest and answer.smallest.constraint
    if missed not in TARGET_WORDS or document.latency_target == "none":
        return ""
    free = document.model_copy(update={"latency_target": "none"})
    found = _limit_for(free, question, team).limits
    return _sentence(question.key, found[0]) if found else ""


def _limit_for(document: PlanDocument, question: Question, team: Team | None) -> InverseAnswer:
    return limit_of(Plan(team=team, draft=stored_draft(document)), question.key)


def _team(request: HttpRequest) -> Team | None:
    membership = chosen_of(request, memberships_of(request.user))
    return membership.team if membership else None


def _hosts(team: Team | None) -> list[Host]:
    if team is None:
        return []
    ready = Host.objects.filter(team=team, kind__in=RUNS_JOBS, state=HostState.READY)
    return list(ready.order_by("created_at"))


def _tab(each: Question, current: Question, request: HttpRequest) -> dict[str, Any]:
    parameters = {name: request.GET[name] for name in KEPT if name in request.GET}
    url = f"{reverse('limits')}?{urlencode({'question': each.key, **parameters})}"
    return {"url": url, "name": each.name, "is_current": each is current}


def plan_panel(plan: Plan, question_key: str) -> dict[str, Any]:
    """Return the context of a plan's limits tab: applicable questions, and one answer."""
    document = plan.readable_document
    if document is None:
        return {"questions": (), "limit_problem": ""}
    questions = questions_for_goal(document.goal)
    chosen = next((each for each in questions if each.key == question_key), None)
    panel: dict[str, Any] = {"questions": questions, "question": chosen}
    if chosen is None:
        return panel
    try:
        return {**panel, "limit": shown(limit_of(plan, chosen.key), document)}
    except DraftProblem as problem:
        return {**panel, "limit_problem": problem.sentence}
