"""Template contexts of the wizard's steps, concurrent edits, and the template of two jobs."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from django.contrib.auth.models import User
from django.db import transaction
from django.http import QueryDict
from django.urls import reverse

from planner.catalog.models import find_model, model_from_config
from planner.specs.model import ModelSpec
from planner.specs.workload import Strategy
from runners.jobspec.base import DEMO_ENCODER, MAX_UPLOAD_BYTES
from runners.plans.document import FinetunePlan, HardwareChoice, ModelChoice, PlanDocument
from runners.plans.pins import PINS as SHOWN_PINS
from runners.plans.refusals import DraftProblem
from runners.plans.workloads import FinetuneWork
from webapp.accounts.models import Team
from webapp.accounts.secrets import secret_names
from webapp.core.clock import now
from webapp.core.display import TIMES, bandwidth, memory, parameters, whole
from webapp.core.ids import new_ulid
from webapp.core.queries import SEEN, changed_words, mark_of
from webapp.core.site_settings import demo_seconds
from webapp.hosts.machines import planned_words
from webapp.hosts.models import Host, HostState, Pool
from webapp.hosts.services import Contact, contact_of
from webapp.jobs.busy_hosts import busy_note
from webapp.jobs.launching import launch_note, launchable_of, plan_launch
from webapp.jobs.models import Job
from webapp.modelhub.catalog import catalog_rows
from webapp.modelhub.models import demo_config, num_parameters
from webapp.plans.alternatives import Offers, offers_of
from webapp.plans.engine_words import engines_named
from webapp.plans.explanation import plan_title, short_name, whole_model_words
from webapp.plans.models import Plan
from webapp.plans.places import NamedRows, pool_words
from webapp.plans.planning import current_answer, lacks_suggestions, plan_compute, verdict_answer
from webapp.plans.predicting import planned_speed
from webapp.plans.saving import saving_of
from webapp.plans.verdict import price_of, problem_verdict, verdict_of
from webapp.wizard.drafts import (
    STEPS,
    Options,
    neighbours,
    options_for,
    pins_form,
    step_form,
    stepper,
    stored_draft,
    summaries,
)
from webapp.wizard.forms import GOAL_CHOICES, GOAL_FIELDS, PinsForm, StepForm
from webapp.wizard.launch_form import LaunchForm, launch_form

# ---------------------------------------------------------------------------
# A template of two jobs: the same classifier, text and seed with DDP and with ZeRO.
# ---------------------------------------------------------------------------


NAME = "Text classification, DDP against ZeRO"
RANKS = 2
STAGES = (1, 2, 3)
USUAL_STAGE = 2
TOKENS = 800_000  # about 200 steps
BUDGET_DEMOS = 2  # time budget on a slow host, in demo durations
# Pinned in both jobs, so that only the ZeRO stage differs.
PINS = {
    "data_parallel_size": RANKS,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "micro_batch_size": 8,
    "activation_recomputation": "none",
}


class Ready(NamedTuple):
    """The choices of the template: the host, and the ZeRO stage to compare with DDP."""

    hosts: tuple[Host, ...]
    stages: tuple[int, ...] = STAGES
    usual: int = USUAL_STAGE
    name: str = NAME


def ready_hosts(team: Team) -> tuple[Host, ...]:
    """Return the team's hosts that can run two ranks: CPU hosts, and two GPUs of one model."""
    hosts = Host.objects.filter(team=team, kind="agent", state=HostState.READY)
    return tuple(host for host in hosts.order_by("created_at") if _can_run_two_ranks(host))


def _can_run_two_ranks(host: Host) -> bool:
    names = [gpu["name"] for gpu in host.facts.get("gpus") or []]
    return bool(host.facts) and (not names or names.count(names[0]) >= RANKS)


def template_document(host: Host, zero_stage: int) -> PlanDocument:
    """Return the document of the classifier on a host; stage 0 is DDP."""
    return FinetunePlan(
        goal="finetune",
        model=ModelChoice(source="config", config=dict(DEMO_ENCODER)),
        workload=FinetuneWork(
            method="classification",
            sequence_length=128,
            global_batch_size=32,
            tokens=TOKENS,
            time_budget_seconds=demo_seconds(os.environ) * BUDGET_DEMOS,
            rows="padded",
        ),
        hardware=HardwareChoice(host=host.pk, ranks_per_host=RANKS),
        pins=Strategy(**PINS, zero_stage=zero_stage),
    )


@transaction.atomic
def launch_both(
    *, team: Team, by: User, host: Host, zero_stage: int, key: str = ""
) -> tuple[Job, Job]:
    """Queue both jobs or none; a repeated ``key`` returns the jobs of the first call.

    Raises:
        DraftProblem: one of the jobs cannot run on this host.
        Problem: the job service rejects a job.
    """
    plans = [_plan(team, by, host, stage) for stage in (0, zero_stage)]
    for plan in plans:
        launchable_of(plan)  # raises before either job is queued
    jobs = [
        plan_launch(
            plan=plan,
            by=by,
            name=f"Classifier, {word}",
            idempotency_key=f"{key}-{at}" if key else None,
        )
        for at, (plan, word) in enumerate(zip(plans, ("DDP", f"ZeRO-{zero_stage}"), strict=True))
    ]
    return jobs[0], jobs[1]


def _plan(team: Team, by: User, host: Host, zero_stage: int) -> Plan:
    draft = stored_draft(template_document(host, zero_stage), "template")
    plan = Plan.objects.create(team=team, owner=by, draft=draft)
    plan_compute(plan)
    return plan


# ---------------------------------------------------------------------------
# Template contexts of the wizard's pages, and detection of concurrent edits.
# ---------------------------------------------------------------------------


# Detection of concurrent edits of one draft, by two tabs or two people.
#
# Each form carries the version mark of its step as shown, and a page id. A page may overwrite its
# own changes; it overwrites another page's changes only with the user's consent. A page numbers
# its changes, so that a request that arrives after a later one writes nothing.


PAGE, OVER, TURN = "page", "over", "turn"
FIELDS_OF: Mapping[str, tuple[str, ...]] = {
    "goal": ("goal", *GOAL_FIELDS),
    "model": ("model",),
    "workload": ("goal", "workload"),
    "hardware": ("goal", "hardware", "pins"),
    "review": (),
}
TURN_DIGITS = 9


def step_mark(draft: Mapping[str, Any], step: str) -> str:
    """Return the version mark of a step's values; two steps depend on the goal as well.

    The workload's step has the model's rotary scaling too, beside the longest request.
    """
    shown = [draft.get(name) for name in FIELDS_OF[step]]
    if step == "workload":
        shown += [(draft.get("model") or {}).get("rope_scaling")]
    return mark_of(shown)


def form_marks(plan: Plan, step: str, posted: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return a form's hidden values; a form shown again with errors keeps its own."""
    if posted and posted.get(SEEN):
        return {"seen": posted[SEEN], "page": posted.get(PAGE, ""), "turn": str(_turn(posted))}
    return {"seen": step_mark(plan.draft, step), "page": new_ulid(), "turn": "0"}


def is_overtaken(
    plan: Plan, step: str, posted: Mapping[str, str], *, is_autosave: bool = False
) -> bool:
    """Return whether the same page has written the step after it sent this request.

    An autosave without a further change writes nothing either: it would change the revision that
    the user's next page has.
    """
    last = plan.edits.get(step) or {}
    if not posted.get(PAGE) or last.get("page") != posted[PAGE][:26]:
        return False
    turn, written = _turn(posted), int(last.get("turn", 0))
    return turn < written or (is_autosave and 0 < turn == written)


def _turn(posted: Mapping[str, str]) -> int:
    """Return the number of changes of a page when it sent a form; 0 without JavaScript."""
    text = posted.get(TURN, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) <= TURN_DIGITS else 0


def stale_words(plan: Plan, step: str, posted: Mapping[str, str], reader: str) -> str:
    """Return a sentence on who changed a step since the form was shown, or ""."""
    seen, mark = posted.get(SEEN, ""), step_mark(plan.draft, step)
    last = plan.edits.get(step) or {}
    is_own = bool(last) and (last.get("page"), last.get("mark")) == (posted.get(PAGE), mark)
    if not seen or posted.get(OVER) or seen == mark or is_own:
        return ""
    name = next(each.name for each in STEPS if each.slug == step).lower()
    what, at = f"The {name} of this draft was", last.get("at")
    return changed_words(what, str(last.get("by", "")), at, reader=reader)


def edit_note(plan: Plan, step: str, posted: Mapping[str, str], by: str) -> None:
    """Record on the plan who wrote a step, when, and from which page."""
    mark = step_mark(plan.draft, step)
    page = posted.get(PAGE, "")[:26]
    note = {"by": by, "at": now().isoformat(), "page": page, "mark": mark}
    plan.edits[step] = {**note, "turn": _turn(posted)}


Page = dict[str, Any]


class HostChoice(NamedTuple):
    """One host in the list of the hardware step."""

    value: str
    host: Host
    cells: tuple[str, ...]
    more: str
    contact: Contact


class PoolChoice(NamedTuple):
    """One pool of hosts in the list of the hardware step."""

    value: str
    name: str
    more: str


def compute_quietly(plan: Plan) -> None:
    """Compute the plan; errors of the draft are shown in the rail, not raised."""
    try:
        plan_compute(plan, brief=True)
    except DraftProblem:
        return


def step_page(
    plan: Plan,
    slug: str,
    form: StepForm | None = None,
    pins: PinsForm | None = None,
    launch: LaunchForm | None = None,
) -> Page:
    """Return the context of a step's page; submitted forms keep their errors."""
    options = options_for(plan, slug)
    document = plan.document
    rows = NamedRows(document, plan) if slug == "review" else None
    summary = summaries(document, rows.names if rows else options.names_of(document))
    before, after = neighbours(slug)
    form = form or step_form(slug, document, options)
    return {
        "plan": plan,
        "step": next(step for step in STEPS if step.slug == slug),
        "steps": stepper(plan, slug, summary),
        "before": before,
        "after": after,
        "form": form,
        "template": f"wizard/{slug}.html",
        **form_marks(plan, slug),
        **(_review(plan, rows, summary) if rows else _extras(plan, slug, options, form, pins)),
        **({"launch": launch} if launch else {}),
        **rail(plan, slug),
    }


def launch_form_of(plan: Plan, posted: QueryDict) -> LaunchForm:
    """Return the launch form that a review page sent."""
    document = plan.document
    note = _note_of(plan, NamedRows(document, plan))
    return launch_form(document.launch, plan.name, note, secret_names(plan.team), posted)


def _note_of(plan: Plan, rows: NamedRows) -> dict[str, Any]:
    """Return what a launch would do, with the goal that decides which options it has."""
    goal = rows.document.goal
    return {"goal": goal, "is_serving": goal == "serve", **launch_note(plan, rows)}


def _review(plan: Plan, rows: NamedRows, summary: Mapping[str, str]) -> Page:
    """Return the context of the review: the launch form, and what a launch would do."""
    document, note = rows.document, _note_of(plan, rows)
    wizard = plan.draft.get("wizard") or {}
    named = plan.name if plan.is_named is not False else ""
    title = named or plan_title(document.goal, summary["model"], summary["hardware"])
    whole = {**summary, "model": whole_model_words(document.model, rows.names.model)}
    return {
        "title": title,
        "launch": launch_form(document.launch, title, note, secret_names(plan.team)),
        "copied": wizard if "copied_job" in wizard else {},
        "imported": wizard.get("imported") or {},
        "saving": saving_of(plan),
        "review": [(step, whole[step.slug]) for step in STEPS[:-1]],
        "model_words": summary["model"],
        "note": note,
        "busy": busy_note(rows.host) if note.get("can") else None,
        "is_endpoint_first": "can_serve" in note and wizard.get("preset") != "benchmark",
        "launch_key": new_ulid(),
    }


def _extras(
    plan: Plan, slug: str, options: Options, form: StepForm | None, pins: PinsForm | None
) -> Page:
    """Return the context that only this step needs."""
    document = plan.document
    if slug == "goal":
        ready = Ready(ready_hosts(plan.team))
        return {"goals": GOAL_CHOICES, "ready": ready, "launch_key": new_ulid()}
    if slug == "model":
        named = form["catalog_id"].value() if form else ""
        return {
            "num_models": len(catalog_rows()),
            "shape_words": _catalog_words(named or ""),
            "demo_parameters": num_parameters(model_from_config(demo_config())),
        }
    if slug == "hardware":
        return {
            "pins": pins or pins_form(document),
            "has_pins": bool(document.pins.stated)
            or bool(pins and pins.errors)
            or bool(document.hardware.memory_limit_gib)
            or bool(document.hardware.engine),
            "other_pins": [
                (name, value)
                for name, value in document.pins.stated.items()
                if name not in {*SHOWN_PINS, "disaggregated"}
            ],
            "host_choices": [_host_choice(host) for host in options.hosts],
            "pool_choices": [_pool_choice(*each, plan.team) for each in options.pools],
            "has_ranks": bool(options.pools) or any(map(_has_several_gpus, options.hosts)),
        }
    return {
        "goal": document.goal,
        "limit_bytes": MAX_UPLOAD_BYTES,
        "upload_url": reverse("plan-upload", args=[plan.pk]),
    }


def shape_words(shape: ModelSpec) -> str:
    """Return a model's shape in one line."""
    heads = f"{shape.num_attention_heads} query heads, {shape.num_key_value_heads} KV heads"
    context = f"{whole(shape.max_position_embeddings)} tokens of context"
    layers = f"{shape.num_hidden_layers} layers"
    return f"{parameters(num_parameters(shape))} parameters · {layers} · {heads} · {context}"


def _host_choice(host: Host) -> HostChoice:
    if host.kind == "virtual":
        return HostChoice(f"host:{host.pk}", host, (), planned_words(host), Contact.UNKNOWN)
    if host.has_scheduler:
        return HostChoice(f"host:{host.pk}", host, (), _scheduler_words(host), contact_of(host))
    gpus = host.facts.get("gpus") or []
    cells = tuple(f"{round(gpu['memory_bytes'] / 1024**3)}" for gpu in gpus)
    words = [f"{len(gpus)} {TIMES} {short_name(gpus[0]['name'])}" if gpus else "CPU only"]
    if host.facts:
        words += [f"{host.facts['cpu_count']} cores", str(memory(host.facts["memory_bytes"]))]
    for device in (host.microbench.get("devices") or [])[:1]:
        words.append(f"{bandwidth(device['memory_bandwidth_bytes_per_second'])} measured")
    return HostChoice(f"host:{host.pk}", host, cells, " · ".join(words), contact_of(host))


def _has_several_gpus(host: Host) -> bool:
    return len(host.facts.get("gpus") or []) > 1


def _scheduler_words(host: Host) -> str:
    """Return the options of a scheduler's jobs; the host's own processor is not theirs."""
    scheduler = host.facts.get("scheduler") or {}
    options = [f"{name} {value}" for name, value in (scheduler.get("options") or {}).items()]
    most = f"{host.get_kind_display()}, {scheduler.get('max_jobs', 1)} jobs at once"
    return " · ".join([most, *options])


def _pool_choice(pool: Pool, hosts: Sequence[Host], team: Team) -> PoolChoice:
    """Return a pool's entry; for another team's pool, hosts are counted by kind, not named."""
    if pool.team_id == team.pk:
        names = ", ".join(host.name for host in hosts)
        more = f"{len(hosts)} hosts: {names}"
    else:
        kinds = Counter(_devices_words(host) for host in hosts)
        counted = [(f"{n} hosts" if n > 1 else "1 host", words) for words, n in kinds.items()]
        more = ", ".join(f"{count} with {words}" for count, words in counted)
    return PoolChoice(f"pool:{pool.pk}", pool_words(pool, team), more)


def _devices_words(host: Host) -> str:
    gpus = host.facts.get("gpus") or []
    if gpus:
        return f"{len(gpus)} {TIMES} {short_name(gpus[0]['name'])}"
    cores = host.facts.get("cpu_count")
    return f"{cores} cores, no GPU" if cores else "no GPU"


def rail(plan: Plan, slug: str = "") -> Page:
    """Return the context of the right rail: the verdict and the suggested changes.

    Suggestions take longer to compute than a verdict: if they are missing, the rail loads them
    in a second request.
    """
    page: Page = {"plan": plan, "slug": slug}
    try:
        answer = verdict_answer(plan)
    except DraftProblem as problem:
        verdict = problem_verdict(problem.sentence, is_refused=problem.is_refused)
        engines = engines_named(problem.sentence, plan.document) if problem.is_refused else {}
        return {**page, "verdict": verdict, "offers": [], "engines": engines}
    url, document = reverse("plan-tab", args=[plan.pk, "why"]), plan.document
    return {
        **page,
        "verdict": verdict_of(answer, document, url, speed=planned_speed(plan)),
        "offers": offers_of(answer, document),
        "has_offers_to_come": lacks_suggestions(plan),
        "price": price_of(answer.plans[0] if answer.plans else None),
    }


def offers_found(plan: Plan) -> list[Offers]:
    """Return the suggested changes; compute and store the full answer if needed."""
    try:
        return offers_of(current_answer(plan), plan.document)
    except DraftProblem:
        return []


def live(plan: Plan, slug: str) -> Page:
    """Return the context of a partial update after a save: rail, stepper and model card."""
    document = plan.document
    summary = summaries(document, options_for(plan).names_of(document))
    page = {**rail(plan, slug), "steps": stepper(plan, slug, summary)}
    if slug == "model":
        page["shape_words"] = _catalog_words(document.model.catalog_id)
    return page


def _catalog_words(model: str) -> str:
    shape = find_model(model)
    return shape_words(shape) if shape else ""


def problem_rail(plan: Plan, page: Page) -> Page:
    """Return the context of the rail for an invalid form: its first error."""
    forms = [form for form in (page["form"], page.get("pins")) if form is not None]
    errors = [text for form in forms for texts in form.errors.values() for text in texts]
    stale = page.get("stale", "")
    sentence = stale or (errors[0] if errors else "Something on this page is not valid.")
    rail = {"plan": plan, "verdict": problem_verdict(sentence), "offers": [], "is_unsaved": True}
    return rail | {"stale": stale, "slug": page["step"].slug}
